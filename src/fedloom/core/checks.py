"""Range checks on settings, each with one error sentence."""

from __future__ import annotations

from fedloom.core.errors import ConfigError


def at_least(least: float, where: str = "", /, **settings: float) -> None:
    """Raise a ``ConfigError`` unless every setting is finite and at least ``least``; ``where`` begins the sentence.

    >>> at_least(1, "crop: ", padding=0)
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: crop: padding must be at least 1, not 0.
    """
    for name, value in settings.items():
        if not least <= value < float("inf"):
            raise ConfigError(f"{where}{name} must be at least {least:g}, not {value}.")


def positive(where: str = "", /, **settings: float) -> None:
    """Raise a ``ConfigError`` unless every setting is finite and greater than 0."""
    for name, value in settings.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{where}{name} must be a finite number greater than 0, not {value}.")


def probability(where: str = "", /, **settings: float) -> None:
    """Raise a ``ConfigError`` unless every setting lies in [0, 1]."""
    for name, value in settings.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{where}{name} must lie in [0, 1], not {value}.")
