"""Dirichlet partitions: label shares over the clients, or class priors of each client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.core.ranges import NonNegative, Positive
from fedloom.data.grouping import shuffled_by_label
from fedloom.data.partitions.base import Partition, equal_sizes, lognormal_sizes, partitions


@partitions.register
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is split among the clients by its own Dirichlet draw; both labels and sizes are skewed.

    For every class c, p ~ Dirichlet_K(α, ..., α), and client k gets the share p_k of the samples of c. This is what
    most frameworks implement as the Dirichlet partition (Yurochkin et al., ICML 2019), often with a citation of Hsu et
    al. (2019); ``dirichlet_balanced`` keeps the sizes under control.

    Args:
        alpha: concentration α; .1 is severe, 100 is nearly IID.

    >>> index = Dirichlet(alpha=0.3)(np.repeat(np.arange(10), 100), 5, np.random.default_rng(0))
    >>> len(index), index.sizes.sum()
    (5, np.int64(1000))
    """

    alpha: Positive = 0.3

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        owner = np.empty(len(labels), dtype=np.int64)
        for c in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == c))
            ends = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))
            ticks = (np.arange(len(rows)) + rng.random()) / len(rows)  # client k expects exactly p_k of them
            owner[rows] = np.minimum(np.searchsorted(ends, ticks, side="right"), clients - 1)
        return owner


@partitions.register
@dataclass(frozen=True)
class Niid2(Partition):
    """``dirichlet`` under the name that FedSSA gives it (NIID-2, ten clients).

    Args:
        beta: concentration.

    >>> Niid2()(np.repeat(np.arange(10), 60), 10, np.random.default_rng(0)).sizes.sum()
    np.int64(600)
    """

    beta: Positive = 0.5

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        return Dirichlet(self.beta).owners(labels, clients, rng)


@partitions.register(name="dirichlet_balanced")
@dataclass(frozen=True)
class DirichletBalanced(Partition):
    """Each client fills a prescribed size from its own Dirichlet prior over the classes.

    Client k draws q_k ~ Dirichlet_C(α, ..., α) over the classes that occur. Places at the clients are filled in random
    order: a class is drawn from the client's prior, then a sample of that class without replacement. Once a class is
    exhausted, priors are renormalised over the remaining classes (uniform if a prior has no mass left), so that every
    sample is dealt. This is the partition of FedDyn (Acar et al., ICLR 2021; thesis A.1.1); priors per client are also
    those of Hsu et al. (2019).

    Args:
        alpha: concentration α; the papers use .3 and .6.
        sigma: 0 for equal sizes; otherwise the standard deviation of the logarithm of lognormal sizes.

    >>> index = DirichletBalanced(alpha=0.3)(np.repeat(np.arange(10), 100), 5, np.random.default_rng(0))
    >>> index.sizes.tolist()
    [200, 200, 200, 200, 200]
    """

    alpha: Positive = 0.3
    sigma: NonNegative = 0.0

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
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
        owner[shuffled_by_label(label, rng)] = places[order]  # samples of class c to places of class c
        return owner


def fill(places: ndarray, prior: ndarray, available: ndarray, rng: Generator) -> ndarray:
    """Draw the class of each place in order and without replacement; int [N] with ``available[c]`` entries of class c.

    A draw from a prior renormalised over the remaining classes equals a draw from the prior repeated until it hits a
    remaining class. All places can therefore be drawn at once; then, class by class in the order of exhaustion, the
    places that came too late for the class are redrawn without it.

    Args:
        places: client of each place, int [N].
        prior: positive class priors, [K, C].
        available: number of samples of each class, int [C], summing to N.
        rng: source of the draws.
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
        last = order[start[over] + available[over] - 1]  # where each of these classes is exhausted
        c = over[np.argmin(last)]
        late = order[start[c] + available[c] : start[c] + counts[c]]
        left[:, c] = 0
        drawn[late] = draw(left, places[late], rng).astype(narrow)


def draw(weights: ndarray, clients: ndarray, rng: Generator) -> ndarray:
    """One class for each entry of ``clients`` from that client's row of ``weights`` [K, C]; int [len(clients)].

    The rows' distribution functions are concatenated on one axis, the j-th client's on [j, j + 1), so that a single
    ``searchsorted`` serves all draws; visiting it client by client keeps it in the processor's cache.
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
