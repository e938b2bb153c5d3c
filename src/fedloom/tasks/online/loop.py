"""The loop over tasks: predict, record, score, learn; checkpoint, and go on after anything that stopped it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError, ClientError, ConfigError
from fedloom.core.round import Server
from fedloom.core.tree import Tree
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.checkpoint import Snapshot
from fedloom.experiment.fingerprint import differences
from fedloom.experiment.interrupt import Interruptible
from fedloom.experiment.loop import Progress, Silent
from fedloom.experiment.rundir import VERSION, Kind, RunDirectory
from fedloom.experiment.runtime import environment, one_thread
from fedloom.experiment.store import MemoryStore
from fedloom.tasks.online.bank import MEMORY, state_bytes, task_bytes
from fedloom.tasks.online.evaluate import Evaluator
from fedloom.tasks.online.experiment import Online
from fedloom.tasks.online.hedge import mixed
from fedloom.tasks.online.summary import summarise

FIRST, HEDGE = "0", "hedge"


@dataclass
class OnlineResult:
    """What an online run found.

    Attributes:
        history: one record a task, as in ``metrics.jsonl``.
        summary: as in ``summary.json``.
        state: the experts' final state.
        p: how far Hedge trusts each expert in the end, float64 [E].
    """

    history: list[dict[str, Any]]
    summary: dict[str, Any]
    state: State
    p: Tensor


def run(
    online: Online,
    out: Path | str | None = None,
    *,
    resume: bool | Path = False,
    checkpoint_every: int = 100,
    keep: int = 2,
    progress: Progress | None = None,
) -> OnlineResult:
    """Go through the stream, from its start or from a checkpoint.

    Args:
        online: what to run.
        out: run directory; None keeps everything in memory.
        resume: True goes on from the newest checkpoint in ``out``, a path from that checkpoint.
        checkpoint_every: tasks between checkpoints; one is written at the end and on Ctrl-C in any case. A checkpoint
            holds what the learner keeps, so that FTML's grow.
        keep: how many checkpoints stay.
        progress: shows the run.

    Raises:
        ConfigError: if the model does not fit the tasks.
        CheckpointError: if ``out`` is taken, cannot be written, or holds another experiment.
        ClientError: if no expert's predictions are finite any more.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    if checkpoint_every < 1 or keep < 1:
        raise ConfigError("checkpoint.every and checkpoint.keep must be at least 1.")
    with one_thread():
        return _Run(online, None if out is None else Path(out), checkpoint_every, keep).go(resume, progress or Silent())


class _Run:
    def __init__(self, online: Online, out: Path | None, checkpoint_every: int, keep: int) -> None:
        self.online, self.checkpoint_every, self.keep = online, checkpoint_every, keep
        self.bank = online.bank()
        self.examiner = Evaluator(online, self.bank)
        self.directory = None if out is None else RunDirectory(out)
        self.history: list[dict[str, Any]] = []
        self.state = self.bank.init()
        self.total = online.hedge.init(len(online.experts))
        self.done = 0
        self.saved = -1

    def go(self, resume: bool | Path, progress: Progress) -> OnlineResult:
        online, tasks = self.online, len(self.online.stream)
        self._open(resume)
        progress.start(online.name, tasks, self.done)
        with Interruptible(self._finish) as signals:
            while self.done < tasks:
                started = time.perf_counter()
                record, state, total = self._task(self.done)
                with signals.held():
                    record["seconds"] = round(time.perf_counter() - started, 4)
                    if self.directory is None:
                        self.history.append(record)
                    else:
                        self.directory.record(record)
                    self.state, self.total, self.done = state, total, self.done + 1
                    progress.round(record)
                    if self.done % self.checkpoint_every == 0:
                        self._checkpoint()
        summary = self._finish("finished")
        progress.finish(summary)
        return OnlineResult(self.history, summary, self.state, online.hedge.p(self.total))

    def _task(self, t: int) -> tuple[dict[str, Any], State, Tensor]:
        """The t-th task: its record, and the state and the experts' losses after it."""
        online, bank, measures = self.online, self.bank, self.online.measures
        task = online.stream[t]
        p = online.hedge.p(self.total)
        active = online.hedge.active(self.total)
        accuracy, loss = self.examiner.mark(self.examiner.predict(self.state, task, active), task, active)
        finite = torch.isfinite(loss)
        if not bool(finite.any()):
            raise ClientError(f"at task {t + 1} no expert's predictions are finite any more; lower local.lr.")
        known = [r["ctm/accuracy"] for r in self.history]
        record: dict[str, Any] = {
            "round": t + 1,
            "ctm/accuracy": mixed(p, accuracy),
            "ctm/loss": _number(mixed(p, loss)),
            "experts/accuracy": [_number(value) for value in accuracy.tolist()],
            "hedge/p": p.tolist(),
        }
        record["ctm/accuracy/mean"] = float(np.mean([*known, record["ctm/accuracy"]]))
        if _due(t, measures.efficiency_every):
            record |= self.examiner.efficiency(self.state, task, p)
        suffered = 1 - accuracy if online.hedged == "error" else loss
        total = online.hedge.update(self.total, torch.where(finite, suffered, float("inf")))
        record["hedge/loss"] = _number(mixed(p, suffered))
        state, losses = bank.learn(self.state, t, self.examiner.placed(task.train), active)
        record["train/loss"] = _number(mixed(online.hedge.p(total), losses))
        record |= {
            "memory/tasks": len(state[MEMORY]) // 2,
            "memory/task_bytes": task_bytes(state),
            "memory/state_bytes": state_bytes(state),
        }
        if _due(t, measures.ltm_every) or t + 1 == len(online.stream):
            record |= self.examiner.long_term(state, t + 1, online.hedge.p(total))
        return record, state, total

    def _open(self, resume: bool | Path) -> None:
        directory = self.directory
        first = self.online.stream[0]
        digest = hashlib.sha256(first.train.x.numpy().tobytes() + first.train.y.numpy().tobytes()).hexdigest()[:16]
        theta = hashlib.sha256(self.state[FIRST]["w"].cpu().numpy().tobytes()).hexdigest()[:16]
        facts = {**self.online.describe(), "stream": {"digest": digest}, "model": {"digest": theta}}
        if directory is None:
            return
        marks = {"kind": Kind.ONLINE.value, "version": VERSION}
        config = {**self.online.config, **marks, "identity": facts, **environment()}
        if not resume:
            directory.create(config, "\n\n".join(self.online.citations()) + "\n")
            self.history = directory.history
            return
        changed = differences(directory.config().get("identity", {}), facts)
        if changed:
            raise CheckpointError(
                f"{directory.path} holds another experiment, so it cannot be continued: {'; '.join(changed)}."
            )
        found = checkpoints.available(directory.checkpoints)
        if resume is not True and resume not in found:
            raise CheckpointError(f"{resume} is no checkpoint of {directory.path}.")
        if found:
            self._restore(found[-1] if resume is True else Path(resume))
        directory.describe(config, "\n\n".join(self.online.citations()) + "\n")
        directory.rewind(self.done)
        self.history = directory.history

    def _snapshot(self) -> Snapshot:
        state = self.state
        parts: dict[str, Tree] = {place: dict(tree) for place, tree in state.items() if tree}
        w = parts[FIRST].pop("w")
        parts[HEDGE] = {"total": self.total}
        facts = {"experts": len(self.online.experts)}
        return Snapshot(Server(w, torch.zeros(0), parts, self.done), MemoryStore(), facts=facts)

    def _restore(self, path: Path) -> None:
        found = checkpoints.load(path, self._snapshot()).server
        if found.round > len(self.online.stream):
            raise CheckpointError(f"{path} is past the stream's {len(self.online.stream)} tasks.")
        parts = {place: dict(tree) for place, tree in found.parts.items()}
        parts[FIRST]["w"] = found.theta
        self.total = parts.pop(HEDGE)["total"].cpu()
        self.state = {MEMORY: {}, **parts}
        for place in self.state:
            if place != MEMORY:
                self.state[place]["held"] = self.state[place]["held"].cpu()
        self.done = self.saved = found.round

    def _checkpoint(self) -> None:
        if self.directory is None or self.saved == self.done:
            return
        try:
            checkpoints.save(self.directory.checkpoints, self._snapshot(), self.keep)
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint could be written to {self.directory.path}: {error.strerror}."
            ) from error
        self.saved = self.done

    def _finish(self, status: str) -> dict[str, Any]:
        """The last checkpoint, and files that describe the run."""
        self._checkpoint()
        size = self.bank.plan(0)[0].layout.size
        summary = summarise(self.online, self.history, self.total, size, status)
        if self.directory is not None:
            self.directory.write_summary(summary)
        return summary


def _due(t: int, every: int) -> bool:
    return every > 0 and (t + 1) % every == 0


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
