"""The two partitions under which models for a given target distribution are studied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.partitions.base import Partition, partitions, positive
from fedloom.data.partitions.dirichlet import Dirichlet
from fedloom.data.partitions.pathological import Pathological


@partitions.register
@dataclass(frozen=True)
class Niid1(Partition):
    """C/5 categories per client: with five clients, each category at one client only (NIID-1 of FedSSA).

    With other numbers of clients a category sits at several of them, at equally many to within one.

    Args:
        parts: into how many equal parts the categories are cut; a client holds one part's worth.

    Raises:
        DataError: if the number of categories is not a multiple of ``parts``, or the clients cannot hold all of them.

    >>> labels = np.repeat(np.arange(10), 6)
    >>> index = Niid1()(labels, 5, np.random.default_rng(0))
    >>> sorted(c.item() for client in range(5) for c in np.unique(labels[index[client]]))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    parts: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts < 1:
            raise ConfigError(f"parts must be at least 1, not {self.parts}.")

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        classes = len(np.unique(labels))
        if classes % self.parts:
            raise DataError(f"{classes} categories cannot be cut into {self.parts} equal parts.")
        return Pathological(classes // self.parts).owners(labels, clients, rng)


@partitions.register
@dataclass(frozen=True)
class Niid2(Partition):
    """Each category spread over the clients by its own Dirichlet draw (NIID-2 of FedSSA, ten clients).

    Args:
        beta: concentration.

    >>> Niid2()(np.repeat(np.arange(10), 60), 10, np.random.default_rng(0)).sizes.sum()
    np.int64(600)
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("beta", self.beta)

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        return Dirichlet(self.beta).owners(labels, clients, rng)
