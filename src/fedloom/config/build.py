"""Sections of the configuration that all commands share: data, model, checkpoints and trackers."""

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
from fedloom.core.files import check_memory
from fedloom.core.ranges import Count, within
from fedloom.core.targets import TargetKind, outputs_for
from fedloom.data import sources
from fedloom.experiment.trackers import Tracker
from fedloom.experiment.trackers import make as make_trackers
from fedloom.models import models

T = TypeVar("T")
DATA = Choice(sources)
MODEL = Choice(models, hidden=("classes", "inputs", "low", "high"))  # these follow from the data


@dataclass(frozen=True)
class Checkpoints:
    """Settings of checkpoints.

    Args:
        every: rounds between checkpoints; one is also written at the end and on Ctrl-C.
        keep: number of checkpoints to keep.

    Raises:
        ConfigError: if a setting is below 1.
    """

    every: Count = 10
    keep: Count = 2

    def __post_init__(self) -> None:
        within(self, "checkpoint.")


def tracking(trackers: tuple[str, ...] = ()) -> list[Tracker]:
    """Make trackers.

    Args:
        trackers: log every round's record to these, in addition to the run directory: tensorboard, mlflow, wandb.
    """
    return make_trackers(trackers)


COMMON: Mapping[str, Section] = {"checkpoint": Record(Checkpoints), **sections_of(tracking)}
"""Keys of every command that trains."""


def run_settings(config: Config) -> dict[str, Any]:
    """The arguments of every task's ``run``: checkpoint settings, and trackers as callbacks.

    Raises:
        ConfigError: for invalid checkpoint settings, an unknown tracker, or one whose library is not installed.
    """
    checkpoints = COMMON["checkpoint"].instantiate(config["checkpoint"])
    callbacks = tracking(tuple(config["trackers"]))
    return {"checkpoint_every": checkpoints.every, "keep": checkpoints.keep, "callbacks": callbacks}


class Shared:
    """A cache of data for the runs of a sweep; equal settings are built once.

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


def model_factory(
    values: Mapping[str, Any], arrays: Arrays, targets: TargetKind | None = None
) -> Callable[[], nn.Module]:
    """Make a model factory for given data and, if the method declares it, their kind of targets.

    It is tried on the meta device, to detect invalid settings.

    Raises:
        ConfigError: for invalid settings.
    """
    make = functools.partial(MODEL.instantiate, values, **following(values["name"], arrays, targets))
    try:
        with torch.device("meta"):
            made = make()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(
            f"model={values['name']}: its layers are larger than any memory; choose smaller sizes."
        ) from error
    size = sum(t.numel() * t.element_size() for t in made.state_dict().values())
    check_memory(f"model={values['name']}", size)
    return make


def following(name: str, arrays: Arrays, targets: TargetKind | None = None) -> dict[str, Any]:
    """The arguments of a model that follow from the data: outputs, inputs, and the value range of a generator."""
    known: dict[str, Any] = {
        "classes": outputs_for(arrays.y, arrays.classes, targets),
        "inputs": tuple(arrays.x.shape[1:]),
    }
    if arrays.std:  # the value range of normalised pixels; [0, 1] otherwise
        pairs = list(zip(arrays.mean, arrays.std, strict=True))
        known |= {"low": tuple((0 - m) / s for m, s in pairs), "high": tuple((1 - m) / s for m, s in pairs)}
    return {key: value for key, value in known.items() if key in models[name].parameters}
