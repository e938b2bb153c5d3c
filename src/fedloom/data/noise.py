"""Wrong training labels, drawn by a transition matrix."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.core.registry import Registry

noises = Registry["LabelNoise"]("label noise")


@noises.register(name="none")
@dataclass(frozen=True)
class LabelNoise:
    """Labels stay as they are.

    Other kinds of noise say one thing, ``matrix``.
    """

    def matrix(self, classes: int) -> np.ndarray:
        """T[i, j]: the probability that a sample of class i gets label j, float64 [C, C]."""
        return np.eye(classes)

    def corrupt(self, labels: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
        """Labels drawn from the rows of the matrix, one for each true label; int64 [N].

        >>> PairNoise(rate=0.5).corrupt(np.array([2, 2, 2, 2]), 3, np.random.default_rng(0)).tolist()
        [2, 0, 0, 0]
        """
        ends = np.cumsum(self.matrix(classes), axis=1)
        u = rng.random(len(labels))
        drawn = np.empty(len(labels), dtype=np.int64)
        for c in np.unique(labels):
            rows = labels == c
            drawn[rows] = np.minimum(np.searchsorted(ends[c], u[rows] * ends[c, -1], side="right"), classes - 1)
        return drawn

    @property
    def is_identity(self) -> bool:
        """Whether nothing happens."""
        return type(self) is LabelNoise

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain data."""
        name = next((entry.name for entry in noises if entry.factory is type(self)), type(self).__name__)
        return {"name": name} | {f.name: getattr(self, f.name) for f in fields(self)}


@noises.register(name="pair")
@dataclass(frozen=True)
class PairNoise(LabelNoise):
    """With probability ε class c is called c + 1, the last one 0: mistakes between similar classes.

    Args:
        rate: ε.

    >>> PairNoise(rate=0.25).matrix(3).tolist()
    [[0.75, 0.25, 0.0], [0.0, 0.75, 0.25], [0.25, 0.0, 0.75]]
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        probability("pair", self.rate)

    def matrix(self, classes: int) -> np.ndarray:
        """T = (1 - ε) I + ε (next class)."""
        return (1 - self.rate) * np.eye(classes) + self.rate * np.roll(np.eye(classes), 1, axis=1)


@noises.register
@dataclass(frozen=True)
class Symmetric(LabelNoise):
    """With probability ε a class is called by any of the other names, all equally likely.

    Args:
        rate: ε.

    >>> Symmetric(rate=0.5).matrix(3).tolist()
    [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    """

    rate: float = 0.2

    def __post_init__(self) -> None:
        probability("symmetric", self.rate)

    def matrix(self, classes: int) -> np.ndarray:
        """T = (1 - ε) I + ε/(C - 1) off the diagonal."""
        other = self.rate / max(classes - 1, 1)
        return np.where(np.eye(classes, dtype=bool), 1 - self.rate if classes > 1 else 1.0, other)


def probability(name: str, rate: float) -> None:
    """Refuse a rate that is no probability."""
    if not 0 <= rate <= 1:
        raise ConfigError(f"label noise {name!r}: rate must lie in [0, 1], not {rate}.")
