"""The server of a deployment: nodes join, and then rounds are those of a simulation, with clients elsewhere."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.base.errors import CheckpointError, ConfigError, first_line
from fedloom.config.keys import CONDITIONS
from fedloom.config.schema import Config, read_run
from fedloom.config.sections import arguments
from fedloom.core.timeline import Arrivals, Timeline
from fedloom.experiment import atomic, federated
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.deployed import DeployedModel
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask, RoundStep, RunResult
from fedloom.experiment.privacy import private_uplink
from fedloom.experiment.rundir import Columns, RunDirectory, Status
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.trained import TrainedRun
from fedloom.experiment.trainer import Record, Trainer
from fedloom.rounds.engine import ComputeFactory, EngineFactory
from fedloom.rounds.exchange import Failure
from fedloom.rounds.plan import ClientPlan
from fedloom_apps.deploy.agreement import AGREED, Agreement, as_text
from fedloom_apps.deploy.allowed import WHOLE
from fedloom_apps.deploy.answers import upload_forms
from fedloom_apps.deploy.arrivals import AtWork, RealWorld
from fedloom_apps.deploy.assignment import model_digest, prepare_without_data
from fedloom_apps.deploy.data import NodeData, read
from fedloom_apps.deploy.engine import Deployed, Tally, version_in
from fedloom_apps.deploy.messages import JOIN, NodeRequest, Order, Transport, reason_in
from fedloom_apps.deploy.recipe import Recipe, Roster, Sizes, assumed_sizes
from fedloom_apps.deploy.settings import DEPLOY, Deployment
from fedloom_apps.deploy.versions import TICKET, Versions
from fedloom_apps.deploy.wire import WireError, is_count, is_number, unpack

BEGUN = "rounds_begun"  # the file of their number
REMIND = 15.0  # seconds between reminders of who has not joined


def assemble(
    recipe: Recipe,
    transport: Transport,
    nodes: int,
    tell: Callable[[str], None] = lambda sentence: None,
    roster: Roster | None = None,
) -> Roster:
    """Wait for nodes to join, and number them in the order of their names.

    Args:
        recipe: the configuration.
        transport: reaches the nodes.
        nodes: K.
        tell: called with a message about every event.
        roster: that of a run to be continued: it goes on with ``deploy.quorum`` of these nodes if the others are
            not back within ``deploy.deadline`` seconds.
    """
    run = roster.run if roster is not None else secrets.token_hex(8)
    order, local = recipe.assignment(run), arguments(Experiment, CONDITIONS, recipe.config.values)["local"]
    members: dict[str, Sizes] = {}
    sessions: dict[str, str] = {}  # the session in which each node was asked
    last_notice = started = time.monotonic()
    waits = f"waiting for {nodes} nodes" if roster is None else f"waiting for {len(roster.nodes)} nodes to come back"
    tell(waits)
    while len(members) < nodes:
        now = time.monotonic()
        late = roster is not None and now - started > recipe.deployment.deadline
        if late and len(members) >= recipe.deployment.quorum:
            break
        online = transport.online()
        requests = {
            name: NodeRequest(Order(secrets.token_hex(16), (JOIN,), order.facts).packed())
            for name, session in online.items()
            if sessions.get(name) != session and (roster is None or name in roster.nodes)
        }
        sessions |= online
        if requests:
            transport.send(requests)
        for delivered in transport.receive(0.5):
            sizes, remark = _read_join(delivered.blob, recipe.deployment)
            if sizes is None:
                tell(f"{delivered.node} {remark}")
                continue
            if (steps := local.steps_for(sizes[0])) > WHOLE:
                tell(
                    f"{delivered.node} declares {sizes[0]:,} training samples, which take {steps:,} local steps, where "
                    f"{WHOLE:,} are allowed; set local.steps, or a larger local.batch_size"
                )
                continue
            before = roster.nodes.get(delivered.node) if roster is not None else None
            if before is not None and before != sizes:
                tell(
                    f"{delivered.node} has {', '.join(map(str, sizes))} samples for training, validation and tests, "
                    f"but had {', '.join(map(str, before))} when the run began; bring its data back, or begin a new run"
                )
                continue
            if delivered.node not in members and len(members) < nodes:
                members[delivered.node] = sizes
                tell(f"{delivered.node} joined with {sizes[0]} samples ({len(members)} of {nodes}){remark}")
        if now - last_notice > REMIND:
            last_notice = now
            tell(f"{waits}; {', '.join(sorted(members)) or 'none'} joined")
    return roster if roster is not None else Roster(run, dict(sorted(members.items())))


def _read_join(blob: bytes, terms: Deployment) -> tuple[Sizes | None, str]:
    """The numbers of samples in an answer to a join order and a remark; or None and the problem."""
    try:
        facts = unpack(blob, terms.limit).facts
    except WireError as error:
        return None, f"gave an answer that cannot be read: {error}"
    sizes = facts.get("sizes")
    if facts.get("status") == "joined" and isinstance(sizes, list) and len(sizes) == 3:
        a, b, c = sizes
        if all(map(is_count, sizes)) and a:
            if terms.most_samples is not None and a > terms.most_samples:
                return None, f"declares {a} training samples, more than deploy.most_samples={terms.most_samples}"
            threads = facts.get("threads")
            has_threads = isinstance(threads, int) and 1 < threads < 2**16
            return (a, b, c), f"; it computes with {threads} threads and rounds differently" if has_threads else ""
    return None, f"refused: {reason_in(facts)}"


UNTESTED = (
    "no node has test samples, so that clients are not evaluated; keep some of each node's with held_out=0.2, or "
    "leave evaluation.what=clients out."
)


class DeployTask(FederatedTask):
    """A federated task whose clients are nodes."""

    def __init__(
        self,
        recipe: Recipe,
        roster: Roster,
        transport: Transport | None,
        out: Path | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(recipe.experiment(roster), out)
        self.recipe, self.roster, self.transport, self.tell = recipe, roster, transport, tell
        self.unanswered: list[Failure] = []  # of the step
        self.missed: dict[int, str] = {}  # why clients gave no work of use in their last step
        self.strangers: set[str] = set()  # nodes that connected and are none of this run
        self.interrupted_work: tuple[AtWork, ...] = ()  # clients that were at work when the server was stopped
        self.evaluation_failures: dict[int, str] = {}  # why nodes did not evaluate the model, by client
        self.plan = replace(self.plan, noise_seed=secrets.randbits(128))
        if self.plan.is_private:  # nodes know the experiment's seed; and rounds that are repeated draw other cohorts
            self.cohort_seed = secrets.randbits(62)
        self.make_engine = EngineFactory(self._engine, Deployed.traits)
        self.traits = Deployed.traits
        if "clients" in self.experiment.evaluation.what and not any(tested for *_, tested in roster.nodes.values()):
            self.warnings.append(UNTESTED)

    def _engine(self, plan: ClientPlan, compute: ComputeFactory) -> Deployed:
        deployment, experiment, transport = self.recipe.deployment, self.experiment, self.transport
        assert transport is not None
        private = private_uplink(experiment)
        assignment = replace(
            self.recipe.assignment(self.roster.run),
            clients=plan.population.clients,
            mean_size=plan.population.mean_size,
            cohort=plan.cohort,
            expected_cohort=plan.expected_cohort,
            noise=None if private is None else private.noise,
            model=model_digest(plan),
        )
        names, forms = self.roster.names, upload_forms(prepare_without_data(replace(assignment, clients=1, model="")))
        tests = {name: sizes[2] for name, sizes in self.roster.nodes.items()}
        return Deployed(plan, compute, transport, names, assignment, deployment, self._oldest, forms, tests)

    def _oldest(self) -> int:
        """The oldest version whose work may not have counted at the oldest checkpoint to which the run may go back."""
        if self.out is None:
            return min((self.round, *self.state.versions))
        stored = checkpoints.available(RunDirectory(self.out).checkpoints)
        if not stored:
            return 0
        names = (stored[0].name, *(path.stem for path in stored[0].glob("version-*")))  # those in flight
        return min(int(name.rpartition("-")[2]) for name in names)

    @cached_property
    def clock(self) -> None:
        """Nothing is known of durations."""
        return

    @cached_property
    def timeline(self) -> Timeline:
        """The server steps, of which each waits for its answers."""
        engine, schedule = self.engine, self.experiment.schedule
        assert isinstance(engine, Deployed)
        world = RealWorld(
            self.plan.population.clients,
            self.experiment.cohort_size,
            self._cohort,
            lambda clients, version: np.zeros(len(clients)),
            self.cohort_seed,
            available=(lambda clients, time: np.isin(clients, [*engine.reachable()])) if schedule.stale else None,
            engine=engine,
            broadcast=lambda: self.state.server.broadcast(self.plan),
            versions=self.state.versions,
            zero=time.monotonic() - self.now,
            interrupted_work=self.interrupted_work,
        )
        return Timeline(schedule, world, self.round, self.now)

    def step(self) -> RoundStep:
        """One step, whose members without an answer of use are reported with the reason."""
        engine = self.engine
        assert isinstance(engine, Deployed)
        engine.tally = Tally()
        self._count_start()
        step = super().step()
        step.report.failures[:0] = self.unanswered
        reasons = {failure.client: failure.reason for failure in self.unanswered}
        for client in step.arrivals.clients.tolist():
            if (reason := reasons.get(client, "")) != self.missed.get(client, ""):
                self.missed[client] = reason
                self.tell(f"round {self.round + 1}: {reason or f'{self.roster.names[client]} answered again'}")
        for name in sorted(engine.online.keys() - engine.numbers.keys() - self.strangers):
            self.strangers.add(name)
            self.tell(
                f"{name} is not a node of this run, which keeps its nodes; one that begins with init=… takes it in"
            )
        return step

    def _arrivals(self, number: int) -> Arrivals:
        """A server step; whoever gave no answer of use counts as late, so that the record says whose work counts."""
        arrivals, engine = super()._arrivals(number), self.engine
        assert isinstance(engine, Deployed)
        answers = {client: engine.answer(client) for client in arrivals.clients.tolist()}
        failures = [answer.failure for answer in answers.values() if answer is not None and answer.failure is not None]
        self.unanswered = [replace(failure, round=number) for failure in failures]
        late = arrivals.late | np.isin(arrivals.clients, [failure.client for failure in failures])
        return replace(arrivals, late=late)

    def _count_start(self) -> None:
        """Count a round when it starts, before anything is requested: a repeated round costs privacy again."""
        if not self.plan.is_private or self.out is None:
            return
        path = self.out / BEGUN
        try:
            count = int(path.read_text()) + 1 if self.round or path.exists() else 1
            if count <= self.round:
                raise ValueError(f"it has {count - 1} rounds, but {self.round} are complete")
            atomic.write_whole(path, str(count).encode())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}, which counts the rounds that have cost privacy, cannot be read or written "
                f"({first_line(error)}); make room, or bring back a copy of it, and continue with resume={self.out}."
            ) from error
        self.repeated = count - self.round - 1

    def commit(self, step: RoundStep) -> tuple[Record, dict[str, Columns]]:
        """The round's record, with the statistics of its messages and those of its evaluation."""
        assert isinstance(self.engine, Deployed)
        for client in step.arrivals.clients.tolist():
            self.engine.drop(client)
        record, tables = super().commit(step)
        if reasons := {failure.client: failure.reason for failure in self.engine.unmeasured}:
            if new_reasons := [
                reason for client, reason in reasons.items() if self.evaluation_failures.get(client) != reason
            ]:
                message = f"{len(reasons)} of {len(self.roster.nodes)} nodes refused or failed to evaluate the model"
                warnings.warn(f"round {self.round}: {message}; {new_reasons[0]}.", stacklevel=2)
            self.evaluation_failures |= reasons
            self.engine.unmeasured.clear()
        return record | self.engine.tally.record(), tables

    def summarise(self, status: Status) -> dict[str, Any]:
        """The summary, with a warning about evaluations that nodes refused or failed."""
        about = super().summarise(status)
        if lost := sum(record.get("deploy/unmeasured", 0) for record in self.history):
            reason = next((f"; {reason}" for reason in self.evaluation_failures.values()), "")
            about["warnings"].append(f"nodes refused or failed to evaluate the model {lost} times{reason}.")
        return about

    def snapshot(self) -> Checkpoint:
        stored = super().snapshot()
        stored.facts["deploy"] = {
            "run": self.roster.run,
            "nodes": {name: list(sizes) for name, sizes in self.roster.nodes.items()},
        }
        if isinstance(self.engine, Deployed) and self.engine.work:
            stored.facts["deploy"]["at_work"] = [[client, *work] for client, work in self.engine.work.items()]
        return stored

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        at_work = checkpoint.facts["deploy"].get("at_work", [])
        self.interrupted_work = tuple(
            AtWork(client, version, ticket, begin) for client, ticket, version, begin in at_work
        )
        versions, clients = {self.round, *self.state.versions}, {work.client for work in self.interrupted_work}
        if len(clients) < len(self.interrupted_work) or not all(
            is_count(client) and client < len(self.roster.nodes) and version in versions and TICKET.fullmatch(ticket)
            and is_number(begin, 0.0)
            for client, version, ticket, begin in self.interrupted_work
        ):  # fmt: skip
            raise ValueError("it names clients at work that cannot have been")
        if isinstance(self.engine, Deployed):
            self.engine.versions = {client: version_in(state) for client, state in self.state.store}

    def _count(self) -> None:
        """Count the rounds of each client, from the record."""
        assert self.out is not None
        rows = RunDirectory(self.out).mixing()
        if rows:
            clients = rows["client"][rows["round"] <= self.round].astype(np.int64)
            self.participations += np.bincount(clients, minlength=len(self.participations))


def run(
    recipe: Recipe,
    transport: Transport,
    nodes: int,
    out: Path | str | None = None,
    *,
    resume: bool | Path = False,
    checkpoint_every: int = 1,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
    tell: Callable[[str], None] = lambda sentence: None,
) -> RunResult:
    """Run a recipe with real clients, from the start or from a checkpoint, once ``nodes`` of them have joined.

    Settings of the run directory are those of ``fedloom.experiment.federated.run``; ``tell`` is called with a message
    about every node that joins, and about those that stop answering in time or begin again.

    Raises:
        ClientError: if fewer than ``deploy.quorum`` nodes give a usable answer in time.
    """
    with reproducible():
        earlier_roster = None if out is None else Roster.load(Path(out), resume)
        if earlier_roster is not None and out is not None:
            atomic.Lock(Path(out)).release()  # raises if another server holds the run, before nodes are waited for
        if (
            earlier_roster is not None and earlier_roster.completed >= recipe.config.values["rounds"]
        ):  # no node is needed
            roster = earlier_roster
        else:
            if earlier_roster is None and nodes != recipe.deployment.nodes:  # otherwise it was checked
                recipe.check(assumed_sizes(nodes))
            roster = assemble(
                recipe, transport, nodes if earlier_roster is None else len(earlier_roster.nodes), tell, earlier_roster
            )
        task = DeployTask(recipe, roster, transport, None if out is None else Path(out), tell)
        summary = Trainer(task, out, checkpoint_every=checkpoint_every, keep=keep, callbacks=callbacks).run(resume)
        return task.result(summary)


def load(path: Path | str) -> TrainedRun:
    """The server's model in the run directory of a deployment; no node is needed, and nothing is written.

    Raises:
        CheckpointError: if it has no checkpoint that can be read, or holds another experiment.
        DataError: if the server took the shape of inputs from data that are no longer on this machine.
    """
    directory = RunDirectory(path)
    directory.continued()  # raises for another format
    roster = Roster.load(directory.path, True)
    if roster is None:
        raise CheckpointError(f"{directory.path} has no checkpoint, and so no models to load.")
    recipe = _recipe(directory.path)
    return federated.load(lambda out: DeployTask(recipe, roster, None, out), path)


def _recipe(path: Path) -> Recipe:
    return Recipe.of(Config(DEPLOY.complete(read_run(path))))


def samples(path: Path | str, state: Path | str, data: str) -> NodeData:
    """The samples of the node with a state folder, read and split as in the run; ``data`` is what it has as ``--data``.

    Raises:
        CheckpointError: if it is not the state folder of a node.
        ConfigError: if the node's owner has agreed to read them otherwise.
    """
    recipe, home = _recipe(Path(path)), Path(state).expanduser()
    agreed = Agreement(home).agreed()
    if agreed is None:
        raise CheckpointError(f"{home} is not the state folder of a node: it has no {AGREED}.")
    if agreed[0] != as_text(recipe.spec):
        raise ConfigError(
            f"{path} reads samples under another data specification than the agreed one in {home / AGREED}; bring back "
            "the one of that run."
        )
    return read(data, recipe.spec, agreed[1])


def node_model(path: Path | str, state: Path | str, x: Any, y: Any) -> DeployedModel:
    """The model that the node with a state folder deploys, from its last state that counted; nothing is trained.

    Args:
        path: the run directory, or a copy.
        state: the folder.
        x: the node's samples [n, ...], to which methods adapt the model, as ``TrainedRun.adapt`` takes them.
        y: their targets.

    Raises:
        CheckpointError: if no state in the folder counted in this run.
    """
    trained, roster = load(path), Roster.load(Path(path), True)
    assert roster is not None
    folder = Path(state).expanduser() / roster.run
    if roster.run.isalnum() and folder.is_dir():
        with checkpoints.refusing(trained.path or folder):
            versions_by_client = {client: version_in(handle) for client, handle in trained.snapshot.store}
        versions = Versions(folder)
        files = versions.files()
        for client, version in versions_by_client.items():
            if version in files:
                return trained.with_state(client, versions.state(version), x, y)
    raise CheckpointError(
        f"{folder} has no state that counted in this run when {path} was copied; where a method keeps none at nodes, "
        "use the server's model, with fedloom predict or fl.load."
    )
