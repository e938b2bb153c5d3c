"""The loop over rounds: evaluate, record, checkpoint, stop; and go on after anything that stopped it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedloom.compute import computes
from fedloom.core.aggregate import Traffic
from fedloom.core.client import Failure
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.local import cohort_size, draw_cohort
from fedloom.core.plan import Plan
from fedloom.core.round import Report, Server, federated_round, received_losses
from fedloom.engines import engines
from fedloom.experiment import atomic
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.checkpoint import Snapshot
from fedloom.experiment.evaluate import Evaluator, LastModels
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.fingerprint import describe, differences
from fedloom.experiment.interrupt import Interruptible
from fedloom.experiment.rundir import VERSION, Kind, RunDirectory
from fedloom.experiment.runtime import environment, one_thread, pick_device
from fedloom.experiment.setup import make_plan, make_server_data, placed
from fedloom.experiment.store import make_store
from fedloom.experiment.summary import should_stop, summarise


class Progress(Protocol):
    """Shows a run while it goes on."""

    def start(self, name: str, total_rounds: int, start_round: int) -> None:
        """Called once, before the first round of this process."""
        ...

    def round(self, record: dict[str, Any]) -> None:
        """Called after every round with its record."""
        ...

    def finish(self, summary: dict[str, Any]) -> None:
        """Called once at the end."""
        ...


class Observer(Protocol):
    """Looks at what the server holds after a round; what it measures joins the round's record."""

    def observe(self, plan: Plan, server: Server) -> dict[str, Any]:
        """Numbers by name, a function of the server's state alone, so that a continued run repeats them."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, name: str, total_rounds: int, start_round: int) -> None:
        """Nothing."""

    def round(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Nothing."""


@dataclass
class RunResult:
    """What a run found.

    Attributes:
        history: one record a round, as in ``metrics.jsonl``.
        summary: as in ``summary.json``.
        model: the final server model (for methods with private parameters, with the initial private ones).
        snapshot: all final state, client states included.
        failures: every client left out, by round.
    """

    history: list[dict[str, Any]]
    summary: dict[str, Any]
    model: nn.Module
    snapshot: Snapshot
    failures: list[Failure] = field(default_factory=list)


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    resume: bool | Path = False,
    checkpoint_every: int = 10,
    keep: int = 2,
    progress: Progress | None = None,
    trackers: Sequence[Any] = (),
    observers: Sequence[Observer] = (),
) -> RunResult:
    """Run an experiment, from the start or from a checkpoint.

    Args:
        experiment: what to run.
        out: run directory; None keeps everything in memory.
        resume: True goes on from the newest checkpoint in ``out``, a path from that checkpoint.
        checkpoint_every: rounds between checkpoints; one is written at the end and on Ctrl-C in any case.
        keep: how many checkpoints stay.
        progress: shows the run.
        trackers: objects with ``log(round, record)`` and ``close()``, called with every record.
        observers: what else looks at the server after every round, and adds to its record.

    Raises:
        ConfigError: if the model does not fit the data or the engine not the method.
        CheckpointError: if ``out`` is taken, cannot be written, or holds another experiment.
        ClientError: if all clients of a round fail in code, or the server model diverges.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    if checkpoint_every < 1 or keep < 1:
        raise ConfigError("checkpoint.every and checkpoint.keep must be at least 1.")
    with one_thread():
        return _Run(experiment, None if out is None else Path(out), checkpoint_every, keep, trackers, observers).go(
            resume, progress or Silent()
        )


class _Run:
    def __init__(
        self,
        experiment: Experiment,
        out: Path | None,
        checkpoint_every: int,
        keep: int,
        trackers: Sequence[Any],
        observers: Sequence[Observer] = (),
    ) -> None:
        self.experiment, self.checkpoint_every, self.keep = experiment, checkpoint_every, keep
        self.trackers, self.observers = trackers, observers
        self.federation = experiment.federation.pooled() if experiment.method.pooled else experiment.federation
        device = "cpu" if experiment.engine == "processes" else pick_device(experiment.device)
        self.federation = placed(self.federation, getattr(torch, experiment.dtype), device)
        self.plan = make_plan(experiment, self.federation, device)
        self.server_data = make_server_data(experiment, self.plan, self.federation)
        self.evaluator = Evaluator(self.plan, self.federation, experiment.evaluation)
        self.directory = None if out is None else RunDirectory(out)
        self.history: list[dict[str, Any]] = []
        self.failures: list[Failure] = []
        self.sent = Traffic()
        self.saved = -1  # the round of the last checkpoint
        theta, buffers = self.plan.theta0.to(device), self.plan.buffers0.to(device)
        last = None
        if "average" in experiment.evaluation.what:
            last = LastModels.of(self.plan, self.federation.seen)
        server = Server.initial(self.plan, theta, buffers)
        store, self.warnings = make_store(
            experiment.client_state,
            self.plan,
            server,
            self._reach(),
            None if out is None else out / checkpoints.CLIENTS,
        )
        self.state = Snapshot(server, store, last)

    def go(self, resume: bool | Path, progress: Progress) -> RunResult:
        experiment = self.experiment
        compute = computes.make(experiment.compute, **experiment.compute_settings)
        make = engines.make(experiment.engine, **experiment.engine_settings)
        engine = make(self.plan, compute)  # refuses before writing
        try:
            self._open(resume)
        except BaseException:
            engine.close()
            raise
        progress.start(experiment.method.name, experiment.rounds, self.state.server.round)
        status = "finished"
        try:
            with Interruptible(self._finish) as signals:
                while self.state.server.round < experiment.rounds:
                    if (reason := should_stop(self.history, experiment.evaluation)) is not None:
                        status = reason
                        break
                    started = time.perf_counter()
                    server, report = self._round(engine)
                    seen = {k: v for one in self.observers for k, v in one.observe(self.plan, server).items()}
                    with signals.held():
                        record = self._commit(server, report, started, seen)
                        progress.round(record)
                        if server.round % self.checkpoint_every == 0:
                            self._checkpoint()
        finally:
            engine.close()
            for tracker in self.trackers:
                tracker.close()
        summary = self._finish(status)
        progress.finish(summary)
        model = self.evaluator.live.module
        self.evaluator.load(self.state.server.theta, self.state.server.buffers)
        return RunResult(self.history, summary, model, self.state, self.failures)

    def _open(self, resume: bool | Path) -> None:
        directory = self.directory
        facts = describe(self.experiment, self.plan)
        if directory is None:
            return
        marks = {"kind": Kind.FEDERATED.value, "version": VERSION}
        config = {**self.experiment.config, **marks, "identity": facts, **environment()}
        citations = "\n\n".join(self.experiment.method.citations()) + "\n"
        if not resume:
            directory.create(config, citations)
            return
        changed = differences(directory.config().get("identity", {}), facts)
        if changed:
            raise CheckpointError(
                f"{directory.path} holds another experiment, so it cannot be continued: {'; '.join(changed)}."
            )
        found = checkpoints.available(directory.checkpoints)
        if isinstance(resume, Path) and resume not in found:
            raise CheckpointError(f"{resume} is not a checkpoint of {directory.path}.")
        if found:
            chosen = resume if isinstance(resume, Path) else found[-1]
            self.state = checkpoints.load(chosen, self.state)
            for later in found[found.index(chosen) + 1 :]:
                checkpoints.remove(later)
            self.saved = self.state.server.round
            self.sent = Traffic(**self.state.facts["traffic"])
            self.failures = [Failure(**failure) for failure in self.state.facts["failures"]]
        checkpoints.sweep(directory.checkpoints, self.state.store)  # what a killed run wrote after it
        try:
            directory.rewind(self.state.server.round)
            directory.describe(config, citations)
        except OSError as error:
            raise CheckpointError(f"{directory.path} cannot be written ({error.strerror or error}).") from error
        self.history = directory.history

    def _reach(self) -> int:
        """How many clients may take part in the whole run."""
        experiment, seen = self.experiment, self.federation.seen
        if experiment.method.pooled:
            return seen
        return min(seen, experiment.rounds * cohort_size(seen, experiment.participation, experiment.cohort))

    def _round(self, engine: Any) -> tuple[Server, Report]:
        experiment, server, last = self.experiment, self.state.server, self.state.last
        size = cohort_size(self.federation.seen, 1.0 if experiment.method.pooled else experiment.participation,
                           None if experiment.method.pooled else experiment.cohort)  # fmt: skip
        probability = None
        if experiment.sampling == "bernoulli" and not experiment.method.pooled:
            probability = experiment.cohort / self.federation.seen if experiment.cohort else experiment.participation
        cohort = draw_cohort(self.federation.seen, size, experiment.seed, server.round, probability=probability)
        if last is not None:
            last.pending.clear()
        moved, report = federated_round(
            self.plan,
            engine,
            server,
            self.state.store,
            cohort,
            drop_rate=experiment.drop_rate,
            server_data=self.server_data,
            observe=(lambda result: None) if last is None else (lambda result: last.observe(server, result)),
        )
        if "received" in experiment.evaluation.what and report.losses is None:  # no part asked; nothing depends on it
            report.losses = received_losses(self.plan, engine, server, self.state.store, cohort)
        return moved, report

    def _commit(self, server: Server, report: Report, started: float, seen: dict[str, Any]) -> dict[str, Any]:
        """The round is over: take over its states, evaluate, and record."""
        experiment, state = self.experiment, self.state
        state.store.update(report.states)  # first: where a disk is full, the round has not been
        state.server = server
        if state.last is not None:
            state.last.commit()
        self.failures += report.failures
        here = Traffic() if experiment.method.pooled else report.traffic
        self.sent = Traffic(*(a + b for a, b in zip(vars(self.sent).values(), vars(here).values(), strict=True)))
        record: dict[str, Any] = {"round": server.round, "train/loss": report.train_loss}
        if report.losses is not None:
            record["mixing/objective"] = global_objective(report)
        table = None
        if server.round % experiment.evaluation.every == 0 or server.round == experiment.rounds:
            measured, table = self.evaluator.measure(server, state.store, state.last)
            record |= measured
        record |= seen | {
            "comm/down_params": here.down_params,
            "comm/up_params": here.up_params,
            "comm/params": self.sent.down_params + self.sent.up_params,
            "comm/bytes": self.sent.bytes,
            "cohort": len(report.cohort),
            "failures": len(report.failures),
            "seconds": round(time.perf_counter() - started, 4),
        }
        record = {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in record.items()}
        if self.directory is None:
            self.history.append(record)
        else:
            rows = {"client": report.cohort, "p": report.p}
            if experiment.method.needs("losses") or "received" in experiment.evaluation.what:
                rows["loss"] = np.full(len(report.cohort), np.nan) if report.losses is None else report.losses
            tables = {"mixing": rows} if table is None else {"mixing": rows, "clients": table}
            self.directory.record(record, tables)
            self.history = self.directory.history
        for tracker in self.trackers:
            tracker.log(server.round, record)
        return record

    def _checkpoint(self) -> None:
        """Write the tables and a checkpoint; a full disk is reported in the summary and harms nothing."""
        directory = self.directory
        here = self.state.server.round
        if directory is None or directory.recorded != here or self.saved == here:  # a round without record is not kept
            return
        self.state.facts = {
            "traffic": vars(self.sent),
            "failures": [vars(failure) for failure in self.failures],
        }
        try:
            directory.write_tables()
            checkpoints.save(directory.checkpoints, self.state, self.keep)
            self.saved = here
        except OSError as error:
            self.warnings.append(
                f"round {here}: no checkpoint could be written ({error.strerror or error}); "
                "the one before it is untouched."
            )

    def _finish(self, status: str) -> dict[str, Any]:
        """The last checkpoint, and files that describe the run."""
        self._checkpoint()
        summary = summarise(self.experiment, self.plan, self.history, self.failures, status)
        summary["warnings"] += self.warnings
        if self.directory is not None:
            try:
                named = self.plan.layout.named(
                    torch.cat([self.state.server.theta, self.plan.theta0[self.plan.layout.shared_size :]]),
                    torch.cat([self.state.server.buffers, self.plan.buffers0[self.plan.layout.shared_buffers :]]),
                )
                atomic.write_whole(self.directory.path / "model.safetensors", atomic.as_file(named))
                self.directory.write_summary(summary)
            except OSError as error:
                summary["warnings"].append(f"the summary could not be written ({error.strerror or error}).")
        return summary


def global_objective(report: Report) -> float:
    """Σ p_i F_i(θ^t) over the round's clients: p as it mixed their updates, F before local work; NaN if p is all 0.

    Hahn 2024, eq. (1.1) and figure 3.1.
    """
    assert report.losses is not None
    mixed = report.p != 0
    return float(report.p[mixed] @ report.losses[mixed]) if mixed.any() else float("nan")
