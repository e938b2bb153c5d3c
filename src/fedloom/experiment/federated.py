"""Federated runs: rounds over cohorts of clients, evaluated as configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from warnings import warn

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.applications import notebook_html
from fedloom.base.errors import CheckpointError, ClientError, ConfigError, nearest, user_stacklevel
from fedloom.base.tree import nbytes
from fedloom.compute import computes, note, resolved
from fedloom.core.hooks import overrides
from fedloom.core.links import Links, spectral_gap
from fedloom.core.local import CHANGEABLE, cohort_size, draw_cohort
from fedloom.core.slots import label
from fedloom.core.targets import CLASSES
from fedloom.core.timeline import NOBODY, Arrivals, Timeline, World
from fedloom.data.federate import partition_table
from fedloom.engines import engines
from fedloom.experiment import atomic, fingerprint, privacy, trainer
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.atomic import as_model_file
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.clock import Clock, Outlook
from fedloom.experiment.evaluation import UNTESTED, check_means, check_measured
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.rundir import FEDERATED, Columns, RunDirectory, Status, Table
from fedloom.experiment.runtime import own_draws, pick_device, reproducible
from fedloom.experiment.setup import make_plan, make_server_data, to_device
from fedloom.experiment.snapshot import CohortModels, LastModels, ServerAverage, Snapshot, unpack
from fedloom.experiment.store import (
    CLIENTS,
    LIMIT,
    MODELS,
    ROWS,
    Forms,
    LostState,
    client_forms,
    collect_garbage,
    flat,
    make_store,
    model_forms,
    state_bytes,
)
from fedloom.experiment.summary import best_of, headline, should_stop, summarise, warnings
from fedloom.experiment.trained import TrainedRun
from fedloom.experiment.trainer import Record, Trainer, TrainerTask
from fedloom.metrics import auroc, divergence_from_uniform
from fedloom.rounds.aggregate import Traffic
from fedloom.rounds.cohort import Report
from fedloom.rounds.engine import Engine
from fedloom.rounds.exchange import Broadcast, Failure, FailureKind, Result, State
from fedloom.rounds.meeting import received_losses
from fedloom.rounds.round import federated_round
from fedloom.rounds.server import Server, first_state
from fedloom.timing.selection import Past, SelectedClients, Uniform

ENTRIES = 100_000  # of a topology's matrix, up to which it is written
SOLVED = 1000  # models up to which the spectral gap of a topology is computed


class RoundStep(NamedTuple):
    """A round that is not committed yet: the server's next state, the round's report and when work arrived."""

    server: Server
    report: Report
    arrivals: Arrivals


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        history: one record per round, as in ``metrics.jsonl``.
        summary: the content of ``summary.json``.
        model: the final server model (private parameters, if any, have their initial values).
        snapshot: all final state, including client states.
        trained: the models as they are deployed, to predict and evaluate with.
        failures: every client that was left out, by round.
    """

    history: list[Record]
    summary: dict[str, Any]
    model: nn.Module
    snapshot: Snapshot
    trained: TrainedRun
    failures: list[Failure] = field(default_factory=list)

    def __repr__(self) -> str:
        summary, metric = self.summary, self.summary.get("headline")
        value = summary["final"].get(metric)
        details = "" if value is None else f", {metric} {value:.4g}"
        details += f", updates left out: {len(self.failures)}" if self.failures else ""
        return f"<RunResult of {summary['method']!r}: {summary['status']} after {summary['rounds']} rounds{details}>"

    def _repr_html_(self) -> str | None:
        return notebook_html(self)


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    resume: bool | Path | str = False,
    checkpoint_every: int = 10,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run an experiment with the arguments, errors and result of ``fedloom.run``, without a display or warnings.

    ``on_step`` of its callbacks receives a ``RoundStep``.
    """
    with reproducible(), own_draws():
        task = FederatedTask(experiment, None if out is None else Path(out))
        summary = Trainer(task, out, checkpoint_every=checkpoint_every, keep=keep, callbacks=callbacks).run(resume)
        return task.result(summary)


def load(
    experiment: Experiment | Callable[[Path], FederatedTask], path: Path | str, round: int | str | None = None
) -> TrainedRun:
    """Load the models in a run directory from a checkpoint, as ``fedloom.load``; nothing is written.

    ``experiment`` is that of the run, or what makes its task for a directory.
    """
    directory = RunDirectory(path)
    stored = directory.continued()
    with reproducible():
        is_made = isinstance(experiment, Experiment)
        task = FederatedTask(experiment, directory.path) if is_made else experiment(directory.path)
    stored_identity, identity = stored.get("identity", {}), task.identity()
    if changed := fingerprint.of_other_models(stored_identity, identity):
        raise CheckpointError(f"{path} is not a run of this experiment: {'; '.join(changed)}.")
    if changed := fingerprint.of_code(stored_identity, identity):
        warn(f"{path} was trained with other code: {'; '.join(changed)}.", stacklevel=user_stacklevel())
    if round == "best":
        if (best := best_of(directory.metrics(), task.experiment.evaluation)) is None:
            raise CheckpointError(
                f"{path} never measured {task.experiment.evaluation.metric}, so no round is its best."
            )
        round = best[0]
        if not checkpoints.of_round(directory.checkpoints, round).is_dir():
            raise CheckpointError(f"{path} has no checkpoint of its best round, {round}: keep_best=true keeps it.")
    if round is not None and (isinstance(round, bool) or not isinstance(round, int)):
        raise ConfigError(f"round is {round!r}, but it must be a number of rounds or 'best'.")
    return task.trained(trainer.load(task, directory, round), directory.summary())


class FederatedTask(TrainerTask):
    """An experiment as a task: its state is a ``Snapshot``, a step is one round.

    Args:
        experiment: the experiment.
        out: run directory, in which client states may be kept.

    Attributes:
        cohort_seed: seed of the cohort draws.
        repeated: number of rounds that were started again after an interruption, which privacy accounting includes.
    """

    def __init__(self, experiment: Experiment, out: Path | None = None) -> None:
        super().__init__()
        self.experiment = experiment = privacy.calibrate(experiment)
        self.cohort_seed, self.repeated = experiment.seed, 0
        self.lost = 0  # clients that failed since the last that did not, where steps overlap
        self.out = out
        method = experiment.method
        self.changeable = tuple(f"local.{name}" for name in CHANGEABLE)
        self.kind = "synthesis" if "judge" in experiment.config else FEDERATED
        self.name, self.rounds, self.seed = method.name, experiment.rounds, experiment.seed
        self.citations = "\n\n".join(method.citations()) + "\n"
        self.make_engine = engines.make(experiment.engine, **experiment.engine_settings)
        self.make_compute = computes.make(experiment.compute, **experiment.compute_settings)
        self.traits = traits = self.make_engine.traits
        device = pick_device(experiment.device, traits.devices)
        everyone = to_device(experiment.federation, getattr(torch, experiment.dtype), device)
        self.federation = federation = everyone.pooled() if method.pooled else everyone
        self.plan = make_plan(experiment, self.federation, device)
        self.config = experiment.config
        if "method" not in self.config:  # started from Python
            self.config = {**self.config, "about": fingerprint.about(experiment, self.plan)}
        is_trained = self.plan.layout.shared_size > 0 or self.kind == "synthesis"  # else it is never trained
        several, topology = self.plan.models > 1, method.topology
        common = is_trained and (
            topology.mean != "unused" or not several
        )  # a model that can be measured on common samples
        settings = experiment.evaluation if common else experiment.evaluation.of_clients()
        evaluation = settings.for_targets(self.plan.targets or CLASSES, common and len(federation.test) > 0)
        check_means(method, evaluation, len(federation.test) > 0, len(federation.held_out.index.rows) > 0)
        self.experiment = experiment = replace(experiment, evaluation=evaluation)
        self.headline = headline(method, evaluation)
        self.server_data = make_server_data(experiment, self.plan, self.federation)
        alike = method.personal.is_identity and method.adaptation.is_identity and not several  # all test the same model
        self.evaluator = Evaluator(self.plan, everyone if alike else federation, experiment.evaluation)
        self.model = (lambda step: self._load(step.server)) if method.predicts and (common or not is_trained) else None
        self.gap: float | None = None  # the spectral gap of a topology, if it is known
        self.matrices: tuple[Links, ...] = ()  # of the topology, likewise
        self.failures: list[Failure] = []
        self.traffic = Traffic()
        self.engine: Engine | None = None
        self.accountant = privacy.accountant(experiment)
        self.examples = privacy.example_accountant(experiment, federation)
        self.last_selection: tuple[int, SelectedClients] | None = None  # the last selection, by its round
        self.losses, self.last = np.full(self.federation.seen, np.nan), np.full(self.federation.seen, -1)
        self.now = 0.0  # the clock
        self.participations = np.zeros(self.federation.seen, dtype=np.int64)  # number of rounds, by client
        goal = None if self.plan.attack is None else self.plan.attack.goal(self.federation.test)
        self.goal = goal if goal is not None and len(goal) else None  # no test sample can tell whether it succeeds
        self.state = self._first_state(device)
        noisy = privacy.private_uplink(experiment) or experiment.local.dp_noise
        if self.accountant is None and self.examples is None and noisy:
            self.warnings.append(privacy.MISSING)
        self._warn_of_staleness()

    def _first_state(self, device: str) -> Snapshot:
        """The state before the first round, with stores for what will be kept between rounds."""
        plan, on, choice, out = self.plan, self.experiment.evaluation, self.experiment.client_state, self.out
        server = Server.initial(plan, plan.theta0.to(device), plan.buffers0.to(device))
        reach, state_size, participants = self._reach(), state_bytes(plan, server), self.federation.seen

        def first(client: int, tensors: Forms) -> State:
            level = plan.levels[plan.level[client]]
            return client_forms(level, first_state(level, level.level_params(server.theta)), tensors)

        at_nodes = self.traits.states == "clients"  # who keep their states
        store = make_store(choice, reach * state_size, out, CLIENTS, device, None if at_nodes else first)
        if choice == "auto" and out is None and reach * state_size > LIMIT:
            self.warnings.append(
                f"client states may take {reach * state_size / 1e9:.1f} GB of memory ({reach} clients, "
                f"{state_size / 1e6:.1f} MB each); in a run directory they would be kept on disk."
            )
        last = LastModels(plan, participants) if "average" in on.what else None
        if last is not None:
            last.models = make_store(choice, reach * last.initial.nbytes, out, MODELS, first=last.first)
        models = CohortModels(plan, participants) if "cohort" in on.what else None
        average = ServerAverage.of(on.server_average, server) if on.server_average else None
        rows = None
        if server.models is not None:
            model = model_forms(plan, server.models)
            size = min(plan.models, reach) * nbytes(flat(model(0, {})))
            rows = make_store(choice, size, out, ROWS, device, model)
            server = replace(server, models=replace(server.models, stored=rows))
        return Snapshot(server, store, last, models, average, rows=rows)

    def open(self) -> None:
        experiment = self.experiment
        if (name := resolved(experiment.compute, self.plan)) not in self.traits.computes:
            hint = nearest(name, self.traits.computes)
            raise ConfigError(f"engine {experiment.engine!r} runs no compute {name!r}; {hint}")
        if self.plan.models > 1:
            self._describe_topology()
        if self.clock is not None and not (fits := self.clock.fits).all():
            first = int(np.flatnonzero(~fits)[0])
            self.warnings.append(
                f"{int((~fits).sum())} of {len(fits)} clients, of whom client {first} is the first, have less memory "
                f"than their work takes ({self.clock.memory[first] / 1e6:.3g} MB) and are never invited; small ones "
                "may train a part of the model, as with method=heterofl."
            )
        self.engine = self.make_engine(self.plan, self.make_compute)
        if self.engine.remark:
            self.warnings.append(self.engine.remark)
        if experiment.client_state == "shared":
            self.engine.files = lambda clients: self.state.store.block(clients, self.round + 1)
        if remark := note(experiment.compute, self.plan):
            self.notes.append(remark)
        if tolerance := self.traits.tolerance:
            self.warnings.append(f"engine={experiment.engine} gives the serial engine's results up to {tolerance:g}.")
        test_samples = len(self.federation.test) or len(self.federation.held_out.index.rows)
        if experiment.evaluation.what == ("clients",) and not test_samples and self.traits.states == "driver":
            self.warnings.append(UNTESTED)
        if (count := len(self.federation.validation.index.rows)) and experiment.rounds and not self.evaluator.validates:
            self.warnings.append(
                f"{count} samples are set aside for validation, but this run reads none of them; validation=0 trains "
                "on them."
            )

    def _describe_topology(self) -> None:
        """Say how many models there are, and how fast they would agree without training."""
        clients, models = self.plan.population.clients, self.plan.models
        self.facts = [f"{models} models for {clients} clients"]
        self.matrices = self.experiment.method.topology.fixed_links(clients) if models <= SOLVED else ()
        if self.matrices:
            self.gap = spectral_gap([links.matrix(models) for links in self.matrices])
            self.facts[0] += f", spectral gap {self.gap:.3g}"
            if self.gap <= 0:
                self.warnings.append(
                    "the graph of clients falls apart, so that some of them never hear of others; add edges."
                )

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def identity(self) -> dict[str, Any]:
        return fingerprint.describe(self.experiment, self.plan)

    def should_stop(self) -> str | None:
        return should_stop(self.history, self.experiment.evaluation)

    def best_round(self) -> int | None:
        best = best_of(self.history, self.experiment.evaluation) if self.experiment.evaluation.keep_best else None
        return None if best is None else best[0]

    def step(self) -> RoundStep:
        experiment, server, means = self.experiment, self.state.server, [*self.state.client_models.values()]
        if not experiment.rounds:
            return RoundStep(server, Report(NOBODY.clients, np.zeros(0)), NOBODY)
        assert self.engine is not None
        arrivals = self._arrivals(server.round)
        for models in means:
            models.begin()

        def observe(result: Result, received: Tensor) -> None:
            for models in means:
                models.observe(result, received)

        try:
            next_server, report = federated_round(
                self.plan,
                self.engine,
                server,
                self.state.store,
                arrivals.clients,
                arrivals=arrivals,
                versions=self.state.versions,
                drop_rate=experiment.drop_rate,
                server_data=self.server_data,
                observe=observe,
            )
            if "received" in experiment.evaluation.what and report.training_losses is None:  # for the record only
                report.training_losses = received_losses(
                    self.plan, self.engine, server, self.state.store, arrivals.clients
                )
        except LostState as error:  # raised by a worker
            self.state.store.mark_damaged(error)
            raise
        return RoundStep(next_server, report, arrivals)

    def commit(self, step: RoundStep) -> tuple[Record, dict[str, Columns]]:
        experiment, state, (server, report, arrivals) = self.experiment, self.state, step
        if experiment.schedule.stale:
            self._refuse_if_broken(report)
        state.commit(server, report.states, self._in_flight(arrivals))  # first: a full disk leaves no round
        assert self.engine is not None
        self.engine.committed(self.round, np.array(sorted(report.states), dtype=np.int64))
        self.round = server.round
        self.failures += report.failures
        traffic = Traffic() if experiment.method.pooled else report.traffic
        self.traffic.add(traffic)
        self.participations[report.cohort] += 1
        since, self.now = self.now, arrivals.clock
        if experiment.selection.adaptive:
            clients = np.array([*report.local_losses], dtype=np.int64)
            self.losses[clients], self.last[clients] = [*report.local_losses.values()], server.round - 1
        record, tables = self._mixing_record(report, arrivals)
        if experiment.evaluation.due(server.round, since, self.now) or server.round == experiment.rounds:
            table = None
            if "clients" in experiment.evaluation.what:  # by clients that alone hold their data
                down = replace(server.broadcast(self.plan), theta=server.theta)
                table = self.engine.evaluate(down, np.arange(self.plan.population.clients))
            server = state.server
            metrics, clients = self.evaluator.measure(server, state.store, state.client_models, state.average, table)
            record |= metrics
            if report.states:
                check_measured(experiment.evaluation, [*self.history, record])
            if self.goal is not None:
                record["attack/success"] = self.evaluator.accuracy(server, self.goal)
            if clients is not None:
                tables["clients"] = clients
        if self.accountant is not None:
            record["privacy/epsilon"] = privacy.record_value(self.accountant.epsilon(server.round + self.repeated))
        if self.examples is not None:
            epsilon = self.examples.epsilon(int(self.participations.max()) + self.repeated)
            record["privacy/example_epsilon"] = privacy.record_value(epsilon)
        return record | {
            "comm/down_params": traffic.down_params,
            "comm/up_params": traffic.up_params,
            "comm/params": self.traffic.down_params + self.traffic.up_params,
            "comm/bytes": self.traffic.bytes,
            "cohort": len(report.cohort),
            "failures": len(report.failures),
            **(self._time_record(arrivals) if experiment.devices is not None else {}),
        }, tables

    def _time_record(self, arrivals: Arrivals) -> Record:
        """The record of a step's time: the clock, and the cost of late work."""
        durations = arrivals.end - arrivals.begin
        record: Record = {"clock": arrivals.clock, "time/work": float(durations.sum())}
        if arrivals.late.any():
            record |= {"late": int(arrivals.late.sum()), "time/wasted": float(durations[arrivals.late].sum())}
        if self.experiment.schedule.stale:
            lag = self.round - 1 - arrivals.versions
            record |= {
                "staleness/mean": float(lag.mean()),
                "staleness/max": int(lag.max()),
                "versions": len(arrivals.in_flight),
            }
        return record

    def _mixing_record(self, report: Report, arrivals: Arrivals) -> tuple[Record, dict[str, Columns]]:
        """The record of a round's mixing: numbers, and a row for each client of the cohort."""
        experiment = self.experiment
        record: Record = {"round": self.round, "train/loss": report.train_loss}
        rows: Columns = {"client": report.cohort, "p": report.p}
        if report.models is not None:
            rows["model"] = report.models
            report = replace(report, p=report.p / max(len(np.unique(report.models[report.p > 0])), 1))
        on_validation = experiment.method.needs("validation")
        columns: dict[str, tuple[str, np.ndarray | None]] = {}
        if "received" in experiment.evaluation.what or (experiment.method.needs("losses") and not on_validation):
            columns["loss"] = "objective", report.training_losses
        if on_validation:
            columns["validation_loss"] = "validation_objective", report.losses
        for column, (name, losses) in columns.items():
            rows[column] = np.full(len(report.cohort), np.nan) if losses is None else losses
            if losses is not None:
                record[f"mixing/{name}"] = report.objective(losses)
                lost = len(report.failures)
                record["mixing/kl"] = divergence_from_uniform(report.p, lost) if report.p.any() else float("nan")
        if experiment.devices is not None:
            rows |= {"version": arrivals.versions, "begin": arrivals.begin, "end": arrivals.end, "late": arrivals.late}
        if self.plan.attack is not None:
            rows["hostile"] = np.isin(report.cohort, list(self.plan.hostile))
            record["attack/detection"] = auroc(-report.p, rows["hostile"])
        return record, {"mixing": rows}

    def snapshot(self) -> Checkpoint:
        facts = {"traffic": asdict(self.traffic), "lost": self.lost, "clock": self.now}
        past = {"losses": self.losses, "last": self.last} if self.experiment.selection.adaptive else {}
        return self.state.checkpoint(
            facts, self.failures, {name: torch.from_numpy(values) for name, values in past.items()}
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        assert self.out is not None
        self.state = self.state.from_checkpoint(checkpoint, self.out)
        self.round = checkpoint.round
        self.now = float(checkpoint.facts["clock"])
        self.traffic, self.lost = Traffic(**checkpoint.facts["traffic"]), checkpoint.facts["lost"]
        if not all(isinstance(count, int) for count in vars(self.traffic).values()):
            raise ValueError("its traffic is not counted in whole numbers")
        self.failures = unpack(checkpoint.facts["failures"], checkpoint.tensors.get("failures"))
        if self.experiment.selection.adaptive:
            past = checkpoint.tensors["past"]
            self.losses, self.last = past["losses"].numpy(), past["last"].numpy()
            return
        self._count()

    def _count(self) -> None:
        """Count the rounds of each client, from the timeline."""
        for number in range(self.round):
            self.participations[self.timeline.step(number).clients] += 1

    def collect_garbage(self, folder: Path) -> None:
        last = self.state.last
        stores = {CLIENTS: self.state.store, MODELS: None if last is None else last.models, ROWS: self.state.rows}
        collect_garbage(folder, stores)

    def summarise(self, status: Status) -> dict[str, Any]:
        about = summarise(self.experiment, self.plan, self.history, self.failures)
        if self.plan.models > 1:
            about["topology"] = {"models": self.plan.models, "spectral_gap": self.gap}
        if self.accountant is not None:
            about["privacy"] = {"neighbours": self.accountant.neighbours, **asdict(self.accountant)}
        if self.examples is not None:
            about["example_privacy"] = {"neighbours": self.examples.neighbours, **asdict(self.examples)}
        test_clients = int(np.count_nonzero(self.evaluator.federation.held_out.index.sizes))
        sentences = warnings(self.history, self.failures, self.experiment, test_clients)
        if status is Status.STOPPED and (method := self.experiment.method).needs("last"):
            sentences.append(f"{method.who_needs('last')} acts in the last round, which the run did not reach.")
        return about | {"warnings": sentences}

    def prepare(self, directory: RunDirectory) -> None:
        if labels := partition_table(self.experiment.federation):
            table = Table(directory.path / "partition.parquet")
            table.add(0, labels)
            table.write()
        if sum(len(links.sources) for links in self.matrices) <= ENTRIES:
            table = Table(directory.path / "topology.parquet")
            for number, links in enumerate(self.matrices, start=1):
                owners = np.repeat(links.rows, np.diff(links.starts))
                table.add(number, {"model": owners, "source": links.sources, "weight": links.weights})
            table.write()

    def write(self, directory: RunDirectory, status: Status) -> None:
        server, average, live = self.state.server, self.state.average, self.evaluator.live
        models = {"model": server} | ({} if average is None else {"model_average": average.server(server)})
        best = self.best_round()
        if best is not None and (place := checkpoints.of_round(directory.checkpoints, best)).is_dir():
            stored = checkpoints.load(place).tensors["server"]
            models["model_best"] = replace(server, theta=stored["shared"], buffers=stored["buffers"])
        for name, source in models.items():
            self.evaluator.load(source.theta, source.buffers)
            tensors = self.plan.layout.views(live.theta, live.buffers)
            atomic.write_whole(directory.path / f"{name}.safetensors", as_model_file(tensors))

    def result(self, summary: dict[str, Any]) -> RunResult:
        """The result of the run, with the final server model."""
        model, trained = self._load(self.state.server), self.trained(self.history, summary)
        return RunResult(self.history, summary, model, self.state, trained, self.failures)

    def trained(self, history: Sequence[Record], summary: Mapping[str, Any]) -> TrainedRun:
        """The models of the run as they are deployed."""
        return TrainedRun(self.evaluator, self.state, history, summary, self.out, self.traits.states == "clients")

    def _load(self, server: Server) -> nn.Module:
        """The server's model, in the module that holds one model at a time."""
        self.evaluator.load(server.theta, server.buffers)
        return self.evaluator.live.module

    def _cohort(self, round: int, count: int) -> np.ndarray:
        """S_t, sorted client numbers, int64 [|S|]; ``count`` of them with fixed sampling."""
        experiment, participants = self.experiment, self.federation.seen
        if experiment.selection != Uniform():
            sizes, clock = self.plan.population.sizes[:participants], self.clock
            seconds = np.zeros(participants) if clock is None else clock.expected()
            past = Past(round, count, sizes, self.losses, self.last, seconds, self.cohort_seed)
            self.last_selection = round, experiment.selection.draw(past)
            return self.last_selection[1].clients
        if experiment.method.pooled:
            return draw_cohort(participants, participants, experiment.seed, round)
        present, probability = experiment.present(round), None
        if experiment.sampling == "bernoulli":
            probability = experiment.cohort / participants if experiment.cohort else experiment.participation
        if len(present) < participants:
            count = min(experiment.cohort or cohort_size(len(present), experiment.participation), len(present))
        return present[draw_cohort(len(present), count, self.cohort_seed, round, probability=probability)]

    @cached_property
    def clock(self) -> Clock | None:
        """The durations of client work, where clients have devices."""
        devices = self.experiment.devices
        return None if devices is None else Clock.of(devices, self.plan, self.state.server)

    @cached_property
    def timeline(self) -> Timeline:
        """The server steps of the run."""
        experiment, participants, clock = self.experiment, self.federation.seen, self.clock
        members = (experiment.schedule.members(experiment.cohort_size) if experiment.schedule.stale else None) or 1
        if clock is not None and (count := np.count_nonzero(clock.invited[:participants])) < members:
            raise ConfigError(
                f"a step takes the work of {members} clients, but {count} have a device that is there at some time and "
                "has the memory for it; see devices.memory and devices.intervals, or lower schedule.k or the cohort."
            )
        world = World(
            participants,
            participants if experiment.method.pooled else experiment.cohort_size,
            self._cohort,
            (lambda clients, version: np.zeros(len(clients))) if clock is None else clock.seconds,
            self.cohort_seed,
            **({} if clock is None else clock.conditions),
        )
        begin = (self.round, self.now) if experiment.selection.adaptive else (0, 0.0)  # earlier losses are not kept
        return Timeline(experiment.schedule, world, *begin)

    def outlook(self) -> Outlook | None:
        """The whole run on the clock; None without devices, or where invitations depend on training."""
        if self.clock is None or self.experiment.selection.adaptive:
            return None
        version_bytes = self.state.server.broadcast(self.plan).nbytes
        return Outlook.of(self.timeline, self.experiment.rounds, version_bytes)

    def _warn_of_staleness(self) -> None:
        """Warn of steps that are too large for the few clients of each, and of versions that fill the memory."""
        experiment, size = self.experiment, self.experiment.cohort_size
        schedule, drift = experiment.schedule, experiment.method.drift
        if not schedule.stale:
            return
        members = schedule.members(size)
        sums = all(overrides(drift, hook) for hook in ("init_client", "grad", "correct"))
        rate = getattr(experiment.method.server, "lr", 1.0)
        if members is not None and 4 * members < size and sums and rate > 2 * members / size:
            self.warnings.append(
                f"drift {label(drift)!r} sums what clients send, and a step has {members} of the {size} clients at "
                f"work; unless the server's rate is about {members}/{size}, the model may cycle: method.server=sgd "
                f"method.server.lr={members / size:.2g}."
            )
        version_bytes = self.state.server.broadcast(self.plan).nbytes
        if (
            size * version_bytes > LIMIT
            and (outlook := self.outlook()) is not None
            and outlook.versions * version_bytes > LIMIT
        ):
            self.warnings.append(
                f"up to {outlook.versions} versions of the model are kept at a time, "
                f"{outlook.versions * version_bytes / 1e9:.1f} GB; fewer clients at work need fewer."
            )

    def _arrivals(self, number: int) -> Arrivals:
        """A server step, with the probabilities of its clients where they are known."""
        experiment, participants = self.experiment, self.federation.seen
        arrivals = self.timeline.step(number)
        if not experiment.has_probabilities:
            return arrivals
        if self.last_selection is not None and self.last_selection[0] == number:
            pi = self.last_selection[1].probabilities
        else:
            present = len(experiment.present(number)) if experiment.presence else participants
            p = (experiment.expected_cohort or 0) / participants
            share = p / (1 - (1 - p) ** present) if p else len(arrivals.clients) / present  # empty cohorts are redrawn
            pi = np.full(len(arrivals.clients), share)
        pi = pi * (1 - experiment.drop_rate) * (1.0 if arrivals.punctual is None else arrivals.punctual)
        return replace(arrivals, included=pi)

    def _refuse_if_broken(self, report: Report) -> None:
        """Raise ``ClientError`` if as many clients as are at work have failed in a row, and not because they diverged.

        A single step may consist of one client.
        """
        if report.states:
            self.lost = 0
            return
        errors = [failure for failure in report.failures if failure.kind is not FailureKind.DIVERGED]
        self.lost += len(errors)
        if errors and len(errors) == len(report.failures) and self.lost >= self.experiment.cohort_size:
            raise ClientError(
                f"the last {self.lost} clients failed; the last was {errors[-1]}.", trace=errors[-1].trace
            )

    def _in_flight(self, arrivals: Arrivals) -> dict[int, Broadcast]:
        """The messages of the versions on which clients are at work after a step."""
        server, versions = self.state.server, self.state.versions
        down = replace(server.broadcast(self.plan), invited=tuple(arrivals.received.tolist()))
        return {s: down if s == server.round else versions[s] for s in arrivals.in_flight}

    def _reach(self) -> int:
        """The largest number of clients that can participate in the whole run."""
        experiment, participants = self.experiment, self.federation.seen
        if experiment.method.pooled:
            return participants
        return min(participants, experiment.rounds * experiment.cohort_size)
