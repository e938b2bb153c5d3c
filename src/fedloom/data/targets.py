"""Target label distributions at the server, drawn from the common test set.

Parts that learn at the server see ``Unlabelled`` inputs in random order; the labelled samples become the common test
set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedloom.core.checks import at_least
from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays, Unlabelled
from fedloom.core.registry import Registry

targets = Registry["Target"]("target")


@targets.register(name="none")
@dataclass(frozen=True)
class Target:
    """The unchanged common test set, without unlabelled inputs.

    Subclasses override ``shares``.
    """

    def shares(self, classes: int, held: np.ndarray) -> np.ndarray:
        """Unnormalised class probabilities, float64 [C]; ``held`` is the label counts of the clients, [K, C]."""
        return np.ones(classes)

    def rows(self, labels: np.ndarray, classes: int, held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The largest subset of the pool with this label distribution: row numbers in random order, int64 [M].

        >>> Imbalanced(rho=4).rows(np.repeat([0, 1, 2], 8), 3, np.ones((1, 3)), np.random.default_rng(0)).shape
        (14,)

        Raises:
            DataError: if the pool has no samples of a class with positive probability.
        """
        shares = self.shares(classes, held).astype(float)
        available = np.bincount(labels, minlength=classes)
        wanted = np.flatnonzero(shares)
        if not len(wanted) or not available[wanted].all():
            missing = wanted[available[wanted] == 0][:1].tolist()
            raise DataError(f"the target needs class {missing}, which the common test set does not have.")
        size = (available[wanted] / shares[wanted]).min()
        counts = np.minimum(np.floor(shares * size + 1e-9).astype(np.int64), available)
        chosen = [rng.permutation(np.flatnonzero(labels == c))[: counts[c]] for c in wanted]
        return rng.permutation(np.concatenate(chosen))

    def draw(
        self, pool: Arrays, labels: np.ndarray, held: np.ndarray, rng: np.random.Generator
    ) -> tuple[Arrays, Unlabelled]:
        """Test samples with this label distribution, and the same inputs (one tensor) without labels."""
        rows = torch.from_numpy(self.rows(labels, pool.classes, held, rng))
        test = replace(pool, x=pool.x[rows], y=pool.y[rows])
        return test, Unlabelled(test.x)

    @property
    def is_identity(self) -> bool:
        """Whether the common test set is unchanged."""
        return type(self) is Target

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain data."""
        return targets.describe(self)


@targets.register
@dataclass(frozen=True)
class Skew(Target):
    """The label distribution of one client's training samples.

    Args:
        client: its number, from 0.

    >>> Skew(client=1).shares(3, np.array([[4, 0, 0], [0, 2, 1]])).tolist()
    [0, 2, 1]
    """

    client: int = 0

    def __post_init__(self) -> None:
        at_least(0, "target 'skew': ", client=self.client)

    def shares(self, classes: int, held: np.ndarray) -> np.ndarray:
        if self.client >= len(held):
            raise DataError(f"there is no client {self.client} whose labels the target could have.")
        return held[self.client]


@targets.register
@dataclass(frozen=True)
class Imbalanced(Target):
    """A long-tailed distribution, exponential in the class number: n_c = n_1 ρ^{-(c-1)/(C-1)}.

    Args:
        rho: imbalance ratio ρ of the first class to the last.

    >>> Imbalanced(rho=100).shares(3, np.zeros((1, 3))).round(3).tolist()
    [1.0, 0.1, 0.01]
    """

    rho: float = 100.0

    def __post_init__(self) -> None:
        at_least(1, "target 'imbalanced': ", rho=self.rho)

    def shares(self, classes: int, held: np.ndarray) -> np.ndarray:
        return self.rho ** -(np.arange(classes) / max(classes - 1, 1))


@targets.register(name="uniform")
@dataclass(frozen=True)
class UniformLabels(Target):
    """The uniform distribution over the classes."""
