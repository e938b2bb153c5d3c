"""Dirichlet over classes, one draw per client, sizes given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.data.partitions.base import Partition, by_label, equal_sizes, lognormal_sizes, partitions, positive


@partitions.register(name="dirichlet_balanced")
@dataclass(frozen=True)
class DirichletBalanced(Partition):
    """Each client draws its own Dirichlet class prior and fills a given size from it.

    Client k has the prior q_k ~ Dirichlet_C(alpha, ..., alpha) over the classes that occur. The clients' places are
    filled in random order: a class is drawn from the client's prior, then a sample of it, without replacement. When a
    class has run out, priors are renormalised over the classes that remain (uniform where nothing of the prior
    remains), so that every sample is dealt. This is the partition of FedDyn (Acar et al., "Federated learning based on
    dynamic regularization", ICLR 2021; thesis A.1.1); priors per client are also those of Hsu et al. (2019).

    Args:
        alpha: concentration; the papers use .3 and .6.
        sigma: 0 for equal sizes, otherwise sizes are lognormal with this standard deviation of their logarithm.

    >>> index = DirichletBalanced(alpha=0.3)(np.repeat(np.arange(10), 100), 5, np.random.default_rng(0))
    >>> index.sizes.tolist()
    [200, 200, 200, 200, 200]
    """

    alpha: float = 0.3
    sigma: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("alpha", self.alpha)
        if not 0 <= self.sigma < float("inf"):
            raise ConfigError(f"sigma must be 0 (equal sizes) or a finite number above it, not {self.sigma}.")

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        present, label = np.unique(labels, return_inverse=True)
        if self.sigma:
            sizes = lognormal_sizes(len(labels), clients, self.sigma, rng)
        else:
            sizes = equal_sizes(len(labels), clients)
        prior = rng.dirichlet(np.full(len(present), self.alpha), size=clients)  # [K, C]
        places = rng.permutation(np.repeat(np.arange(clients), sizes))  # the client of each place, in order of filling
        drawn = fill(places, np.maximum(prior, 1e-300), np.bincount(label), rng)
        owner = np.empty(len(labels), dtype=np.int64)
        order = np.argsort(drawn, kind="stable")  # places, grouped by class
        owner[by_label(label, rng)] = places[order]  # samples of class c to places of class c
        return owner


def fill(places: np.ndarray, prior: np.ndarray, available: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The class at each place, drawn in order and without replacement; int [N] with ``available[c]`` entries of c.

    One place after the other would be slow. As a draw from a prior that is renormalised over the remaining classes is a
    draw from the prior, repeated until it hits a remaining class, all places are drawn at once; then, class by class in
    the order in which they run out, the places that came too late for it are drawn again without it.

    Args:
        places: the client of each place, int [N].
        prior: positive class prior of each client, [K, C].
        available: samples of each class, int [C], N in all.
        rng: where the draws come from.
    """
    left = prior.copy()
    narrow = np.min_scalar_type(len(available))  # short integers sort in linear time
    drawn = draw(left, places, rng).astype(narrow)
    while True:
        counts = np.bincount(drawn, minlength=len(available))
        over = np.flatnonzero(counts > available)
        if not len(over):
            return drawn
        order = np.argsort(drawn, kind="stable")  # places, grouped by class, in order of filling
        start = np.cumsum(counts) - counts
        last = order[start[over] + available[over] - 1]  # where each of these classes runs out
        c = over[np.argmin(last)]
        late = order[start[c] + available[c] : start[c] + counts[c]]
        left[:, c] = 0
        drawn[late] = draw(left, places[late], rng).astype(narrow)


def draw(weights: np.ndarray, clients: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One class for each entry of ``clients`` from that client's row of ``weights`` [K, C]; int [len(clients)].

    The rows' distribution functions are laid end to end on one axis, the j-th client's on [j, j + 1), so that one
    search serves all draws; it goes along the axis, client by client, which keeps it in the processor's cache.
    """
    order = np.argsort(clients, kind="stable")  # ties in one order on every machine
    who = clients[order]
    first = np.append(True, who[1:] != who[:-1])
    j = np.cumsum(first) - 1
    ends = np.cumsum(weights[who[first]], axis=1)
    ends /= ends[:, -1:]
    ends += np.arange(len(ends))[:, None]
    at = np.minimum(j + rng.random(len(j)), np.nextafter(j + 1.0, 0))
    drawn = np.empty(len(j), dtype=np.int64)
    drawn[order] = np.searchsorted(ends.ravel(), at, side="right") - j * weights.shape[1]
    return drawn
