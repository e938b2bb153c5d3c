"""Evaluation of the experts: on the new task, on all tasks so far, and with fewer samples; states are not changed.

Metrics of online meta-learning (Acar, thesis 2023, 5.3 and A.1.4).

- **CTM**, the current task metric: the model before learning a task is adapted with the task's training samples and
  evaluated on its test samples; the mean over tasks. Records also hold the running mean.
- **LTM**, the long-term task metric: the latest model is adapted to each task seen so far and evaluated; the mean over
  those tasks. The thesis computes it in every round and defines the metric as (1/T) Σ f^t∘U^t(w^{T+1}): the number of a
  run is therefore its last value, and the summary also holds the mean over the rounds at which it was measured.
- **Task learning efficiency**: the number of a task's training samples with which the model must be adapted, before
  learning the task, to reach a given accuracy; interpolated between the sizes tried, which the thesis leaves open.
- **Regret** against a fixed model. The best one in hindsight is unknown for networks; against the final model it is
  Σ f^t∘U^t(w^t) - Σ f^t∘U^t(w^{T+1}), a lower bound of the regret of eq. 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.core.federation import Arrays
from fedloom.core.parts import Term
from fedloom.core.targets import one_class_each
from fedloom.rounds.exchange import State
from fedloom.rounds.meta import NEVER
from fedloom_apps.online.ensemble import ExpertEnsemble
from fedloom_apps.online.experiment import Online
from fedloom_apps.online.learners import weighted_sum
from fedloom_apps.online.streams import Task


def scores(logits: Tensor, y: Tensor, term: Term) -> tuple[Tensor, Tensor]:
    """Accuracy and loss [...] of predictions [..., N, C] for targets [..., N]: means over the N samples.

    >>> from fedloom.parts.objectives import CrossEntropy
    >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])  # one expert, two samples
    >>> accuracy, loss = scores(logits, torch.tensor([0, 1]), CrossEntropy())
    >>> accuracy.tolist(), round(float(loss), 3)
    ([0.5], 0.41)
    """
    lead, count = logits.shape[:-1], logits.shape[-1]
    inner = y.shape[len(lead) - 1 :]  # of one target: none for a class
    targets = y.expand(*lead, *inner)
    is_correct = torch.zeros(lead) if y.is_floating_point() else (logits.argmax(-1) == targets).double()
    batch = Batch(torch.zeros(0), targets.reshape(-1, *inner))
    loss = term.loss(Output(logits.reshape(-1, count)), batch, NO_ROUND).double().view(lead)
    return is_correct.mean(-1), loss.mean(-1)


def samples_needed(sizes: Sequence[int], accuracies: Sequence[float], target: float) -> float | None:
    """The number of training samples needed to reach an accuracy, interpolated between sizes; None if none suffices.

    >>> samples_needed((0, 10, 20), (0.25, 0.5, 1.0), 0.75)
    15.0
    >>> samples_needed((0, 10), (0.1, 0.2), 0.7) is None, samples_needed((0, 10), (0.8, 0.9), 0.7)
    (True, 0.0)
    """
    for i, accuracy in enumerate(accuracies):
        if accuracy >= target:
            if not i:
                return float(sizes[0])
            before = accuracies[i - 1]
            return sizes[i - 1] + (sizes[i] - sizes[i - 1]) * (target - before) / (accuracy - before)
    return None


@dataclass(frozen=True)
class StreamEvaluator:
    """Scores the experts' predictions; it alone has access to test labels."""

    online: Online
    ensemble: ExpertEnsemble

    def to_device(self, arrays: Arrays) -> Arrays:
        """Arrays in the experiment's dtype and on its device."""
        x = arrays.x.to(getattr(torch, self.online.dtype)) if arrays.x.is_floating_point() else arrays.x
        y = arrays.y.to(x.dtype) if arrays.y.is_floating_point() and x.is_floating_point() else arrays.y
        return Arrays(x.to(self.ensemble.device), y.to(self.ensemble.device), arrays.classes)

    def predict(self, state: State, task: Task, only: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """Logits on the task's test samples [E, N, C], after adaptation to its training samples (or ``rows`` of them).

        The experts do not receive the test labels.
        """
        train, x = self.to_device(task.train), self.to_device(task.test).x
        support = Batch(train.x, train.y) if rows is None else Batch(train.x[rows], train.y[rows])
        return self.ensemble.predict(state, support if len(support.x) else None, x, only)

    def score(self, logits: Tensor, task: Task, only: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Accuracy and loss [E] on a task's test samples from the logits of some experts; NaN for the others."""
        accuracy, loss = scores(logits, self.to_device(task.test).y, self.online.objective[0])
        result = torch.full((2, len(self.online.experts)), float("nan"), dtype=torch.float64)
        result[:, list(only)] = torch.stack([accuracy.cpu(), loss.cpu()]).double()
        return result[0], result[1]

    def count_absent(self, logits: Tensor, task: Task) -> int:
        """The number of test samples whose class an expert never predicts, as the task has no training sample of it."""
        y = self.to_device(task.test).y
        if not one_class_each(y):
            return 0
        class_logits = logits.gather(-1, y.expand(len(logits), -1)[..., None])
        return int((class_logits == NEVER).any(0).sum())

    def efficiency(self, state: State, task: Task, p: Tensor) -> dict[str, Any]:
        """The mixture's accuracy after adapting with each of ``sizes`` samples of the task, in random order.

        With 0 samples the models are not adapted; sizes above the task's own use the whole task.
        """
        sizes, only = self.online.measures.sizes, leading_experts(p, self.online.measures.tolerance)
        shares = p[only] / p[only].sum()
        order = torch.from_numpy(rng.stream(self.online.seed, "efficiency", task.number).permutation(len(task.train)))
        accuracies: list[float] = []
        for size in sizes:
            accuracy, _ = self.score(self.predict(state, task, only, order[:size]), task, only)
            accuracies.append(weighted_sum(shares, accuracy[only]))
        samples = samples_needed(sizes, accuracies, self.online.measures.target)
        return {"efficiency/accuracy": accuracies, "efficiency/samples": samples}

    def long_term(self, state: State, task_count: int, p: Tensor) -> dict[str, float]:
        """The mixture's mean accuracy and loss on the first ``task_count`` tasks, each generated again and adapted to.

        With ``ltm_tasks``, only that many of them: the first ones in a random order, which longer streams extend.
        """
        only = leading_experts(p, self.online.measures.tolerance)
        shares = p[only] / p[only].sum()
        correct, loss = torch.zeros(len(only), dtype=torch.float64), torch.zeros(len(only), dtype=torch.float64)
        start, chunk, count = 0, self.online.measures.at_once, self.online.measures.ltm_tasks or task_count
        order = rng.stream(self.online.seed, "long term").random(task_count).argsort(kind="stable")
        numbers = sorted(order[:count].tolist())
        while start < len(numbers):
            tasks = [self.online.stream[n] for n in numbers[start : start + chunk]]
            splits = [(self.to_device(task.train), self.to_device(task.test)) for task in tasks]
            shapes = {(train.x.shape, test.x.shape) for train, test in splits}
            if len(shapes) == 1:
                support = Batch(torch.stack([a.x for a, _ in splits]), torch.stack([a.y for a, _ in splits]))
                x, y = torch.stack([b.x for _, b in splits]), torch.stack([b.y for _, b in splits])
                logits = self.ensemble.predict(state, support, x, only, many=True)  # [E, T, N, C]
                accuracy, losses = scores(logits, y, self.online.objective[0])
                correct, loss = correct + accuracy.cpu().sum(1), loss + losses.cpu().sum(1)
            else:
                for train, test in splits:
                    logits = self.ensemble.predict(state, Batch(train.x, train.y), test.x, only)
                    accuracy, losses = scores(logits, test.y, self.online.objective[0])
                    correct, loss = correct + accuracy.cpu(), loss + losses.cpu()
            start += len(tasks)
        return {"ltm/accuracy": weighted_sum(shares, correct / start), "ltm/loss": weighted_sum(shares, loss / start)}


def leading_experts(p: Tensor, tolerance: float) -> list[int]:
    """The smallest set of experts whose weights sum to at least 1 - ``tolerance``, in ascending order."""
    order = torch.argsort(p, descending=True, stable=True)
    missing_weight = 1 - torch.cumsum(p[order], 0)
    is_enough = missing_weight <= tolerance
    last = int(is_enough.nonzero()[0]) if bool(is_enough.any()) else len(p) - 1
    return sorted(order[: last + 1].tolist())


def summarise(online: Online, history: Sequence[dict[str, Any]], total: Tensor, parameters: int) -> dict[str, Any]:
    """The content of ``summary.json`` for an online run."""
    final = history[-1] if history else {}
    long_term = [record for record in history if record.get("ltm/accuracy") is not None]
    losses = [record["ctm/loss"] for record in history]
    mixture_losses = [record["hedge/loss"] for record in history]  # None where it was not finite
    p = online.hedge.p(total)
    best = int(torch.argmin(total))
    summary: dict[str, Any] = {
        "parameters": parameters,
        "final": {k: v for k, v in final.items() if k not in ("round", "seconds", "hedge/p", "experts/accuracy")},
        "ctm": {"accuracy": final.get("ctm/accuracy/mean"), "loss": _mean(losses)},
        "ltm": None,
        "memory": {
            "task_bytes": final.get("memory/task_bytes", 0),
            "tasks": final.get("memory/tasks", 0),
            "state_bytes": final.get("memory/state_bytes", 0),
            "state_bytes_per_expert": final.get("memory/state_bytes", 0) // max(len(online.experts), 1),
        },
        "hedge": {
            "gamma": online.hedge.gamma,
            "loss": None if None in mixture_losses else sum(mixture_losses),
            "best": online.labels()[best],
            "best_loss": float(total[best]),
            "bound": online.hedge.bound(float(total[best]), len(total)) if online.hedged == "error" else None,
            "p": dict(zip(online.labels(), p.tolist(), strict=True)),
        },
        "warnings": _warnings(total, online.labels(), history, long_term),
    }
    if long_term:
        last = long_term[-1]
        summary["ltm"] = {
            "accuracy": last["ltm/accuracy"],
            "loss": last["ltm/loss"],
            "round": last["round"],
            "mean": _mean([record["ltm/accuracy"] for record in long_term]),
        }
        covers_all = not 0 < online.measures.ltm_tasks < len(history)
        if last["round"] == len(history) and covers_all and None not in (*losses, last["ltm/loss"]):
            summary["regret_to_final_model"] = float(np.sum(losses) - np.sum([last["ltm/loss"]] * len(history)))
    accuracies = [record["efficiency/accuracy"] for record in history if "efficiency/accuracy" in record]
    if accuracies:
        summary["efficiency"] = {
            "sizes": list(online.measures.sizes),
            "accuracy": [_mean(column) for column in zip(*accuracies, strict=True)],
        }
    return summary


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _warnings(
    total: Tensor, labels: Sequence[str], history: Sequence[dict[str, Any]], long_term: Sequence[dict[str, Any]]
) -> list[str]:
    lost_experts = [label for label, value in zip(labels, total.tolist(), strict=True) if value == float("inf")]
    warnings = []
    if lost_experts:
        warnings.append(f"{len(lost_experts)} of {len(labels)} experts diverged: {'; '.join(lost_experts)}.")
    if count := [record["ctm/loss"] for record in history].count(None):
        warnings.append(
            f"the mixture's loss was infinite or NaN at {count} of {len(history)} tasks, left out of its mean."
        )
    if count := [record["ltm/loss"] for record in long_term].count(None):
        warnings.append(
            f"the mixture's loss on earlier tasks was infinite or NaN in {count} of {len(long_term)} long-term "
            "evaluations: lower local.lr or adaptation.lr."
        )
    if counts := [record["ctm/absent"] for record in history if "ctm/absent" in record]:
        warnings.append(
            f"at {len(counts)} of {len(history)} tasks, {sum(counts)} test samples were of classes without training "
            "samples in their task, which the adaptation never predicts: they count as wrong, and each as a loss of "
            f"{-NEVER:g}; give tasks more training samples (stream.train), or choose adaptation=maml."
        )
    return warnings
