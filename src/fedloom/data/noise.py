"""Label noise in the training samples, defined by a transition matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.core.checks import probability
from fedloom.core.registry import Registry

noises = Registry["LabelNoise"]("label noise")


@noises.register(name="none")
@dataclass(frozen=True)
class LabelNoise:
    """Base class of label noise; by itself, no noise.

    Subclasses override ``matrix``.
    """

    def matrix(self, classes: int) -> np.ndarray:
        """Transition matrix T, float64 [C, C]: T[i, j] is the probability that a sample of class i gets label j."""
        return np.eye(classes)

    def corrupt(self, labels: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a label from row ``labels[n]`` of T for every sample n; int64 [N].

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
        """Whether no label changes."""
        return type(self) is LabelNoise

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain data."""
        return noises.describe(self)


@noises.register(name="pair")
@dataclass(frozen=True)
class PairNoise(LabelNoise):
    """Pair flipping: class c becomes c + 1 (the last class 0) with probability ε; T = (1 - ε) I + ε (next class).

    Args:
        rate: ε.

    >>> PairNoise(rate=0.25).matrix(3).tolist()
    [[0.75, 0.25, 0.0], [0.0, 0.75, 0.25], [0.25, 0.0, 0.75]]
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        probability("label noise 'pair': ", rate=self.rate)

    def matrix(self, classes: int) -> np.ndarray:
        return (1 - self.rate) * np.eye(classes) + self.rate * np.roll(np.eye(classes), 1, axis=1)


@noises.register
@dataclass(frozen=True)
class Symmetric(LabelNoise):
    """Symmetric noise: any other class with probability ε, all equally likely; T_ij = ε / (C - 1) for i ≠ j.

    Args:
        rate: ε.

    >>> Symmetric(rate=0.5).matrix(3).tolist()
    [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    """

    rate: float = 0.2

    def __post_init__(self) -> None:
        probability("label noise 'symmetric': ", rate=self.rate)

    def matrix(self, classes: int) -> np.ndarray:
        other = self.rate / max(classes - 1, 1)
        return np.where(np.eye(classes, dtype=bool), 1 - self.rate if classes > 1 else 1.0, other)
