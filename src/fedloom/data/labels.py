"""Conditions of labels: noise in training samples, and label distributions at the server.

Noise is a transition matrix. Target distributions are drawn from the common test set; parts that learn at the server
see ``Unlabelled`` inputs in random order, and the labelled samples become the common test set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch

from fedloom.base.errors import DataError
from fedloom.base.ranges import NonNegativeInt, Probability, Range
from fedloom.base.registry import Ranged, Registry
from fedloom.core.federation import Arrays, Unlabelled

noises = Registry["LabelNoise"]("label noise")


@noises.register(name="none")
@dataclass(frozen=True)
class LabelNoise(Ranged):
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
        noisy = np.empty(len(labels), dtype=np.int64)
        for c in np.unique(labels):
            rows = labels == c
            noisy[rows] = np.minimum(np.searchsorted(ends[c], u[rows] * ends[c, -1], side="right"), classes - 1)
        return noisy

    @property
    def is_identity(self) -> bool:
        """Whether no label changes."""
        return type(self) is LabelNoise


@noises.register(name="pair")
@dataclass(frozen=True)
class PairNoise(LabelNoise):
    """Pair flipping: class c becomes c + 1 (the last class 0) with probability ε; T = (1 - ε) I + ε (next class).

    Args:
        rate: ε.

    >>> PairNoise(rate=0.25).matrix(3).tolist()
    [[0.75, 0.25, 0.0], [0.0, 0.75, 0.25], [0.25, 0.0, 0.75]]
    """

    rate: Probability = 0.1

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

    rate: Probability = 0.2

    def matrix(self, classes: int) -> np.ndarray:
        flip = self.rate / max(classes - 1, 1)
        return np.where(np.eye(classes, dtype=bool), 1 - self.rate if classes > 1 else 1.0, flip)


targets = Registry["Target"]("target")


@targets.register(name="none")
@dataclass(frozen=True)
class Target(Ranged):
    """The unchanged common test set, without unlabelled inputs.

    Subclasses override ``shares``.
    """

    def shares(self, classes: int, client_counts: np.ndarray) -> np.ndarray:
        """Unnormalised class probabilities, float64 [C], from the label counts of the clients, [K, C]."""
        return np.ones(classes)

    def rows(self, labels: np.ndarray, classes: int, client_counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The largest subset of the pool with this label distribution: row numbers in random order, int64 [M].

        >>> Imbalanced(rho=4).rows(np.repeat([0, 1, 2], 8), 3, np.ones((1, 3)), np.random.default_rng(0)).shape
        (14,)
        """
        shares = self.shares(classes, client_counts).astype(float)
        available = np.bincount(labels, minlength=classes)
        required = np.flatnonzero(shares)
        if not len(required) or not available[required].all():
            missing = required[available[required] == 0][:1].tolist()
            raise DataError(f"the target needs class {missing}, which the common test set does not have.")
        size = (available[required] / shares[required]).min()
        counts = np.minimum(np.floor(shares * size + 1e-9).astype(np.int64), available)
        rows = [rng.permutation(np.flatnonzero(labels == c))[: counts[c]] for c in required]
        return rng.permutation(np.concatenate(rows))

    def draw(
        self, pool: Arrays, labels: np.ndarray, client_counts: np.ndarray, rng: np.random.Generator
    ) -> tuple[Arrays, Unlabelled]:
        """Test samples with this label distribution, and the same inputs (one tensor) without labels."""
        rows = torch.from_numpy(self.rows(labels, pool.classes, client_counts, rng))
        test = replace(pool, x=pool.x[rows], y=pool.y[rows])
        return test, Unlabelled(test.x)

    @property
    def is_identity(self) -> bool:
        """Whether the common test set is unchanged."""
        return type(self) is Target


@targets.register
@dataclass(frozen=True)
class Skew(Target):
    """The label distribution of one client's training samples.

    Args:
        client: its number, from 0.

    >>> Skew(client=1).shares(3, np.array([[4, 0, 0], [0, 2, 1]])).tolist()
    [0, 2, 1]
    """

    client: NonNegativeInt = 0

    def shares(self, classes: int, client_counts: np.ndarray) -> np.ndarray:
        if self.client >= len(client_counts):
            raise DataError(f"there is no client {self.client} whose labels the target could have.")
        return client_counts[self.client]


@targets.register
@dataclass(frozen=True)
class Imbalanced(Target):
    """A long-tailed distribution, exponential in the class number: n_c = n_1 ρ^{-(c-1)/(C-1)}.

    Args:
        rho: imbalance ratio ρ of the first class to the last.

    >>> Imbalanced(rho=100).shares(3, np.zeros((1, 3))).round(3).tolist()
    [1.0, 0.1, 0.01]
    """

    rho: Annotated[float, Range(1)] = 100.0

    def shares(self, classes: int, client_counts: np.ndarray) -> np.ndarray:
        return self.rho ** -(np.arange(classes) / max(classes - 1, 1))


@targets.register(name="uniform")
@dataclass(frozen=True)
class UniformLabels(Target):
    """The uniform distribution over the classes."""
