"""Partitions with the same label distribution at every client: equal or lognormal sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.core.ranges import Positive
from fedloom.data.partitions.base import Partition, lognormal_sizes, partitions


@partitions.register
@dataclass(frozen=True)
class Iid(Partition):
    """Uniformly random assignment with equal sizes.

    >>> Iid()(np.zeros(10, int), 3, np.random.default_rng(0)).sizes.tolist()
    [4, 3, 3]
    """

    reads_labels: ClassVar[bool] = False

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        return rng.permutation(len(labels)) % clients


@partitions.register
@dataclass(frozen=True)
class Lognormal(Partition):
    """Uniformly random assignment with lognormal sizes (quantity skew): client k's is proportional to exp(σz_k).

    Args:
        sigma: σ, the standard deviation of the logarithm of the sizes; FedDyn's unbalanced setting is .3.

    >>> Lognormal(sigma=0.5)(np.zeros(100, int), 4, np.random.default_rng(0)).sizes.sum()
    np.int64(100)
    """

    sigma: Positive = 0.3

    reads_labels: ClassVar[bool] = False

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        sizes = lognormal_sizes(len(labels), clients, self.sigma, rng)
        return rng.permutation(np.repeat(np.arange(clients), sizes))
