"""From a configuration to an experiment."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedloom.core.federation import Federation
from fedloom.core.method import Method
from fedloom.core.registry import Entry
from fedloom.data import Source, federate
from fedloom.run import trackers
from fedloom.run.config import schema
from fedloom.run.config.method import make_method
from fedloom.run.config.resolve import Config
from fedloom.run.config.schema import Checkpoints
from fedloom.run.config.values import typed
from fedloom.run.experiment import Experiment
from fedloom.run.machine import pick_device


def build(config: Config) -> Experiment:
    """The experiment that a configuration describes; the cheapest checks come first.

    >>> from fedloom.run.config import resolve
    >>> experiment = build(resolve(["method=feddyn", "method.mixing=by_samples", "clients=5"]))
    >>> experiment.method.name, len(experiment.federation), experiment.rounds
    ('feddyn+by_samples', 5, 50)

    Raises:
        ConfigError: for parts or settings that are impossible together.
        DataError: for data that are missing or a partition that is impossible.
    """
    values = config.values
    method = build_method(config)
    records = {name: made(**_typed(made, values[name])) for name, made in schema.RECORDS.items()}
    records.pop("checkpoint")
    schema.tracking(tuple(values["track"]))
    pick_device(values["device"])
    federation = build_federation(config)
    engine = {key: value for key, value in values["engine"].items() if key != "name"}
    scalars = {key: values[key] for key, scalar in schema.SCALARS.items() if scalar.owner is Experiment}
    return Experiment(
        method=method,
        federation=federation,
        model=build_model(config, federation),
        engine=values["engine"]["name"],
        engine_settings=_entry_settings("engine", schema.GROUPS["engine"][values["engine"]["name"]], engine),
        config=values,
        **records,
        **_typed(Experiment, scalars),
    )


def build_method(config: Config) -> Method:
    """The method alone."""
    return make_method(config.values["method"])


def build_checkpoints(config: Config) -> Checkpoints:
    """When checkpoints are written."""
    return Checkpoints(**_typed(Checkpoints, config.values["checkpoint"]))


class Tracking:
    """The trackers of a configuration, begun with the first record: before it there is no run directory.

    Args:
        names: which ones.
        out: the run directory.
        title: what they call the run.
    """

    def __init__(self, names: Sequence[str], out: Path, title: str) -> None:
        self.begin = functools.partial(trackers.make, list(names), out, title)
        self.all: list[trackers.Tracker] | None = None

    def log(self, round: int, record: Mapping[str, Any]) -> None:
        """Pass a record on to all."""
        if self.all is None:
            self.all = self.begin()
        for tracker in self.all:
            tracker.log(round, record)

    def close(self) -> None:
        """The run is over."""
        for tracker in self.all or ():
            tracker.close()


def build_trackers(config: Config, out: Path) -> list[Tracking]:
    """What gets every round's record besides the run directory."""
    names = schema.tracking(tuple(config["track"]))
    return [Tracking(names, out, f"{build_method(config).name}-{config['seed']}")] if names else []


def build_federation(config: Config) -> Federation:
    """The data, dealt to clients."""
    values = config.values
    parts = {group: _make(group, values[group]) for group in ("partition", "noise", "target")}
    scalars = {key: values[key] for key, scalar in schema.SCALARS.items() if scalar.owner is federate}
    source = _source(json.dumps(values["data"], sort_keys=True))
    return federate(source, **parts, seed=values["seed"], **_typed(federate, scalars))


def build_model(config: Config, federation: Federation) -> Callable[[], nn.Module]:
    """What makes the model; tried without memory first, so that a model that does not fit is refused here."""
    settings = {key: value for key, value in config.values["model"].items() if key != "name"}
    entry = schema.GROUPS["model"][config.values["model"]["name"]]
    arrays = federation.train.arrays
    known = {"classes": federation.classes, "inputs": tuple(arrays.x.shape[1:])}
    if arrays.std:  # between which values pixels lie; 0 and 1 otherwise
        pairs = list(zip(arrays.mean, arrays.std, strict=True))
        known |= {"low": tuple((0 - m) / s for m, s in pairs), "high": tuple((1 - m) / s for m, s in pairs)}
    fixed = {name: value for name, value in known.items() if name in entry.parameters}
    make = functools.partial(entry.make, **fixed, **_entry_settings("model", entry, settings))
    with torch.device("meta"):
        make()
    return make


@functools.lru_cache(maxsize=1)
def _source(described: str) -> Source:
    """The data source, kept for the next run of a sweep."""
    return _make("data", json.loads(described))


def _make(group: str, values: Mapping[str, Any]) -> Any:
    entry = schema.GROUPS[group][values["name"]]
    return entry.make(**_entry_settings(group, entry, {key: value for key, value in values.items() if key != "name"}))


def _entry_settings(group: str, entry: Entry[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return typed(schema.parameters(group, entry), values)


def _typed(factory: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return typed(schema.signature(factory), values)
