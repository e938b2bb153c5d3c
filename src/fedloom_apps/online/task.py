"""Online runs: every task of the stream is predicted, scored and only then learned."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import CheckpointError, ClientError
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.conventions import refusing_unknown_tokens
from fedloom.experiment.rundir import Columns, Status
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.store import flat, nested
from fedloom.experiment.trainer import Record, Trainer, TrainerTask
from fedloom.rounds.exchange import State
from fedloom_apps.online.ensemble import MEMORY, state_bytes, task_bytes, task_entries
from fedloom_apps.online.evaluate import StreamEvaluator, summarise
from fedloom_apps.online.experiment import Online
from fedloom_apps.online.learners import weighted_sum
from fedloom_apps.online.streams import Task


@dataclass
class OnlineResult:
    """The result of an online run.

    Attributes:
        history: one record per task, as in ``metrics.jsonl``.
        summary: the content of ``summary.json``.
        state: the experts' final state.
        p: Hedge's final weights of the experts, float64 [E].
    """

    history: list[Record]
    summary: dict[str, Any]
    state: State
    p: Tensor


def run(
    online: Online,
    out: Path | str | None = None,
    *,
    resume: bool | Path | str = False,
    checkpoint_every: int = 100,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
) -> OnlineResult:
    """Run an online experiment, from the start of its stream or from a checkpoint.

    Settings of the run directory are those of ``fedloom.experiment.federated.run``, with tasks in place of rounds;
    callbacks' ``on_step`` receives a ``StreamStep``.

    Raises:
        ConfigError: if the model does not fit the tasks.
        ClientError: if no expert's predictions are finite.
    """
    with reproducible():
        task = OnlineTask(online)
        summary = Trainer(task, out, checkpoint_every=checkpoint_every, keep=keep, callbacks=callbacks).run(resume)
        return OnlineResult(task.history, summary, task.state, online.hedge.p(task.total))


class StreamStep(NamedTuple):
    """The outcome of a task before it is committed: its record and the state after it."""

    record: Record
    state: State
    total: Tensor


class OnlineTask(TrainerTask):
    """An online experiment as a task of the trainer; a round is one task of the stream."""

    kind = "online"
    headline = "ctm/accuracy/mean"

    def __init__(self, online: Online) -> None:
        super().__init__()
        self.online, self.name, self.rounds, self.seed = online, online.name, len(online.stream), online.seed
        self.config, self.citations = online.config, "\n\n".join(online.citations()) + "\n"
        self.ensemble = online.ensemble()
        self.evaluator = StreamEvaluator(online, self.ensemble)
        self.state = self.ensemble.init()
        self.total = online.hedge.init(len(online.experts))

    def identity(self) -> dict[str, Any]:
        first = self.online.stream[0]
        digest = hashlib.sha256(first.train.x.numpy().tobytes() + first.train.y.numpy().tobytes()).hexdigest()[:16]
        theta = hashlib.sha256(self.ensemble.init()["0"]["w"].cpu().numpy().tobytes()).hexdigest()[:16]
        return {**self.online.describe(), "stream": {"digest": digest}, "model": {"digest": theta}}

    def step(self) -> StreamStep:
        task = self.online.stream[self.round]
        with refusing_unknown_tokens(self.ensemble.model, self.ensemble.on_host, task.train.x, task.test.x):
            return self._step(task)

    def _step(self, task: Task) -> StreamStep:
        online, ensemble, measures, t = self.online, self.ensemble, self.online.measures, self.round
        p = online.hedge.p(self.total)
        active = online.hedge.active(self.total)
        train = self.evaluator.to_device(task.train)
        early_experts = [e for e in active if online.experts[e].learner.learns_first]
        early_result = ensemble.learn(self.state, t, train, active) if early_experts else None
        logits = self.evaluator.predict(self.state, task, active)
        if early_result is not None:
            rows = torch.tensor([list(active).index(e) for e in early_experts], device=logits.device)
            logits = logits.index_copy(0, rows, self.evaluator.predict(early_result[0], task, early_experts))
        accuracy, loss = self.evaluator.score(logits, task, active)
        finite = torch.isfinite(loss)
        if not bool(finite.any()):
            raise ClientError(f"at task {t + 1} all experts' predictions have become infinite or NaN; lower local.lr.")
        accuracies = [r["ctm/accuracy"] for r in self.history]
        record: Record = {
            "round": t + 1,
            "ctm/accuracy": weighted_sum(p, accuracy),
            "ctm/loss": weighted_sum(p, loss),
            "experts/accuracy": [value if np.isfinite(value) else None for value in accuracy.tolist()],
            "hedge/p": p.tolist(),
        }
        record["ctm/accuracy/mean"] = float(np.mean([*accuracies, record["ctm/accuracy"]]))
        if absent := self.evaluator.count_absent(logits, task):
            record["ctm/absent"] = absent
        if _is_due(t, measures.efficiency_every):
            record |= self.evaluator.efficiency(self.state, task, p)
        losses = 1 - accuracy if online.hedged == "error" else loss
        total = online.hedge.update(self.total, torch.where(finite, losses, float("inf")))
        record["hedge/loss"] = weighted_sum(p, losses)
        state, train_losses = early_result or ensemble.learn(self.state, t, train, active)
        record["train/loss"] = weighted_sum(online.hedge.p(total), train_losses)
        record |= {
            "memory/tasks": len(state[MEMORY]) // 2,
            "memory/task_bytes": task_bytes(state),
            "memory/state_bytes": state_bytes(state),
        }
        if _is_due(t, measures.ltm_every) or t + 1 == self.rounds:
            record |= self.evaluator.long_term(state, t + 1, online.hedge.p(total))
        return StreamStep(record, state, total)

    def commit(self, step: StreamStep) -> tuple[Record, dict[str, Columns]]:
        self.state, self.total, self.round = step.state, step.total, self.round + 1
        return step.record, {}

    def snapshot(self) -> Checkpoint:
        models = {place: tree for place, tree in self.state.items() if place != MEMORY}  # the stream has the tasks
        return Checkpoint(self.round, {"state": flat(models), "hedge": {"total": self.total}})

    def restore(self, checkpoint: Checkpoint) -> None:
        if checkpoint.round > self.rounds:
            raise CheckpointError(f"the checkpoint of task {checkpoint.round} is past the {self.rounds} tasks.")
        saved_state, task_numbers = nested(checkpoint.tensors["state"]), set[int]()
        for place in self.state.keys() - {MEMORY}:
            group_state = {name: saved_state[place][name] for name in self.state[place]}
            self.state[place] = {k: v if k == "held" else v.to(self.ensemble.device) for k, v in group_state.items()}
            task_numbers |= set(group_state["held"].tolist())
        for number in sorted(task_numbers):
            if not 0 <= number < checkpoint.round:
                raise ValueError(f"it stores task {number + 1}, which it has not seen")
            self.state[MEMORY] |= task_entries(number, self.evaluator.to_device(self.online.stream[number].train))
        self.total, self.round = checkpoint.tensors["hedge"]["total"], checkpoint.round

    def summarise(self, status: Status) -> dict[str, Any]:
        return summarise(self.online, self.history, self.total, self.ensemble.plan(0)[0].layout.size)


def _is_due(t: int, every: int) -> bool:
    return every > 0 and (t + 1) % every == 0
