"""The server of a deployment: nodes join, and then rounds are those of a simulation, with clients elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.config.build import DATA, model_factory
from fedloom.config.federated import CONDITIONS, METHOD
from fedloom.config.schema import Config
from fedloom.config.sections import arguments
from fedloom.core.engine import ComputeFactory, EngineFactory
from fedloom.core.errors import ConfigError, printable
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.parts import Submodels
from fedloom.core.plan import ClientPlan
from fedloom.core.slots import label
from fedloom.deploy.answers import upload_shapes
from fedloom.deploy.assignment import Assignment, bench, model_digest, settings_of
from fedloom.deploy.data import DataSpec, NodeData
from fedloom.deploy.engine import Deployed, Tally, Terms, version_in
from fedloom.deploy.messages import JOIN, Order, Request, is_count
from fedloom.deploy.settings import DEPLOY, Deployment
from fedloom.deploy.transport import Transport
from fedloom.deploy.wire import WireError, unpack
from fedloom.experiment import atomic
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask, RoundStep, RunResult
from fedloom.experiment.privacy import private_uplink
from fedloom.experiment.rundir import Columns, RunDirectory
from fedloom.experiment.runtime import one_thread
from fedloom.experiment.trainer import Record, Trainer
from fedloom.parts.uplink import SecureSum

BEGUN = "rounds_begun"  # the file of their number
REMIND = 15.0  # seconds between reminders of who has not joined
Sizes = tuple[int, int, int]  # samples for training, validation and tests


@dataclass(frozen=True)
class Roster:
    """The nodes of a run, in the order of their client numbers.

    Attributes:
        run: the run's identifier.
        nodes: the numbers of samples of each node, by name.
        completed: rounds that the run had completed when this was stored.
    """

    run: str
    nodes: Mapping[str, Sizes]
    completed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The node of each client."""
        return tuple(self.nodes)

    @classmethod
    def stored(cls, directory: Path, resume: bool | Path) -> Roster | None:
        """The roster in the checkpoint from which a run is continued; None if there is none."""
        found = checkpoints.available(RunDirectory(directory).checkpoints) if resume else []
        path = resume if isinstance(resume, Path) else found[-1] if found else None
        if path is None:
            return None
        stored = checkpoints.load(path)
        about = stored.facts.get("deploy")
        if about is None:
            raise ConfigError(f"{directory} was not made by a deployment; continue it with fedloom run.")
        nodes = {name: (sizes[0], sizes[1], sizes[2]) for name, sizes in about["nodes"].items()}
        return cls(about["run"], nodes, stored.round)


@dataclass(frozen=True)
class Recipe:
    """The configuration of a deployment, as read by its server.

    Attributes:
        config: the configuration.
        deployment: its section ``deploy``.
        spec: the requirements on nodes' samples.
        test: the server's own test samples; may be empty.
    """

    config: Config
    deployment: Deployment
    spec: DataSpec
    test: Arrays

    @classmethod
    def of(cls, config: Config) -> Recipe:
        """Read a configuration.

        Raises:
            ConfigError: if something in it cannot be deployed.
        """
        values = config.values
        deployment = DEPLOY.sections["deploy"].instantiate(values["deploy"])
        shares: dict[str, Any] = {
            name: values[name] if isinstance(values[name], float) else 0.0 for name in ("validation", "held_out")
        }
        if deployment.inputs is not None:
            spec = DataSpec(deployment.inputs, deployment.classes or 1, names=deployment.names, **shares)
            test = placeholder(spec).take(torch.zeros(0, dtype=torch.int64))
        else:
            source = DATA.instantiate(values["data"])
            spec, test = DataSpec.of(source.train, **shares), source.test
        if deployment.range is not None:
            spec = replace(spec, range=deployment.range)
        recipe = cls(config, deployment, spec, test)
        recipe.refuse()
        samples = placeholder(spec)
        made = bench(
            recipe.assignment("trial"), NodeData(samples, samples, samples)
        )  # what no node could do is said here
        if made.plan.is_private and "received" in values["evaluation"]["what"]:
            raise ConfigError(
                "evaluation.what=received asks nodes for the losses of their training samples, which no noise of this "
                "private run covers; leave it out."
            )
        return recipe

    def refuse(self) -> None:
        """Raise ``ConfigError`` for settings that a deployment does not support, naming them."""
        values, method = self.config.values, METHOD.instantiate(self.config.values["method"])
        what = values["evaluation"]["what"]
        if method.pooled:
            raise ConfigError(
                f"method {method.name!r} trains on the pooled data of all clients, which never leave their nodes."
            )
        for name, why in (
            ("average", "needs every client's own model"),
            ("cohort", "needs every client's own model"),
            ("train", "measures on all training data, which never leave their nodes"),
        ):
            if name in what:
                raise ConfigError(f"evaluation.what={name} {why}; a deployment can measure global and clients.")
        if isinstance(method.personal, Submodels) and method.personal.chosen:
            raise ConfigError(
                f"with personal {label(method.personal)!r} clients choose among several models, which is not deployed."
            )
        for uplink in method.uplink:
            if isinstance(uplink, SecureSum):
                raise ConfigError(
                    "uplink 'secure_sum' draws its masks from the run's seed, which hides nothing from a server that "
                    "knows it; leave it out, and see docs/deploy.md for what protects uploads."
                )
        for need, what_for in (("target", "unlabelled inputs at the server"), ("teacher", "a trained model")):
            if method.needs(need):
                raise ConfigError(f"{method.who_needs(need)} learns from {what_for}, which is not deployed.")
        if values["model"].get("pretrained"):
            raise ConfigError("model.pretrained=true makes nodes download weights; set it to false.")
        for key in ("drop_rate", "unseen"):
            if values[key]:
                raise ConfigError(f"{key} is for simulations; in a deployment, set it to 0.")
        if values["local"].get("stragglers"):
            raise ConfigError("local.stragglers is for simulations; in a deployment, set it to 0.")

    def experiment(self, roster: Roster) -> Experiment:
        """The experiment over the nodes of a roster, of which the server knows the numbers of samples."""
        values, none = self.config.values, np.zeros(0, np.int64)
        arrays = placeholder(self.spec)
        counts = np.array(list(roster.nodes.values()), np.int64).reshape(-1, 3).T
        train, validation, held_out = (
            Split(arrays, Index(none, np.concatenate([[0], np.cumsum(column)])))
            for column in (counts[0], counts[1], 0 * counts[2])  # tests are the nodes' own
        )
        federation = Federation(train, validation, held_out, self.test, names=roster.names)
        conditions = arguments(Experiment, CONDITIONS, values)
        conditions |= {"engine": "serial", "engine_settings": {}, "device": "cpu", "client_state": "memory"}
        method = METHOD.instantiate(values["method"])
        model = model_factory(values["model"], arrays, method.targets)
        return Experiment(method=method, federation=federation, model=model, config=values, **conditions)

    def assignment(self, run: str) -> Assignment:
        """The assignment of nodes before the population is known."""
        return Assignment(run, settings_of(self.config.values), asdict(self.spec))


def placeholder(spec: DataSpec) -> Arrays:
    """Two samples of zeros, on which models are tried."""
    x = torch.zeros(2, *spec.inputs, dtype=torch.int64 if spec.integer else torch.float32)
    y = torch.zeros(2, *spec.targets, dtype=torch.float32 if spec.numeric else torch.int64)
    return Arrays(x, y, spec.classes, spec.names, spec.mean, spec.std)


def assemble(
    recipe: Recipe,
    transport: Transport,
    nodes: int,
    tell: Callable[[str], None] = lambda sentence: None,
    known: Roster | None = None,
) -> Roster:
    """Wait for nodes to join, and number them in the order of their names.

    Args:
        recipe: the configuration.
        transport: reaches the nodes.
        nodes: K.
        tell: called with a message about every event.
        known: the roster of a run to be continued: it continues with ``deploy.quorum`` of these nodes if the others are
            not back within ``deploy.deadline`` seconds.

    Raises:
        ConfigError: if a node of a run that is continued has another number of samples.
    """
    run = known.run if known is not None else secrets.token_hex(8)
    order = recipe.assignment(run)
    joined: dict[str, Sizes] = {}
    asked: dict[str, str] = {}  # the session in which each node was asked
    told = started = time.monotonic()
    waits = f"waiting for {nodes} nodes" if known is None else f"waiting for {len(known.nodes)} nodes to come back"
    tell(waits)
    while len(joined) < nodes:
        now = time.monotonic()
        late = known is not None and now - started > recipe.deployment.deadline
        if late and len(joined) >= recipe.deployment.quorum:
            break
        online = transport.online()
        fresh = {
            name: Request(Order(secrets.token_hex(16), (JOIN,), order.facts).packed())
            for name, session in online.items()
            if asked.get(name) != session and (known is None or name in known.nodes)
        }
        asked |= {name: online[name] for name in fresh}
        if fresh:
            transport.send(fresh)
        for delivered in transport.receive(0.5):
            sizes, remark = _joined(delivered.blob, recipe.deployment)
            if sizes is None:
                tell(f"{delivered.node} {remark}")
                continue
            before = known.nodes.get(delivered.node) if known is not None else None
            if before is not None and before != sizes:
                raise ConfigError(
                    f"{delivered.node} has {', '.join(map(str, sizes))} samples for training, validation and tests, "
                    f"but had {', '.join(map(str, before))} when the run began; bring its data back, or begin a new "
                    "run."
                )
            if delivered.node not in joined and len(joined) < nodes:
                joined[delivered.node] = sizes
                tell(f"{delivered.node} joined with {sizes[0]} samples ({len(joined)} of {nodes}){remark}")
        if now - told > REMIND:
            told = now
            tell(f"{waits}, {len(joined)} are here")
    return known if known is not None else Roster(run, dict(sorted(joined.items())))


def _joined(blob: bytes, terms: Deployment) -> tuple[Sizes | None, str]:
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
            several = isinstance(threads, int) and 1 < threads < 2**16
            return (a, b, c), f"; it computes with {threads} threads and rounds differently" if several else ""
    return None, f"refused: {printable(str(facts.get('reason', 'it gave no reason')))[:1000]}"


class DeployTask(FederatedTask):
    """A federated task whose clients are nodes.

    Args:
        recipe: the configuration.
        roster: the nodes.
        transport: the transport to them.
        out: run directory.
    """

    def __init__(self, recipe: Recipe, roster: Roster, transport: Transport, out: Path | None = None) -> None:
        super().__init__(recipe.experiment(roster), out)
        self.recipe, self.roster, self.transport = recipe, roster, transport
        self.plan = replace(self.plan, noise_seed=secrets.randbits(128))
        if self.plan.is_private:  # who knows the cohorts, learns more: nodes know the experiment's seed
            self.cohort_seed = secrets.randbits(62)
        self.make_engine = EngineFactory(self._engine, Deployed.traits)
        self.traits = Deployed.traits

    def _engine(self, plan: ClientPlan, compute: ComputeFactory) -> Deployed:
        deployment, experiment = self.recipe.deployment, self.experiment
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
        samples = placeholder(self.recipe.spec)
        trial = bench(replace(assignment, clients=1, model=""), NodeData(samples, samples, samples))
        terms = Terms(deployment.deadline, deployment.quorum, deployment.limit, self._oldest)
        names, shapes = self.roster.names, upload_shapes(trial)
        return Deployed(plan, compute, self.transport, names, assignment, terms, shapes)

    def _oldest(self) -> int:
        """The completed rounds of the oldest checkpoint to which the run may go back."""
        if self.out is None:
            return self.round
        found = checkpoints.available(RunDirectory(self.out).checkpoints)
        return int(found[0].name.removeprefix("round-")) if found else 0

    def step(self) -> RoundStep:
        """One round; members that are absent before their local work are reported as absent, not as diverged."""
        engine = self.engine
        assert isinstance(engine, Deployed)
        engine.tally = Tally()
        self._begin()
        step = super().step()
        step.report.failures[:] = [engine.absent.get(f.client, f) for f in step.report.failures]
        return step

    def _begin(self) -> None:
        """Count a round when it starts, before anything is requested: a repeated round costs privacy again."""
        if not self.plan.is_private or self.out is None:
            return
        path = self.out / BEGUN
        begun = int(path.read_text()) + 1 if path.exists() else self.round + 1
        atomic.write_whole(path, str(begun).encode())
        self.repeated = begun - self.round - 1

    def commit(self, step: RoundStep) -> tuple[Record, dict[str, Columns]]:
        """The round's record, with the statistics of its messages and those of its evaluation."""
        record, tables = super().commit(step)
        assert isinstance(self.engine, Deployed)
        return record | self.engine.tally.record(), tables

    def snapshot(self) -> Checkpoint:
        stored = super().snapshot()
        stored.facts["deploy"] = {"run": self.roster.run, "nodes": {k: list(v) for k, v in self.roster.nodes.items()}}
        if self.plan.is_private:
            stored.facts["deploy"]["cohorts"] = self.cohort_seed
        return stored

    def restore(self, checkpoint: Checkpoint) -> None:
        self.cohort_seed = checkpoint.facts["deploy"].get("cohorts", self.cohort_seed)
        super().restore(checkpoint)
        assert isinstance(self.engine, Deployed)
        self.engine.versions = {client: version_in(state) for client, state in self.state.store}


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
    """Run a recipe with real clients, from the start or from a checkpoint.

    Args:
        recipe: the configuration.
        transport: reaches the nodes.
        nodes: K, the number of nodes to wait for.
        out: run directory; None keeps everything in memory.
        resume: True resumes from the newest checkpoint in ``out``; a path, from that checkpoint.
        checkpoint_every: rounds between checkpoints.
        keep: number of checkpoints to keep.
        callbacks: observers of the run.
        tell: called with a message about every event before the first round.

    Raises:
        ConfigError: if a node's data changed since the run began.
        ClientError: if fewer than ``deploy.quorum`` nodes give a usable answer in time.
        CheckpointError: as ``fedloom.experiment.federated.run``.
    """
    with one_thread():
        known = None if out is None else Roster.stored(Path(out), resume)
        if known is not None and known.completed >= recipe.config.values["rounds"]:  # no node is needed
            roster = known
        else:
            roster = assemble(recipe, transport, nodes if known is None else len(known.nodes), tell, known)
        task = DeployTask(recipe, roster, transport, None if out is None else Path(out))
        summary = Trainer(task, out, checkpoint_every=checkpoint_every, keep=keep, callbacks=callbacks).run(resume)
        return task.result(summary)
