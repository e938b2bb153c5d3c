"""Which keys there are. Everything is read from registries and signatures; nothing is written twice."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, get_type_hints

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.local import Local
from fedloom.core.registry import Entry, Registry
from fedloom.core.slots import SLOTS
from fedloom.data import federate, noises, partitions, sources, targets
from fedloom.engines import engines
from fedloom.experiment.config.values import Parameters
from fedloom.experiment.experiment import Evaluation, Experiment
from fedloom.experiment.trackers import TRACKERS
from fedloom.methods import methods
from fedloom.models import models

GROUPS: dict[str, Registry[Any]] = {
    "method": methods,
    "data": sources,
    "partition": partitions,
    "noise": noises,
    "target": targets,
    "model": models,
    "engine": engines,
}
"""Keys that choose by name."""

FROM_DATA = {"model": ("classes", "inputs", "low", "high")}
"""Parameters of a kind of factory that are no settings because they follow from the data."""


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, and how many are kept.

    Args:
        every: rounds between two checkpoints; one is also written at the end and on Ctrl-C.
        keep: how many are kept.
    """

    every: int = 10
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ConfigError(f"checkpoint: every and keep must be at least 1, not {self.every} and {self.keep}.")


RECORDS: dict[str, type] = {"local": Local, "evaluation": Evaluation, "checkpoint": Checkpoints}
"""Keys that are records of settings."""


def tracking(trackers: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Trackers that get every round's record besides the run directory.

    Args:
        trackers: any of tensorboard and mlflow.

    Raises:
        ConfigError: for an unknown one, or one whose library is not installed.
    """
    for name in trackers:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}; {nearest(name, TRACKERS)}")
        if find_spec(name) is None:
            raise ConfigError(f"trackers={name} needs a library that is not installed; pip install 'fedloom[track]'.")
    return trackers


class Scalar(NamedTuple):
    """A key of its own: whose parameter it is, and the parameter."""

    owner: Callable[..., Any]
    parameter: inspect.Parameter


def signature(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters with resolved annotations."""
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    parameters = inspect.signature(factory).parameters
    return {name: p.replace(annotation=hints.get(name, p.annotation)) for name, p in parameters.items()}


def _scalars() -> dict[str, Scalar]:
    found = {name: Scalar(federate, p) for name, p in signature(federate).items() if name not in GROUPS | {"source": 0}}
    for name, parameter in signature(Experiment).items():
        if name not in {*GROUPS, *RECORDS, "federation", "engine_settings", "config"}:
            found[name] = Scalar(Experiment, parameter)
    found["trackers"] = Scalar(tracking, signature(tracking)["trackers"])
    return found


SCALARS: dict[str, Scalar] = _scalars()
"""Keys that are one value."""


def parameters(entry: Entry[Any]) -> Parameters:
    """The settings of something registered."""
    return {name: p for name, p in entry.parameters.items() if name not in FROM_DATA.get(entry.kind, ())}


def chooses(path: tuple[str, ...]) -> Registry[Any] | None:
    """The registry by which the value at a key is chosen, if it is: a group, or a slot of the method.

    >>> chooses(("data",)).kind, chooses(("method", "mixing")).kind, chooses(("local", "lr"))
    ('data source', 'mixing', None)
    """
    match path:
        case (group,):
            return GROUPS.get(group)
        case ("method", slot) if slot != "objective":
            return SLOTS.get(slot)
    return None


def names() -> dict[str, list[str]]:
    """The names there are, for every key that chooses by name."""
    found = {group: registry.names() for group, registry in GROUPS.items()}
    return found | {f"method.{slot}": registry.names() for slot, registry in SLOTS.items() if slot != "objective"}


def top_level() -> list[str]:
    """All first parts of keys."""
    return [*GROUPS, *RECORDS, *SCALARS, "out", "resume"]


def unknown(key: str, leaves: Iterable[str]) -> ConfigError:
    """The error for a first part of a key that there is not.

    >>> str(unknown("lr", ["local.lr", "seed"])).partition(" There are")[0]
    "unknown key 'lr'; did you mean 'local.lr'?"
    """
    inside = [leaf for leaf in leaves if leaf.rpartition(".")[2] == key]
    close = difflib.get_close_matches(key, top_level(), n=1, cutoff=0.6)
    if inside and not close:
        there = ", ".join(sorted(top_level()))
        return ConfigError(f"unknown key {key!r}; did you mean {inside[0]!r}? There are: {there}.")
    return ConfigError(f"unknown key {key!r}; {nearest(key, top_level())}")
