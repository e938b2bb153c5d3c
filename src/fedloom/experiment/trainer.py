"""The loop shared by all tasks: open, then step, measure, record and checkpoint every round, and finish.

A run that is killed at any time resumes from its last checkpoint to the same bits; Ctrl-C and SIGTERM end it at
the next safe point.
"""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from fedloom.base.checks import at_least
from fedloom.base.errors import CheckpointError, ConfigError, FedLoomError
from fedloom.base.files import writing
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.callbacks import Callback, RunInfo, numbers, with_measurements
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.fingerprint import differences
from fedloom.experiment.rundir import VERSION, Columns, RunDirectory, Status, jsonable
from fedloom.experiment.runtime import environment
from fedloom.experiment.store import check_forms, forms


class Interruptible:
    """Turns SIGINT and SIGTERM into ``KeyboardInterrupt``, and defers them while state is being changed.

    Used as a context manager around a run; inside it, ``with defer():`` marks sections that must not be interrupted,
    and ``finish`` is called with the status and the reason if it ends early. The exception is raised again before such
    a section if it was lost, as Python ignores all exceptions in finalisers and callbacks of the garbage collector.
    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self, finish: Callable[[Status, str | None], object]) -> None:
        self._finish = finish
        self._is_deferring = False
        self._has_signal = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if isinstance(error, KeyboardInterrupt):
            self._finish(Status.INTERRUPTED, None)
        elif isinstance(error, FedLoomError):
            self._finish(Status.FAILED, str(error))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._has_signal = True
        if not self._is_deferring:
            raise KeyboardInterrupt

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Defer signals until the end of the block; a signal that came before it raises instead of entering it."""
        self._stop_if_asked()
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._has_signal:
            raise KeyboardInterrupt


Record = dict[str, Any]


class TrainerTask(ABC):
    """A task that is trained round by round: it holds the state, and the trainer does everything else.

    Attributes:
        kind: which task it is.
        name: the method's name.
        rounds: number of rounds of the whole run.
        seed: the run's seed.
        headline: the metric of the records by which the run is judged.
        config: the settings as the user gave them.
        citations: BibTeX entries.
        round: number of completed rounds.
        history: one record per round, appended by the trainer.
        warnings: sentences for the summary.
        facts: what is known of the run beforehand, shown before its first round.
        notes: sentences for the summary on how the run was computed, which call for nothing.
        changeable: the settings in ``identity`` that a continued run may change, each by the beginning of its key.
        model: maps what ``step`` returns to the server's model after it; None if there is none.
    """

    kind: str
    name: str
    rounds: int
    seed: int
    headline: str = "global/accuracy"
    config: Mapping[str, Any]
    citations: str
    changeable: tuple[str, ...] = ()
    model: Callable[[Any], nn.Module] | None = None

    def __init__(self) -> None:
        self.round = 0
        self.history: list[Record] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.facts: list[str] = []

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The settings that results depend on, as nested plain data; runs with equal identities can be resumed."""

    @abstractmethod
    def step(self) -> Any:
        """Do one round's work without changing the state, since it may be interrupted at any time."""

    @abstractmethod
    def commit(self, step: Any) -> tuple[Record, dict[str, Columns]]:
        """Adopt what ``step`` returned, and measure: returns the round's record, and rows for the tables."""

    @abstractmethod
    def snapshot(self) -> Checkpoint:
        """All state after the last committed round."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Adopt the state of a checkpoint.

        Raises:
            ValueError: if it does not belong to this task (KeyError, TypeError or OSError likewise).
        """

    @abstractmethod
    def summarise(self, status: Status) -> dict[str, Any]:
        """The content of ``summary.json`` other than method, seed, status, rounds, seconds and the final record."""

    def open(self) -> None:
        """Acquire what steps need; called before anything is written, so that it may raise."""

    def close(self) -> None:
        """Release what ``open`` acquired."""

    def should_stop(self) -> str | None:
        """The reason to stop now, or None; a function of the history alone, so that resuming does not change it."""
        return None

    def best_round(self) -> int | None:
        """The round whose checkpoint is kept beside the last ones; a function of the history; None if none is."""
        return None

    def collect_garbage(self, folder: Path) -> None:
        """Remove files beside a folder of checkpoints that are no longer needed."""

    def prepare(self, directory: RunDirectory) -> None:
        """Write files that are known before the first round, such as the partition; called at every start."""

    def write(self, directory: RunDirectory, status: Status) -> None:
        """Write further files, such as the model."""


class Trainer:
    """Runs a task, from the start or from a checkpoint.

    Args:
        task: the task.
        out: run directory; None keeps everything in memory.
        checkpoint_every: rounds between checkpoints; one is always written at the end and on Ctrl-C.
        keep: number of checkpoints to keep.
        callbacks: observers of the run.

    Raises:
        ConfigError: if ``checkpoint_every`` or ``keep`` is below 1.
    """

    def __init__(
        self,
        task: TrainerTask,
        out: Path | str | None = None,
        *,
        checkpoint_every: int = 10,
        keep: int = 2,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        at_least(1, "checkpoint.", every=checkpoint_every, keep=keep)
        self.task, self.callbacks = task, callbacks
        self.checkpoint_every, self.keep = checkpoint_every, keep
        self.directory = None if out is None else RunDirectory(out)
        self.saved = -1  # the round of the last checkpoint
        self.restored: Path | None = None  # the checkpoint on which the next round builds
        self.changes: list[Record] = []  # of settings: after which round, and which
        self.environment_changes: list[str] = []  # differences between the environments of the next round and the first

    def run(self, resume: bool | Path | str = False, *, or_begin: bool = False) -> dict[str, Any]:
        """Run to the end and return the summary.

        Args:
            resume: True resumes from the newest checkpoint in the run directory; a path, from that checkpoint.
            or_begin: with ``resume``, start a new run if there is none.

        Raises:
            ConfigError: if the task cannot run with its settings.
            CheckpointError: if the run directory exists, cannot be written, or holds another experiment.
            KeyboardInterrupt: on Ctrl-C, after a checkpoint.
        """
        task = self.task
        if resume is not False and self.directory is None:
            raise ConfigError("resume needs the run directory: set out=.")
        try:
            task.open()
            self._open(self._resumed(resume), or_begin)
            about = task.name, task.rounds, task.round, task.seed, task.headline
            info = RunInfo(*about, self.directory, facts=tuple(task.facts), model=task.model)
            for callback in self.callbacks:
                callback.on_start(info)
            summary = self._train()
            for callback in self.callbacks:
                callback.on_finish(summary)
        finally:
            if self.directory is not None:
                self.directory.release()
            task.close()
            for callback in self.callbacks:
                callback.on_close()
        return summary

    def _train(self) -> dict[str, Any]:
        task, reason = self.task, None
        with Interruptible(self._finish) as signals:
            # Of a run without rounds, the initial model is measured once.
            while task.round < max(task.rounds, not task.history) and (reason := self._should_stop()) is None:
                started = time.perf_counter()
                with self._resuming():
                    step = task.step()
                measurements = [(callback, numbers(callback, step)) for callback in self.callbacks]
                with signals.defer():
                    self._commit(step, measurements, started)
        return self._finish(Status.FINISHED if reason is None else Status.STOPPED, reason)

    def _resuming(self) -> AbstractContextManager[None]:
        """A block that names the checkpoint in errors of the first round after it."""
        return nullcontext() if self.restored is None else checkpoints.refusing(self.restored)

    def _should_stop(self) -> str | None:
        """The first reason that the task or a callback has to stop now."""
        reasons = (self.task.should_stop(), *(callback.should_stop(self.task.history) for callback in self.callbacks))
        return next((reason for reason in reasons if reason is not None), None)

    def _open(self, resume: bool | Path, or_begin: bool) -> None:
        """Begin the run directory, or go on in it."""
        directory, task = self.directory, self.task
        if directory is None:
            return
        identity = task.identity()
        marks = {"kind": task.kind, "version": VERSION}
        checkpoint_settings = {"checkpoint": {"every": self.checkpoint_every, "keep": self.keep}}
        current = environment()
        config = {**checkpoint_settings, **task.config, **marks, "identity": identity, **current}
        if or_begin:
            refuse_lost_config(directory)
        stored = directory.continued() if resume and (directory.is_begun or not or_begin) else None
        changed = [] if stored is None else self._changes(directory, stored, identity)
        with writing(directory.path, CheckpointError):
            if stored is None:
                directory.create(config, task.citations, into=bool(resume))
                directory.checkpoints.mkdir(
                    exist_ok=True
                )  # so that a lost folder is noticed, see ``has_lost_checkpoints``
            else:
                directory.acquire()
                self._go_back(directory, resume, stored)
                last = task.round - bool(changed)  # what is changed now takes the place of a change after this round
                self.changes = [change for change in stored.get("changes", []) if change["after"] <= last]
                self.changes += [{"after": task.round, "changed": changed}] if changed else []
                for change in self.changes:
                    task.warnings.append(
                        f"the run went on with other settings after round {change['after']}: "
                        f"{'; '.join(change['changed'])}."
                    )
                if task.round:  # the rounds so far were not computed here
                    origin = {key: stored[key] for key in current if key in stored}
                    self.environment_changes, config = differences(origin, current), config | origin
                directory.describe(config | ({"changes": self.changes} if self.changes else {}), task.citations)
            task.prepare(directory)

    def _changes(self, directory: RunDirectory, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
        """The settings that a continued run changes, as sentences; ``CheckpointError`` if it may not change them."""
        task, changed = self.task, differences(stored.get("identity", {}), identity)
        if not all(change.startswith(task.changeable) for change in changed):
            why, names = "; ".join(changed), [change.partition(":")[0] for change in changed]
            if names == ["compute"]:  # compute=auto may have had another choice, in another version
                why += f"; compute={stored['identity']['compute']} continues it"
            if names == ["rounds"]:  # only there if results depend on it
                why += (
                    f", and what {task.name} does depends on the number of its rounds; start a new run with "
                    f"rounds={task.rounds} in another directory, with out="
                )
            raise CheckpointError(f"{directory.path} holds another experiment, so it cannot be continued: {why}.")
        return changed

    def _resumed(self, resume: bool | Path | str) -> bool | Path:
        """True for the run directory itself, as on the command line; the path of a checkpoint unchanged."""
        if isinstance(resume, bool):
            return resume
        return (self.directory is not None and Path(resume).resolve() == self.directory.path.resolve()) or Path(resume)

    def _go_back(self, directory: RunDirectory, resume: bool | Path, stored: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, and discard everything after it."""
        task, available = self.task, checkpoints.available(directory.checkpoints)
        checkpoint_path = available[-1] if available else None
        if isinstance(resume, Path):
            checkpoint_path = next((path for path in available if path.resolve() == resume.resolve()), None)
            if checkpoint_path is None:
                raise CheckpointError(f"{resume} is not a checkpoint of {directory.path}.")
        if checkpoint_path is not None:
            with checkpoints.refusing(checkpoint_path):
                checkpoint = checkpoints.read(checkpoint_path)
                if lost := directory.missing(checkpoint.round, checkpoint.facts.get("records")):
                    raise ValueError(f"{lost}, which it needs")
                restore(task, checkpoint)
            for later in available[available.index(checkpoint_path) + 1 :]:
                checkpoints.remove(later)
            self.saved, self.restored = task.round, checkpoint_path
        elif directory.has_lost_checkpoints(stored):
            raise CheckpointError(
                f"{directory.path} has lost its checkpoints: rounds are on record, but none is left to continue from; "
                "put the folder checkpoint back, or start again in another directory."
            )
        task.collect_garbage(directory.checkpoints)  # files that a killed run wrote after this checkpoint
        task.history[:] = directory.rewind(task.round)

    def _commit(self, step: Any, measurements: Sequence[tuple[Callback, Record]], started: float) -> None:
        """End the round: commit it, record it, report it, and write a checkpoint if one is due."""
        task = self.task
        with self._resuming():
            record, tables = task.commit(step)
        self.restored = None
        for callback, values in measurements:
            record = with_measurements(record, callback, values)
        sentences = [text for change in self.changes if change["after"] + 1 == task.round for text in change["changed"]]
        if sentences := sentences + self.environment_changes:
            record["changed"], self.environment_changes = sentences, []
        record["seconds"] = round(time.perf_counter() - started, 4)
        record = jsonable(record)
        if self.directory is not None:
            self.directory.record(record, tables)
        task.history.append(record)
        for callback in self.callbacks:
            callback.on_round(record)
        if task.round % self.checkpoint_every == 0 or task.round == task.best_round():
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Write the tables and a checkpoint; a full disk only leads to a warning in the summary."""
        directory, task = self.directory, self.task
        recorded = task.history[-1]["round"] if task.history else 0
        if directory is None or recorded != task.round or self.saved == task.round:  # only recorded rounds
            return
        try:
            directory.write_tables()
            snapshot = task.snapshot()
            facts = {**snapshot.facts, "records": directory.running.hexdigest()}
            checkpoints.save(directory.checkpoints, replace(snapshot, facts=facts), self.keep, task.best_round())
            task.collect_garbage(directory.checkpoints)
            self.saved = task.round
        except OSError as error:
            task.warnings.append(
                f"round {task.round}: no checkpoint could be written ({error.strerror or error}); "
                "the one before it is untouched."
            )

    def _finish(self, status: Status, reason: str | None = None) -> dict[str, Any]:
        """Write the last checkpoint and the files that describe the run."""
        self._checkpoint()
        task = self.task
        final = task.history[-1] if task.history else {}
        summary: dict[str, Any] = {
            "method": task.name,
            "seed": task.seed,
            "status": status.value,
            "reason": reason,
            "rounds": final.get("round", 0),
            "seconds": round(sum(record["seconds"] for record in task.history), 3),
            "final": {k: v for k, v in final.items() if k not in ("round", "seconds")},
            **task.summarise(status),
        }
        summary["warnings"] = [*summary.get("warnings", []), *task.warnings]
        warned = [text for change in self.changes for text in change["changed"]]
        lists = (
            (record["round"], record["changed"]) for record in task.history if isinstance(record.get("changed"), list)
        )
        changes = [(n, rest) for n, texts in lists if (rest := [str(text) for text in texts if text not in warned])]
        summary["notes"] = [*task.notes, *(f"from round {n} on: {'; '.join(what)}." for n, what in changes)]
        if self.directory is not None and not (status.ended and self.saved != task.round):  # or it is not complete
            try:
                task.write(self.directory, status)
                self.directory.write_summary(summary)
            except OSError as error:
                summary["warnings"].append(f"the summary could not be written ({error.strerror or error}).")
        return summary


def load(task: TrainerTask, directory: RunDirectory, round: int | None = None) -> list[Record]:
    """Restore a task from a run's newest checkpoint, or that of a round, and return the records up to it.

    Nothing is written.

    Raises:
        CheckpointError: if the run has no such checkpoint, or it cannot be read.
    """
    stored = checkpoints.available(directory.checkpoints)
    if not stored:
        raise CheckpointError(f"{directory.path} has no checkpoint, and so no models to load.")
    checkpoint_path = stored[-1] if round is None else checkpoints.of_round(directory.checkpoints, round)
    if checkpoint_path not in stored:
        there = ", ".join(str(checkpoints.run_and_round(path)[1]) for path in stored)
        raise CheckpointError(f"{directory.path} has no checkpoint of round {round}; it has those of {there}.")
    with checkpoints.refusing(checkpoint_path):
        checkpoint = checkpoints.read(checkpoint_path)
        history = [record for record in directory.metrics() if record["round"] <= checkpoint.round]
        if len(history) < checkpoint.round:  # which restoring it may count one by one
            raise ValueError(f"metrics.jsonl has {len(history)} of its {checkpoint.round} rounds")
        restore(task, checkpoint)
    return history


def restore(task: TrainerTask, checkpoint: Checkpoint) -> None:
    """Restore a task that is as before its first round, if the checkpoint's tensors have the same shapes and types."""
    for name, start in task.snapshot().tensors.items():
        check_forms(forms(checkpoint.tensors.get(name, {})), start, f"{name}.safetensors")
    task.restore(checkpoint)


def refuse_lost_config(directory: RunDirectory) -> None:
    """Raise ``CheckpointError`` if rounds are on record without a configuration: a new run would replace them."""
    if not directory.is_begun and directory.metrics():
        raise CheckpointError(
            f"{directory.path} has lost its config.yaml, although rounds are on record; bring back a copy of it, or "
            "start again in another directory."
        )
