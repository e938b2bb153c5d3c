"""Target distributions: the labels for which one wants a model, drawn from the common test set.

A target has two sides. The learner's is ``Unlabelled``: inputs alone, in random order. The labels go into the common
test set, on which the server model is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays, Unlabelled
from fedloom.core.registry import Registry

targets = Registry["Target"]("target")


@targets.register(name="none")
@dataclass(frozen=True)
class Target:
    """The common test set as it is, and no unlabelled inputs.

    Other targets say one thing, ``shares``.
    """

    def shares(self, classes: int, first: np.ndarray) -> np.ndarray:
        """How often each class occurs, up to a factor, float64 [C]; ``first`` are the first client's label counts."""
        return np.ones(classes)

    def rows(self, labels: np.ndarray, classes: int, first: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """As many rows of the pool as have this distribution, in random order; int64 [M].

        >>> Imbalanced(rho=4).rows(np.repeat([0, 1, 2], 8), 3, np.ones(3), np.random.default_rng(0)).shape
        (14,)

        Raises:
            DataError: if a class that is wanted does not occur.
        """
        shares = self.shares(classes, first).astype(float)
        available = np.bincount(labels, minlength=classes)
        wanted = np.flatnonzero(shares)
        if not len(wanted) or not available[wanted].all():
            missing = wanted[available[wanted] == 0][:1].tolist()
            raise DataError(f"the target wants class {missing}, which the common test set does not have.")
        size = (available[wanted] / shares[wanted]).min()
        counts = np.minimum(np.floor(shares * size + 1e-9).astype(np.int64), available)
        chosen = [rng.permutation(np.flatnonzero(labels == c))[: counts[c]] for c in wanted]
        return rng.permutation(np.concatenate(chosen))

    @property
    def is_identity(self) -> bool:
        """Whether nothing happens."""
        return type(self) is Target

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain data."""
        name = next((entry.name for entry in targets if entry.factory is type(self)), type(self).__name__)
        return {"name": name} | {f.name: getattr(self, f.name) for f in fields(self)}


@targets.register
@dataclass(frozen=True)
class Skew(Target):
    """The labels of the first client's training samples."""

    def shares(self, classes: int, first: np.ndarray) -> np.ndarray:
        """The first client's label counts."""
        return first


@targets.register
@dataclass(frozen=True)
class Imbalanced(Target):
    """Exponentially fewer samples from class to class: n_c = n_1 ρ^{-(c-1)/(C-1)}.

    Args:
        rho: how many times more often the first class occurs than the last.

    >>> Imbalanced(rho=100).shares(3, np.zeros(3)).round(3).tolist()
    [1.0, 0.1, 0.01]
    """

    rho: float = 100.0

    def __post_init__(self) -> None:
        if not 1 <= self.rho < float("inf"):
            raise ConfigError(f"target 'imbalanced': rho must be at least 1, not {self.rho}.")

    def shares(self, classes: int, first: np.ndarray) -> np.ndarray:
        """ρ^{-(c-1)/(C-1)}."""
        return self.rho ** -(np.arange(classes) / max(classes - 1, 1))


@targets.register
@dataclass(frozen=True)
class Uniform(Target):
    """All classes equally often."""


def drawn(
    target: Target, pool: Arrays, labels: np.ndarray, first: np.ndarray, rng: np.random.Generator
) -> tuple[Arrays, Unlabelled]:
    """The target's test set and its inputs without labels, which are one tensor.

    Args:
        target: which distribution.
        pool: the common test set.
        labels: its class numbers.
        first: the first client's label counts [C].
        rng: where draws come from.
    """
    rows = torch.from_numpy(target.rows(labels, pool.classes, first, rng))
    test = replace(pool, x=pool.x[rows], y=pool.y[rows])
    return test, Unlabelled(test.x)
