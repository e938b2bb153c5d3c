"""What the server of a deployment knows before its first round: the recipe and the nodes; and data split for nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.base.errors import ConfigError
from fedloom.config.keys import CONDITIONS, DATA, Shared, build_federation, build_method, model_factory
from fedloom.config.schema import Config
from fedloom.config.sections import arguments
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.slots import label
from fedloom.data.sources.files import write_npz
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask
from fedloom.experiment.rundir import RunDirectory
from fedloom.parts.uplink import SecureSum
from fedloom_apps.deploy.arrivals import SCHEDULES, Real
from fedloom_apps.deploy.assignment import Assignment, prepare_without_data, settings_of
from fedloom_apps.deploy.data import SCALED, DataSpec, placeholder
from fedloom_apps.deploy.settings import DEPLOY, Deployment

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
    def load(cls, directory: Path, resume: bool | Path) -> Roster | None:
        """The roster in the checkpoint from which a run is continued; None if there is none."""
        paths = checkpoints.available(RunDirectory(directory).checkpoints) if resume else []
        path = resume if isinstance(resume, Path) else paths[-1] if paths else None
        if path is None:
            return None
        checkpoint = checkpoints.load(path)
        about = checkpoint.facts.get("deploy")
        if about is None:
            raise ConfigError(f"{directory} is not a deployment; resume it with fedloom run.")
        with checkpoints.refusing(path):
            nodes = {name: (int(a), int(b), int(c)) for name, (a, b, c) in about["nodes"].items()}
            return cls(str(about["run"]), nodes, checkpoint.round)


@dataclass(frozen=True)
class Recipe:
    """The configuration of a deployment, as read by its server.

    Attributes:
        config: the configuration.
        deployment: its section ``deploy``.
        spec: the requirements on nodes' samples.
        test: the server's own test samples; may be empty.
        source: how the server's data were made, if it has some.
    """

    config: Config
    deployment: Deployment
    spec: DataSpec
    test: Arrays
    source: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> Recipe:
        """Read a configuration."""
        values = config.values
        deployment = DEPLOY.sections["deploy"].instantiate(values["deploy"])
        shares: dict[str, Any] = {
            name: values[name] if isinstance(values[name], float) else 0.0 for name in ("validation", "held_out")
        }
        if deployment.inputs is not None and deployment.classes is not None:
            if values["data"].get("standardise"):
                raise ConfigError(
                    "data.standardise=true scales by the means and deviations of the server's own data, but with "
                    "deploy.inputs it loads none; leave out one of the two."
                )
            spec = DataSpec(deployment.inputs, deployment.classes, names=deployment.names, **shares)
            test, about = placeholder(spec).take(torch.zeros(0, dtype=torch.int64)), {}
        else:
            source = DATA.instantiate(values["data"])
            spec = DataSpec.of(source.train, **shares, **table_settings(source.settings))
            test, about = source.test, source.describe()
        if deployment.range is not None:
            spec = replace(spec, range=deployment.range)
        recipe = cls(config, deployment, spec, test, about)
        recipe.refuse()
        plan = prepare_without_data(recipe.assignment("trial")).plan  # refuses what no node could run
        if plan.is_private and "received" in values["evaluation"]["what"]:
            raise ConfigError(
                "evaluation.what=received asks nodes for the losses of their training samples, which no noise of this "
                "private run covers; leave it out."
            )
        if deployment.nodes is not None:
            recipe.check(assumed_sizes(deployment.nodes))
        return recipe

    def check(self, nodes: Mapping[str, Sizes]) -> None:
        """Refuse what cannot run with these nodes, as a simulation with as many clients would."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself warns
            FederatedTask(self.experiment(Roster("trial", nodes)))

    def refuse(self) -> None:
        """Raise ``ConfigError`` for settings that a deployment does not support, naming them."""
        values, method = self.config.values, build_method(self.config)
        what = values["evaluation"]["what"]
        if method.pooled:
            raise ConfigError(
                f"method {method.name!r} trains on the pooled data of all clients, which never leave their nodes."
            )
        for name, why in (
            ("average", "needs every client's own model"),
            ("cohort", "needs every client's own model"),
            ("validation", "measures on samples that nodes keep for losses"),
            ("train", "measures on all training data, which never leave their nodes"),
        ):
            if name in what:
                raise ConfigError(f"evaluation.what={name} {why}; a deployment can measure global and clients.")
        if not method.topology.is_identity:
            raise ConfigError(
                f"topology {label(method.topology)!r} has several models, and a deployment sends one; set "
                "method.topology=none."
            )
        for uplink in method.uplink:
            if isinstance(uplink, SecureSum):
                raise ConfigError(
                    "uplink 'secure_sum' draws its masks from the run's seed, which hides nothing from a server that "
                    "knows it; leave it out, and see docs/deploy.md for what protects uploads."
                )
        for need, what_for in (
            ("target", "unlabelled inputs at the server"),
            ("public", "unlabelled inputs at the server"),
            ("teacher", "a trained model"),
        ):
            if method.needs(need):
                raise ConfigError(f"{method.who_needs(need)} learns from {what_for}, which is not deployed.")
        if method.mixing.needs.label_counts:
            raise ConfigError(
                f"mixing {label(method.mixing)!r} looks at the classes of clients, which nodes do not send; choose "
                "another one."
            )
        if values["init"] is not None and not method.personal.is_identity:
            raise ConfigError(
                f"with personal {label(method.personal)!r} nodes keep parameters, which they would not take from init; "
                "leave it out."
            )
        for key in ("client_local", "presence"):
            if values[key]:
                raise ConfigError(f"{key} is for simulations, whose clients have numbers beforehand; leave it out.")
        for key, names, why in (
            ("schedule", SCHEDULES, "goes by durations that are known beforehand"),
            ("devices", ("none",), "is simulated, and nodes have their own"),
            ("selection", ("uniform",), "goes by durations and losses of simulations"),
        ):
            if (name := values[key]["name"]) not in names:
                raise ConfigError(f"{key}={name} {why}; in a deployment, choose {' or '.join(names)}.")
        if values["schedule"]["name"] != "rounds" and method.needs("probabilities"):
            raise ConfigError(
                f"{method.who_needs('probabilities')} divides by the probability of being in time, which is not known "
                "of nodes; choose schedule=rounds."
            )
        stragglers = {"local.stragglers": values["local"].get("stragglers")}
        for key, value in ({name: values[name] for name in ("drop_rate", "unseen")} | stragglers).items():
            if value:
                raise ConfigError(f"{key} is for simulations; in a deployment, set it to 0.")
        if values["attack"]["name"] != "none":
            raise ConfigError("attack is for simulations only; set attack=none.")

    def experiment(self, roster: Roster) -> Experiment:
        """The experiment over the nodes of a roster, of which the server knows the numbers of samples."""
        values, none = self.config.values, np.zeros(0, np.int64)
        arrays, about = placeholder(self.spec), {"source": self.source} if self.source else {}
        counts = np.array(list(roster.nodes.values()), np.int64).reshape(-1, 3).T
        train, validation, held_out = (
            Split(arrays, Index(none, np.concatenate([[0], np.cumsum(column)])))
            for column in (counts[0], counts[1], 0 * counts[2])  # tests are the nodes' own
        )
        federation = Federation(train, validation, held_out, self.test, names=roster.names, provenance=about)
        conditions = arguments(Experiment, CONDITIONS, values)
        conditions |= {"engine": "serial", "engine_settings": {}, "device": "cpu", "client_state": "memory"}
        conditions["devices"] = Real()
        method = build_method(self.config)
        model = model_factory(values["model"], arrays, method.targets)
        config = {**values, "clients": len(roster.nodes)}
        return Experiment(method=method, federation=federation, model=model, config=config, **conditions)

    def assignment(self, run: str) -> Assignment:
        """The assignment of nodes before the population is known."""
        return Assignment(run, settings_of(self.config.values), asdict(self.spec))


def assumed_sizes(nodes: int) -> dict[str, Sizes]:
    """As many nodes with samples for training and validation, to check a recipe before any has joined."""
    return dict.fromkeys(node_names(nodes), (2, 2, 0))


def table_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The columns, labels and scale of a source of tables, or the crop of one of images, as settings of a ``DataSpec``.

    >>> table_settings({"columns": ["age"], "label": "ill"}), table_settings({"path": "x.npz"})
    ({'columns': ('age',), 'label': ('ill',)}, {})
    """
    scale = settings.get("standardised")
    result: dict[str, Any] = {"crop": True} if settings.get("crop") is True else {}
    if isinstance(scale, Mapping):  # other sources say under this name how they were made
        result["standardised"] = scale
    if "columns" in settings:
        labels = settings.get("label") or ()
        result["columns"] = tuple(settings["columns"])
        result["label"] = (labels,) if isinstance(labels, str) else tuple(labels)
    return result


def split_for_nodes(config: Config, folder: Path, shared: Shared | None = None) -> list[Path]:
    """Write the samples of every client of a configuration to an npz file of its own.

    If its data are standardised, the files hold what a run's predictions take as arrays: columns of arrays before they
    are scaled, which the nodes do with the same bits; columns of a table as they are, ``scaled``.

    Returns:
        The files ``node-<number>.npz``, in the order of the clients.
    """
    federation = build_federation(config, shared)
    if federation.unseen:
        raise ConfigError("unseen clients never train, so they cannot be nodes; set unseen=0.")
    source, scale_mark = federation.provenance.get("source", {}), dict[str, np.ndarray]()
    if isinstance(source.get("standardised"), Mapping):
        if "columns" in source:
            scale_mark = {SCALED: np.array(True)}
        else:
            data = {**config.values["data"], "standardise": False}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the partition, which has warned
                federation = build_federation(replace(config, values={**config.values, "data": data}))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = [folder / f"{name}.npz" for name in node_names(len(federation))]
    for client, path in enumerate(paths):
        write_npz(path, **arrays_of(federation, client), **scale_mark)
    return paths


def node_names(nodes: int) -> list[str]:
    """Names that sort like their numbers.

    >>> node_names(2), node_names(11)[9]
    (['node-0', 'node-1'], 'node-09')
    """
    width = len(str(nodes - 1))
    return [f"node-{number:0{width}d}" for number in range(nodes)]


def sizes_of(federation: Federation) -> dict[str, tuple[int, int, int]]:
    """The numbers of samples that each node would have for training, validation and tests."""
    counts = (split.index.sizes.tolist() for split in (federation.train, federation.validation, federation.held_out))
    return dict(zip(node_names(len(federation)), zip(*counts, strict=True), strict=True))


def arrays_of(federation: Federation, client: int) -> dict[str, np.ndarray]:
    """One client's samples under the names that ``fedloom_apps.deploy.data.read`` knows."""
    splits = {"train": federation.train, "validation": federation.validation, "test": federation.held_out}
    parts = {name: split.client(client) for name, split in splits.items()}
    return {f"{kind}_{name}": getattr(arrays, kind).numpy() for name, arrays in parts.items() for kind in "xy"}
