"""Every client sees the same distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedloom.data.partitions.base import Partition, partitions


@partitions.register
@dataclass(frozen=True)
class Iid(Partition):
    """Samples dealt at random, equally many to each client.

    >>> Iid()(np.zeros(10, int), 3, np.random.default_rng(0)).sizes.tolist()
    [4, 3, 3]
    """

    by_label: ClassVar[bool] = False

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        return rng.permutation(len(labels)) % clients
