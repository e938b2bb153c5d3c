"""From a configuration to an experiment."""

from __future__ import annotations

from fedloom.core.federation import Federation
from fedloom.core.method import Method
from fedloom.data import federate
from fedloom.experiment import trackers
from fedloom.experiment.config import schema
from fedloom.experiment.config.making import made, maker, source
from fedloom.experiment.config.method import make_method
from fedloom.experiment.config.resolve import Config
from fedloom.experiment.config.schema import Checkpoints
from fedloom.experiment.config.values import typed
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.runtime import pick_device


def build(config: Config) -> Experiment:
    """The experiment that a configuration describes; the cheapest checks come first.

    >>> from fedloom.experiment.config import resolve
    >>> experiment = build(resolve(["method=feddyn", "method.mixing=by_samples", "clients=5"]))
    >>> experiment.method.name, len(experiment.federation), experiment.rounds
    ('feddyn+by_samples', 5, 50)

    Raises:
        ConfigError: for parts or settings that are impossible together.
        DataError: for data that are missing or a partition that is impossible.
    """
    values = config.values
    method = build_method(config)
    records = {name: made(record, values[name]) for name, record in schema.RECORDS.items()}
    records.pop("checkpoint")
    schema.tracking(tuple(values["trackers"]))
    pick_device(values["device"])
    federation = build_federation(config)
    engine = dict(values["engine"])
    name = engine.pop("name")
    scalars = {key: values[key] for key, scalar in schema.SCALARS.items() if scalar.owner is Experiment}
    return Experiment(
        method=method,
        federation=federation,
        model=maker(values["model"], federation.train.arrays),
        engine=name,
        engine_settings=typed(schema.parameters(schema.GROUPS["engine"][name]), engine),
        config=values,
        **records,
        **typed(schema.signature(Experiment), scalars),
    )


def build_method(config: Config) -> Method:
    """The method alone."""
    return make_method(config.values["method"])


def build_checkpoints(config: Config) -> Checkpoints:
    """When checkpoints are written."""
    return made(Checkpoints, config.values["checkpoint"])


def build_trackers(config: Config) -> list[trackers.Tracker]:
    """What gets every round's record besides the run directory."""
    return trackers.make(schema.tracking(tuple(config["trackers"])))


def build_federation(config: Config) -> Federation:
    """The data, dealt to clients."""
    values = config.values
    parts = {group: made(schema.GROUPS[group], values[group]) for group in ("partition", "noise", "target")}
    scalars = {key: values[key] for key, scalar in schema.SCALARS.items() if scalar.owner is federate}
    return federate(source(values["data"]), **parts, seed=values["seed"], **typed(schema.signature(federate), scalars))
