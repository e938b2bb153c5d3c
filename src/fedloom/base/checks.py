"""Checks on settings, each with one error sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Literal

from fedloom.base.errors import ConfigError, nearest

DType = Literal["float32", "float64"]
"""The types in which runs compute."""


def at_least(least: float, where: str = "", /, **settings: float | None) -> None:
    """Raise a ``ConfigError`` unless every setting is finite and at least ``least``, or None.

    ``where`` begins the sentence.

    >>> at_least(1, "crop: ", padding=0)
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: crop: padding must be at least 1, not 0.
    """
    for name, value in settings.items():
        if value is not None and not (isfinite(value) and value >= least):
            finite = "" if isfinite(value) else "finite and "
            raise ConfigError(f"{where}{name} must be {finite}at least {least:g}, not {value}.")


def one_of(what: str, value: object, valid: Iterable[str]) -> None:
    """Raise a ``ConfigError`` unless ``value`` is one of ``valid``; ``what`` begins the sentence.

    >>> one_of("unknown dtype", "float23", ("float32", "float64"))
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: unknown dtype 'float23'; did you mean 'float32'? There are: float32, float64.
    """
    valid = tuple(valid)
    if value not in valid:
        raise ConfigError(f"{what} {value!r}; {nearest(str(value), valid)}")


def all_hold(where: str, conditions: Mapping[str, bool]) -> None:
    """Raise a ``ConfigError`` with the first sentence whose condition does not hold, after the words in ``where``.

    >>> all_hold("training: ", {"lr must be positive": True, "clip must be positive": False})
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: training: clip must be positive.
    """
    for sentence, holds in conditions.items():
        if not holds:
            raise ConfigError(f"{where}{sentence}.")
