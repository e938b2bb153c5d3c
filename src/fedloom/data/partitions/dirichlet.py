"""Dirichlet over clients, one draw per class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.data.partitions.base import Partition, partitions, positive


@partitions.register
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class spread over the clients by its own Dirichlet draw; sizes differ too.

    For every class c: p ~ Dirichlet_K(alpha, ..., alpha), and client k gets the share p_k of the samples of c. This is
    the most common "Dirichlet partition" (Yurochkin et al., "Bayesian nonparametric federated learning", ICML 2019, as
    implemented by most frameworks, often cited with Hsu et al. 2019). Both the labels and the sizes are skewed; see
    ``dirichlet_balanced`` for the one that leaves the sizes alone.

    Args:
        alpha: concentration; .1 is severe, 100 is nearly IID.

    >>> index = Dirichlet(alpha=0.3)(np.repeat(np.arange(10), 100), 5, np.random.default_rng(0))
    >>> len(index), index.sizes.sum()
    (5, np.int64(1000))
    """

    alpha: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("alpha", self.alpha)

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        owner = np.empty(len(labels), dtype=np.int64)
        for c in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == c))
            ends = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))
            ticks = (np.arange(len(rows)) + rng.random()) / len(rows)  # client k expects exactly p_k of them
            owner[rows] = np.minimum(np.searchsorted(ends, ticks, side="right"), clients - 1)
        return owner
