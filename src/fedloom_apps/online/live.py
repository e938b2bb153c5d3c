"""A learner outside a stream: tasks come from the caller, and only what the learner stores is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.base.errors import ClientError, ConfigError
from fedloom.config.keys import DATA, Shared
from fedloom.core.federation import Arrays
from fedloom.core.parts import Batch
from fedloom.data.like import inputs_like, labelled_like
from fedloom.experiment import trainer
from fedloom.experiment.conventions import refusing_unknown_tokens, table_of
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.trained import RunRecords
from fedloom_apps.online.config import ONLINE, build
from fedloom_apps.online.streams import Task
from fedloom_apps.online.task import OnlineTask

LabelledSamples = tuple[Any, Any]
"""Inputs x [n, ...], as arrays, tensors, or a table or texts if the run's data were, and labels y [n]."""


class LiveLearner(RunRecords):
    """The experts of an online run and their weights after one of its tasks; tasks observed here are not recorded.

    Models are adapted to a task's support samples; ``predict`` leaves the learner unchanged, ``observe`` trains it.
    Observing the tasks of a stream one by one gives the bits of the run over that stream.

    Args:
        task: the run, at the task where the learner begins.
        history: one record per task of the run so far; ``LiveLearner.history`` is their frame.
        summary: the content of ``summary.json``; empty if the run has not ended.
        path: the run directory, if there is one.
        table: how the run's inputs were made of a table or texts, as ``table_of`` has it.

    Raises:
        ConfigError: for learners that train on a task before they predict it, such as ``toe``.
    """

    def __init__(
        self,
        task: OnlineTask,
        history: Sequence[Mapping[str, Any]] = (),
        summary: Mapping[str, Any] | None = None,
        path: Path | None = None,
        table: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(history, summary or {}, path)
        if any(expert.learner.learns_first for expert in task.online.experts):
            raise ConfigError(f"learner {task.name!r} trains on a task before it predicts it, so it cannot be live.")
        self._task, self.state, self.total, self.tasks_seen = task, task.state, task.total, task.round
        self._like, self._table = task.online.stream[0].train, table or {}

    def __repr__(self) -> str:
        experts = f"{len(self.total)} experts" if len(self.total) > 1 else "1 expert"
        return f"<LiveLearner {self._task.name!r}: {experts}, {self.tasks_seen} tasks>"

    @property
    def p(self) -> Tensor:
        """Hedge's weights of the experts, float64 [E]."""
        return self._task.online.hedge.p(self.total)

    def predict(self, support: LabelledSamples, x: Any) -> Tensor:
        """Class probabilities Σ_e p_e softmax(f_e(x)), [N, C], of inputs x [N, ...] after adaptation to the support.

        Experts whose predictions are not finite are left out.

        Raises:
            ClientError: if no expert's predictions are finite.
            ConfigError: if there is no support sample.
            DataError: if inputs or labels do not fit the run's.
        """
        with reproducible():
            active = torch.tensor(self._task.online.hedge.active(self.total))
            logits = self._logits(support, x, active.tolist())
            finite = torch.isfinite(logits).flatten(1).all(1).cpu()
            if not bool(finite.any()):
                raise ClientError("all experts' predictions have become infinite or NaN; lower local.lr.")
            p = self._task.online.hedge.p(self.total[active[finite]])
            return torch.einsum("e,enc->nc", p.to(logits), logits[finite].softmax(-1))

    def observe(self, support: LabelledSamples, answers: LabelledSamples | None = None) -> None:
        """Learn a task from its support samples, as a run does after it has scored its prediction.

        An expert whose model diverges is left out from then on, whether there are answers or not.

        Args:
            support: the task's training samples.
            answers: further samples of the task, by which Hedge weights the experts; without them p is unchanged. A run
                uses the task's test samples.

        Raises:
            ConfigError: if there is no support sample.
            DataError: if inputs or labels do not fit the run's.
        """
        with reproducible():
            self._observe(support, answers)

    def _observe(self, support: LabelledSamples, answers: LabelledSamples | None) -> None:
        online, evaluator = self._task.online, self._task.evaluator
        train, total = self._arrays(support), self.total
        active = list(online.hedge.active(total))
        if answers is not None:
            test = self._arrays(answers, "further")
            logits = self._logits(support, test.x, active)
            accuracy, loss = evaluator.score(logits, Task(self.tasks_seen, train, test), active)
            losses = 1 - accuracy if online.hedged == "error" else loss
            total = online.hedge.update(total, torch.where(torch.isfinite(loss), losses, float("inf")))
        ensemble = self._task.ensemble
        with refusing_unknown_tokens(ensemble.model, ensemble.on_host, train.x):
            self.state, _ = ensemble.learn(self.state, self.tasks_seen, evaluator.to_device(train), active)
        self.total = torch.where(self._task.ensemble.is_finite(self.state), total, float("inf"))
        self.tasks_seen += 1

    def _logits(self, support: LabelledSamples, x: Any, active: list[int]) -> Tensor:
        ensemble, to_device = self._task.ensemble, self._task.evaluator.to_device
        train, x = to_device(self._arrays(support)), self._inputs(x)
        queries = to_device(Arrays(x, torch.zeros(len(x), dtype=torch.long), ensemble.classes))
        with refusing_unknown_tokens(ensemble.model, ensemble.on_host, train.x, queries.x):
            return ensemble.predict(self.state, Batch(train.x, train.y), queries.x, active)

    def _arrays(self, samples: LabelledSamples, what: str = "support") -> Arrays:
        if not isinstance(samples, (tuple, list)) or len(samples) != 2:
            raise ConfigError(f"{what} samples of a task are a pair (x, y) of inputs and labels.")
        x, y = samples
        if not len(x):
            raise ConfigError(f"a live learner needs at least one {what} sample of a task.")
        return labelled_like(self._like, self._inputs(x), y)

    def _inputs(self, x: Any) -> Tensor:
        return inputs_like(self._like, self._table, x)


def load(path: Path | str) -> LiveLearner:
    """The learner of a run of ``fedloom online``, as of its newest checkpoint.

    ``learner.predict((x, y), new_x)`` gives class probabilities, and ``learner.observe((x, y))`` learns a task;
    ``learner.history`` is the run's record as a pandas frame. The run directory is only read; errors are those of
    ``fedloom.load``.

    Raises:
        ConfigError: if it is another kind of run, or one started from Python, which does not record its model.
        CheckpointError: if it is not a run directory, or has no checkpoint that can be read.
        DataError: if the run's data are not on this machine.
    """
    directory, config = ONLINE.of_run(path, "use LiveLearner(OnlineTask(experiment)) instead")
    shared = Shared()
    task = OnlineTask(build(config, shared))
    source = shared("source", config.values["data"], DATA.instantiate)
    table = table_of({"source": source.describe()})
    return LiveLearner(task, trainer.load(task, directory), directory.summary(), directory.path, table)
