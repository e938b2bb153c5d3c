"""Parts of a configuration that commands share: data, models, checkpoints and trackers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from fedloom.config.schema import Config
from fedloom.config.sections import Choice, Record, Section, sections_of
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.data import sources
from fedloom.experiment.trackers import Tracker
from fedloom.experiment.trackers import make as make_trackers
from fedloom.models import models

T = TypeVar("T")
DATA = Choice(sources)
MODEL = Choice(models, hidden=("classes", "inputs", "low", "high"))  # these follow from the data


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


def tracking(trackers: tuple[str, ...] = ()) -> list[Tracker]:
    """Make trackers.

    Args:
        trackers: what gets every round's record besides the run directory: any of tensorboard and mlflow.
    """
    return make_trackers(trackers)


COMMON: Mapping[str, Section] = {"checkpoint": Record(Checkpoints), **sections_of(tracking)}
"""Keys of every command that trains."""


def run_settings(config: Config) -> dict[str, Any]:
    """Arguments of every task's ``run``: checkpoint intervals, and trackers as callbacks.

    Raises:
        ConfigError: for impossible checkpoints, an unknown tracker, or one whose library is not installed.
    """
    checkpoints = COMMON["checkpoint"].instantiate(config["checkpoint"])
    callbacks = tracking(tuple(config["trackers"]))
    return {"checkpoint_every": checkpoints.every, "keep": checkpoints.keep, "callbacks": callbacks}


class Shared:
    """A cache of data for the runs of a sweep: equal settings are built once.

    >>> shared, made = Shared(), []
    >>> for settings in ({"seed": 1}, {"seed": 2}, {"seed": 1}):
    ...     shared("data", settings, made.append)
    >>> made
    [{'seed': 1}, {'seed': 2}]
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __call__(self, what: str, settings: Mapping[str, Any], make: Callable[[Mapping[str, Any]], T]) -> T:
        """The result of ``make(settings)``, from the cache if it is there."""
        key = f"{what} {json.dumps(settings, sort_keys=True)}"
        if key not in self._made:
            self._made[key] = make(settings)
        return self._made[key]


def model_factory(values: Mapping[str, Any], arrays: Arrays) -> Callable[[], nn.Module]:
    """A factory of models for some data, tried on the meta device first, so that a model that does not fit is refused.

    Raises:
        ConfigError: for impossible settings.
    """
    known: dict[str, Any] = {"classes": arrays.classes, "inputs": tuple(arrays.x.shape[1:])}
    if arrays.std:  # between which values pixels lie; 0 and 1 otherwise
        pairs = list(zip(arrays.mean, arrays.std, strict=True))
        known |= {"low": tuple((0 - m) / s for m, s in pairs), "high": tuple((1 - m) / s for m, s in pairs)}
    fixed = {name: value for name, value in known.items() if name in models[values["name"]].parameters}
    make = functools.partial(MODEL.instantiate, values, **fixed)
    with torch.device("meta"):
        make()
    return make
