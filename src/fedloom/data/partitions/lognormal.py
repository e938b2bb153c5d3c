"""Clients differ in how much they hold, not in what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedloom.data.partitions.base import Partition, lognormal_sizes, partitions, positive


@partitions.register
@dataclass(frozen=True)
class Lognormal(Partition):
    """Samples dealt at random, in lognormal amounts (quantity skew).

    Client k holds a share proportional to exp(sigma z_k) with z_k ~ N(0, 1).

    Args:
        sigma: standard deviation of the logarithm of the sizes; .3 is the unbalanced setting of FedDyn.

    >>> Lognormal(sigma=0.5)(np.zeros(100, int), 4, np.random.default_rng(0)).sizes.sum()
    np.int64(100)
    """

    sigma: float = 0.3

    by_label: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("sigma", self.sigma)

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        sizes = lognormal_sizes(len(labels), clients, self.sigma, rng)
        return rng.permutation(np.repeat(np.arange(clients), sizes))
