"""Evaluation of the experts: on the new task, on all tasks so far, and with fewer samples; states are not changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.client import State
from fedloom.core.federation import Arrays
from fedloom.core.meta import NEVER
from fedloom.core.parts import Batch
from fedloom.core.targets import one_class_each
from fedloom_apps.online.ensemble import ExpertEnsemble
from fedloom_apps.online.experiment import Online
from fedloom_apps.online.hedge import mixed
from fedloom_apps.online.metrics import samples_needed, scores
from fedloom_apps.online.streams import Task


@dataclass(frozen=True)
class StreamEvaluator:
    """Scores the experts' predictions; it alone has access to test labels.

    Args:
        online: the experiment.
        ensemble: its ensemble of experts.
    """

    online: Online
    ensemble: ExpertEnsemble

    def placed(self, arrays: Arrays) -> Arrays:
        """Arrays in the experiment's dtype and on its device."""
        x = arrays.x.to(getattr(torch, self.online.dtype)) if arrays.x.is_floating_point() else arrays.x
        y = arrays.y.to(x.dtype) if arrays.y.is_floating_point() and x.is_floating_point() else arrays.y
        return Arrays(x.to(self.ensemble.device), y.to(self.ensemble.device), arrays.classes)

    def predict(self, state: State, task: Task, only: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """Logits on the task's test samples [E, N, C], after adaptation to its training samples (or ``rows`` of them).

        The experts do not receive the test labels.
        """
        train, x = self.placed(task.train), self.placed(task.test).x
        if rows is not None and not len(rows):
            return self.ensemble.unadapted(state, x, only)
        support = Batch(train.x, train.y) if rows is None else Batch(train.x[rows], train.y[rows])
        return self.ensemble.predict(state, support, x, only)

    def score(self, logits: Tensor, task: Task, only: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Accuracy and loss [E] on a task's test samples from the logits of some experts; NaN for the others."""
        accuracy, loss = scores(logits, self.placed(task.test).y, self.online.objective[0])
        result = torch.full((2, len(self.online.experts)), float("nan"), dtype=torch.float64)
        result[:, list(only)] = torch.stack([accuracy.cpu(), loss.cpu()]).double()
        return result[0], result[1]

    def absent(self, logits: Tensor, task: Task) -> int:
        """The number of test samples whose class an expert never predicts, as the task has no training sample of it."""
        y = self.placed(task.test).y
        if not one_class_each(y):
            return 0
        own = logits.gather(-1, y.expand(len(logits), -1)[..., None])
        return int((own == NEVER).any(0).sum())

    def efficiency(self, state: State, task: Task, p: Tensor) -> dict[str, Any]:
        """The mixture's accuracy after adapting with each of ``sizes`` samples of the task, in random order.

        With 0 samples the models are not adapted; sizes above the task's own use the whole task.
        """
        sizes, only = self.online.measures.sizes, trusted(p, self.online.measures.tolerance)
        shares = p[only] / p[only].sum()
        order = torch.from_numpy(rng.stream(self.online.seed, "efficiency", task.number).permutation(len(task.train)))
        reached: list[float] = []
        for size in sizes:
            accuracy, _ = self.score(self.predict(state, task, only, order[:size]), task, only)
            reached.append(mixed(shares, accuracy[only]))
        needed = samples_needed(sizes, reached, self.online.measures.target)
        return {"efficiency/accuracy": reached, "efficiency/samples": needed}

    def long_term(self, state: State, tasks_seen: int, p: Tensor) -> dict[str, float]:
        """The mixture's mean accuracy and loss on the first ``tasks_seen`` tasks, each generated again and adapted to.

        With ``ltm_tasks``, only that many: those that come first in a random order, which longer streams extend.
        """
        only = trusted(p, self.online.measures.tolerance)
        shares = p[only] / p[only].sum()
        right, loss = torch.zeros(len(only), dtype=torch.float64), torch.zeros(len(only), dtype=torch.float64)
        start, at_once, count = 0, self.online.measures.at_once, self.online.measures.ltm_tasks or tasks_seen
        order = rng.stream(self.online.seed, "long term").random(tasks_seen).argsort(kind="stable")
        numbers = sorted(order[:count].tolist())
        while start < len(numbers):
            tasks = [self.online.stream[n] for n in numbers[start : start + at_once]]
            splits = [(self.placed(task.train), self.placed(task.test)) for task in tasks]
            shapes = {(train.x.shape, test.x.shape) for train, test in splits}
            if len(shapes) == 1:
                support = Batch(torch.stack([a.x for a, _ in splits]), torch.stack([a.y for a, _ in splits]))
                x, y = torch.stack([b.x for _, b in splits]), torch.stack([b.y for _, b in splits])
                logits = self.ensemble.predict(state, support, x, only, many=True)  # [E, T, N, C]
                accuracy, losses = scores(logits, y, self.online.objective[0])
                right, loss = right + accuracy.cpu().sum(1), loss + losses.cpu().sum(1)
            else:
                for train, test in splits:
                    logits = self.ensemble.predict(state, Batch(train.x, train.y), test.x, only)
                    accuracy, losses = scores(logits, test.y, self.online.objective[0])
                    right, loss = right + accuracy.cpu(), loss + losses.cpu()
            start += len(tasks)
        return {"ltm/accuracy": mixed(shares, right / start), "ltm/loss": mixed(shares, loss / start)}


def trusted(p: Tensor, tolerance: float) -> list[int]:
    """The smallest set of experts whose weights sum to at least 1 - ``tolerance``, in ascending order.

    >>> trusted(torch.tensor([0.0005, 0.6, 0.3995]), 0.001)
    [1, 2]
    """
    order = torch.argsort(p, descending=True, stable=True)
    lacking = 1 - torch.cumsum(p[order], 0)
    enough = int((lacking <= tolerance).nonzero()[0]) if bool((lacking <= tolerance).any()) else len(p) - 1
    return sorted(order[: enough + 1].tolist())
