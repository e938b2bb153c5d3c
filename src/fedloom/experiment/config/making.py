"""From settled choices to the things that they describe."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from fedloom.core.federation import Arrays
from fedloom.core.registry import Entry, Registry
from fedloom.data import Source, sources
from fedloom.experiment.config.schema import parameters, signature
from fedloom.experiment.config.values import typed
from fedloom.models import models

T = TypeVar("T")


def made(held: Registry[T] | Callable[..., T], values: Mapping[str, Any], **fixed: Any) -> T:
    """What settings describe: one of a registry by its name, or a record.

    Args:
        held: the registry, or the record's class.
        values: all settings as plain data, with the name if there is a registry.
        fixed: arguments that are no settings.

    >>> from fedloom.core.local import Local
    >>> made(sources, {"name": "digits"}).train.classes, made(Local, {"lr": 1}).lr
    (10, 1.0)

    Raises:
        ConfigError: for impossible settings.
    """
    if not isinstance(held, Registry):
        return held(**fixed, **typed(signature(held), values))
    entry = held[values["name"]]
    return entry.make(**fixed, **_own(entry, values))


def _own(entry: Entry[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return typed(parameters(entry), {name: value for name, value in values.items() if name != "name"})


def source(values: Mapping[str, Any]) -> Source:
    """The data source of some settings; the last one is kept for the next run of a sweep."""
    return _source(json.dumps(values, sort_keys=True))


@functools.lru_cache(maxsize=1)
def _source(described: str) -> Source:
    return made(sources, json.loads(described))


def maker(values: Mapping[str, Any], arrays: Arrays) -> Callable[[], nn.Module]:
    """What makes a model for some data; tried without memory first, so that one that does not fit is refused here.

    Raises:
        ConfigError: for impossible settings.
    """
    known: dict[str, Any] = {"classes": arrays.classes, "inputs": tuple(arrays.x.shape[1:])}
    if arrays.std:  # between which values pixels lie; 0 and 1 otherwise
        pairs = list(zip(arrays.mean, arrays.std, strict=True))
        known |= {"low": tuple((0 - m) / s for m, s in pairs), "high": tuple((1 - m) / s for m, s in pairs)}
    entry = models[values["name"]]
    fixed = {name: value for name, value in known.items() if name in entry.parameters}
    make = functools.partial(entry.make, **fixed, **_own(entry, values))
    with torch.device("meta"):
        make()
    return make
