"""Partitions: ways to assign the samples of one data set to many clients.

A partition answers one question: which client holds each sample? Label shares are equal in ``Iid`` and ``Lognormal``;
clients hold few classes in ``Shards``, ``Pathological`` and ``Niid1``, Dirichlet shares of them in ``Dirichlet``,
``DirichletBalanced`` and ``Niid2``, and a window of classes in ``Acid`` and ``Alid``.

>>> from fedloom.data.partitions import partitions
>>> partitions.names()
['iid', 'lognormal', 'shards', 'pathological', 'niid1', 'dirichlet', 'niid2', 'dirichlet_balanced', 'acid', 'alid',
 'natural', 'file', 'flower']
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, DataError, import_extra, with_type
from fedloom.base.files import readable_path
from fedloom.base.ranges import Count, NonNegative, NonNegativeInt, Positive
from fedloom.base.registry import Registry
from fedloom.base.settings import check_fields
from fedloom.core.federation import Index
from fedloom.data.columns import clients_of
from fedloom.data.split import index_of, rank_within, shuffled_by_label


@dataclass(frozen=True)
class Partition(ABC):
    """An assignment of the rows of a training set to clients.

    A subclass implements ``owners``, the client of every sample; calling the partition draws it, redraws it where
    clients fall short of ``min_size``, and returns an ``Index``. No sample can belong to two clients.

    Args:
        min_size: smallest number of samples per client; a draw that gives a client fewer is repeated.
        redraws: number of further draws before giving up.
    """

    min_size: Count = field(default=1, kw_only=True)
    redraws: NonNegativeInt = field(default=50, kw_only=True)

    reads_labels: ClassVar[bool] = True  # targets must be class numbers
    needs_clients: ClassVar[bool] = True  # False: the number of clients follows from the data

    def __post_init__(self) -> None:
        check_fields(self, "partition.")

    @abstractmethod
    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None) -> ndarray:
        """The client (0 .. clients - 1) of every sample, or -1 for a sample that is left out; int [N]."""

    def test_owners(self, labels: ndarray, classes: int, clients: int, rng: Generator) -> ndarray | None:
        """The client of every row of the common test set, int [N]; None if these go by the clients' label shares."""
        return None

    @property
    def outputs(self) -> int | None:
        """The number of outputs if clients number their own classes; None if they use those of the data."""
        return None

    def relabelling(self, clients: int, classes: int, rng: Generator) -> ndarray | None:
        """Each client's own label of each class, int [K, C]; None if all clients use the common labels."""
        return None

    def __call__(self, labels: ndarray, clients: int | None, rng: Generator, groups: ndarray | None = None) -> Index:
        """Draw the partition; each client's rows are in ascending order.

        Args:
            labels: class number of every sample, int [N].
            clients: number of clients K; None only if it follows from the data (natural ids).
            rng: source of every draw.
            groups: natural client of every sample, int [N], if the data have natural clients.
        """
        self._check(len(labels), clients)
        for _ in range(self.redraws + 1):
            owner = self.owners(labels, clients or 0, rng, groups)
            index = index_of(owner, clients or int(owner.max(initial=-1)) + 1)
            if len(index) and index.sizes.min() >= self.min_size:
                return index
        raise DataError(
            f"partition {self.name!r} left a client with fewer than {self.min_size} samples in each of "
            f"{self.redraws + 1} draws ({len(labels)} samples, {clients or 'natural'} clients); "
            "use fewer clients, a smaller min_size or less skew."
        )

    def _check(self, samples: int, clients: int | None) -> None:
        if clients is None:
            if self.needs_clients:
                raise DataError(f"partition {self.name!r} needs a number of clients.")
        elif clients < 1:
            raise DataError(f"there must be at least 1 client, not clients={clients}.")
        elif clients * self.min_size > samples:
            raise DataError(
                f"{samples} samples cannot give {clients} clients {self.min_size} each; choose fewer clients."
            )

    @property
    def name(self) -> str:
        """The name under which this kind of partition is registered."""
        return partitions.describe(self)["name"]

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain data, without ``min_size`` and ``redraws`` at their defaults."""
        usual = {"min_size": Partition.min_size, "redraws": Partition.redraws}
        return {k: v for k, v in partitions.describe(self).items() if k not in usual or usual[k] != v}


partitions = Registry[Partition]("partition")


def lognormal_sizes(samples: int, clients: int, sigma: float, rng: Generator) -> np.ndarray:
    """Sizes proportional to exp(σz), z ~ N(0, 1), rounded to integers that sum to ``samples``; int64 [K].

    >>> lognormal_sizes(100, 4, 0.5, np.random.default_rng(0)).sum()
    np.int64(100)
    """
    logs = sigma * rng.standard_normal(clients)
    with np.errstate(over="ignore"):
        share = np.exp(logs)
    if not 0 < share.sum() < np.inf:  # beyond what numbers hold, for a huge σ
        share = np.exp(logs - logs.max())
    exact = share / share.sum() * samples
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: samples - sizes.sum()]] += 1  # the largest remainders round up
    return sizes


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


@partitions.register
@dataclass(frozen=True)
class Shards(Partition):
    """Equal shards of the label-sorted samples, dealt to the clients at random (McMahan et al., AISTATS 2017).

    With two shards per client most clients hold two labels; a shard across a label boundary adds a third.

    Args:
        shards: shards per client; the more, the closer the clients' labels are to IID.

    Raises:
        DataError: if there are more shards than samples.

    >>> index = Shards(shards=2)(np.repeat(np.arange(4), 6), 4, np.random.default_rng(0))
    >>> index.sizes.tolist()
    [6, 6, 6, 6]
    """

    shards: Count = 2

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        samples, shards = len(labels), clients * self.shards
        if shards > samples:
            raise DataError(
                f"{samples} samples cannot be cut into {shards} shards ({clients} clients with {self.shards} each): "
                "there are more shards than samples."
            )
        client_of_shard = rng.permutation(shards) % clients
        owner = np.empty(samples, dtype=np.int64)
        owner[shuffled_by_label(labels, rng)] = client_of_shard[np.arange(samples) * shards // samples]
        return owner


@partitions.register
@dataclass(frozen=True)
class Pathological(Partition):
    """Exactly k classes per client, with every class at equally many clients (to within one).

    The samples of a class are split equally, at random, among the clients that hold it.

    Args:
        classes: k, the number of classes per client.

    Raises:
        DataError: if k exceeds the number of classes, if the clients cannot hold all classes, or if a class has fewer
            samples than clients that hold it.

    >>> labels = np.repeat(np.arange(5), 20)
    >>> index = Pathological(classes=2)(labels, 10, np.random.default_rng(0))
    >>> [len(set(labels[index[client]])) for client in range(10)]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    classes: Count = 2

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        return with_classes(labels, clients, self.classes, rng)


def with_classes(labels: ndarray, clients: int, k: int, rng: Generator, in_order: bool = False) -> ndarray:
    """The client of every sample, int [N], where each holds k classes: dealt at random, or k by k in their order."""
    present, label = np.unique(labels, return_inverse=True)
    available = np.bincount(label)  # [C]
    if k > len(present):
        raise DataError(f"clients cannot hold {k} classes each: there are only {len(present)}.")
    if clients * k < len(present):
        raise DataError(
            f"{clients} clients with {k} classes each cannot hold all {len(present)} classes; "
            "use more clients or more classes per client."
        )
    turns = np.arange(clients * k) % len(present)
    assigned = turns if in_order else deal_classes(clients, len(present), k, rng).ravel()  # [K k]
    holders = np.argsort(assigned, kind="stable") // k  # clients, grouped by class
    counts = np.bincount(assigned)  # [C] number of clients that hold each class
    short = np.flatnonzero(available < counts)
    if len(short):
        c = short[0]
        raise DataError(f"class {present[c]} has {available[c]} samples, but {counts[c]} clients need one.")
    rows = shuffled_by_label(label, rng)
    c = label[rows]
    owner = np.empty(len(rows), dtype=np.int64)
    owner[rows] = holders[(np.cumsum(counts) - counts)[c] + rank_within(c) % counts[c]]
    return owner


def deal_classes(clients: int, classes: int, k: int, rng: Generator) -> ndarray:
    """``k`` distinct classes for every client, with all classes equally frequent; int [K, k].

    Clients in turn take the ``k`` classes taken least often so far, ties broken at random. After
    ``classes / gcd(classes, k)`` clients all counts are equal, so blocks of that many clients are independent and are
    drawn in parallel.
    """
    period = classes // math.gcd(classes, k)
    blocks = -(-clients // period)
    dealt = np.zeros((blocks, classes), dtype=np.int32)
    hands = np.empty((blocks, period, k), dtype=np.int64)
    for turn in range(period):
        take = np.argsort(dealt + rng.random(dealt.shape), axis=1, kind="stable")[:, :k]
        hands[:, turn] = take
        np.put_along_axis(dealt, take, np.take_along_axis(dealt, take, 1) + 1, 1)
    return hands.reshape(-1, k)[:clients]


@partitions.register
@dataclass(frozen=True)
class Niid1(Partition):
    """C / ``parts`` classes per client: FedSSA's NIID-1, where each of five clients holds its own fifth of the classes.

    With another number of clients, every class is held by equally many of them (to within one).

    Args:
        parts: number of equal parts of the classes; a client holds as many classes as one part has.
        order: whether the parts are dealt in the order of the classes, so that of ten classes client k = 1, ..., 5
            holds classes 2k - 1 and 2k, as table 4 of the paper implies; otherwise classes are dealt at random.

    Raises:
        DataError: if ``parts`` does not divide the number of classes, or the clients cannot hold all classes.

    >>> labels = np.repeat(np.arange(10), 6)
    >>> index = Niid1()(labels, 5, np.random.default_rng(0))
    >>> sorted(c.item() for client in range(5) for c in np.unique(labels[index[client]]))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> index = Niid1(order=True)(labels, 5, np.random.default_rng(0))
    >>> [np.unique(labels[index[client]]).tolist() for client in range(5)]
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    """

    parts: Count = 5
    order: bool = False

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        classes = len(np.unique(labels))
        if classes % self.parts:
            raise DataError(f"{classes} classes cannot be cut into {self.parts} equal parts.")
        return with_classes(labels, clients, classes // self.parts, rng, self.order)


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
        sizes = np.bincount(np.arange(len(labels)) % clients)  # equal ones
        if self.sigma:
            sizes = lognormal_sizes(len(labels), clients, self.sigma, rng)
        prior = rng.dirichlet(np.full(len(present), self.alpha), size=clients)  # [K, C]
        places = rng.permutation(np.repeat(np.arange(clients), sizes))  # the client of each place, in order of filling
        filled = fill(places, np.maximum(prior, 1e-300), np.bincount(label), rng)
        owner = np.empty(len(labels), dtype=np.int64)
        order = np.argsort(filled, kind="stable")  # places, grouped by class
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
    labels = draw(left, places, rng).astype(narrow)
    while True:
        counts = np.bincount(labels, minlength=len(available))
        over = np.flatnonzero(counts > available)
        if not len(over):
            return labels
        order = np.argsort(labels, kind="stable")  # places, grouped by class, in order of filling
        start = np.cumsum(counts) - counts
        last = order[start[over] + available[over] - 1]  # where each of these classes is exhausted
        c = over[np.argmin(last)]
        late = order[start[c] + available[c] : start[c] + counts[c]]
        left[:, c] = 0
        labels[late] = draw(left, places[late], rng).astype(narrow)


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
    labels = np.empty(len(j), dtype=np.int64)
    labels[order] = np.searchsorted(ends.ravel(), at, side="right") - j * weights.shape[1]
    return labels


@partitions.register
@dataclass(frozen=True)
class Acid(Partition):
    """A window of s consecutive classes per client, with equally many samples of each (Acar, thesis A.1.2).

    Client i holds the classes i mod C, ..., (i + s - 1) mod C, so that many pairs of clients share no class. Training
    samples come from the training pool and, with ``held_out=common``, test samples from the common test set, both
    without replacement. Where s does not divide the number of samples, the first classes of the window get one more.
    A warning reports the samples that are left over.

    Args:
        classes: classes per client, s.
        samples: training samples per client.
        test_samples: test samples per client.

    Raises:
        DataError: if s exceeds the number of classes, or a class has too few samples.

    >>> labels = np.repeat(np.arange(5), 20)
    >>> index = Acid(classes=2, samples=20)(labels, 5, np.random.default_rng(0))
    >>> np.unique(labels[index[4]]).tolist(), index.sizes.tolist()
    ([0, 4], [20, 20, 20, 20, 20])
    """

    classes: Count = 5
    samples: int = 500
    test_samples: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.samples, self.test_samples) < self.classes:
            raise ConfigError(
                f"samples ({self.samples}) and test_samples ({self.test_samples}) must give each of a client's "
                f"{self.classes} classes at least one."
            )

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        owner = windows(labels, int(labels.max()) + 1, clients, self.classes, self.samples, "samples", rng)
        left = int((owner < 0).sum())
        if left:
            warnings.warn(
                f"partition {self.name!r} gives {clients} clients {self.samples} samples each and leaves out "
                f"{left} of {len(labels)} samples.",
                stacklevel=3,
            )
        return owner

    def test_owners(self, labels: ndarray, classes: int, clients: int, rng: Generator) -> ndarray:
        return windows(labels, classes, clients, self.classes, self.test_samples, "test_samples", rng)


@partitions.register
@dataclass(frozen=True)
class Alid(Acid):
    """ACID with a random permutation of the class labels at each client (Acar, thesis A.1.2).

    Client k labels class c as π_k(c), with one permutation π_k of all classes for its training and test samples. A
    model that does not adapt to the client cannot do better than chance.

    Args:
        names: ``all``, a permutation of the numbers of all classes; or ``local``, as published: client k numbers its s
            classes 0 ... s - 1, in its own order, and the model has s outputs. All samples then carry their owners'
            labels, and only the samples of the common test set that were dealt to clients remain.

    Raises:
        ConfigError: for unknown names, or settings out of range.

    >>> labels = Alid().relabelling(4, 3, np.random.default_rng(0))
    >>> labels.shape, np.sort(labels, axis=1)[2].tolist()
    ((4, 3), [0, 1, 2])
    """

    names: Literal["all", "local"] = "all"

    @property
    def outputs(self) -> int | None:
        return self.classes if self.names == "local" else None

    def relabelling(self, clients: int, classes: int, rng: Generator) -> ndarray:
        if self.names == "local":
            local = (
                np.arange(classes) - np.arange(clients)[:, None]
            ) % classes  # of client i, class i mod C is number 0
            turned = rng.permuted(np.tile(np.arange(self.classes), (clients, 1)), axis=1)
            rest = np.tile(np.arange(self.classes, classes), (clients, 1))
            return np.take_along_axis(np.concatenate([turned, rest], axis=1), local, axis=1)
        return rng.permuted(np.tile(np.arange(classes), (clients, 1)), axis=1)


def windows(labels: ndarray, classes: int, clients: int, s: int, samples: int, setting: str, rng: Generator) -> ndarray:
    """The client of every sample, int [N], where client i takes ``samples`` of the s classes from i mod C on.

    Raises:
        DataError: if there are too few samples; the message says how many a client could have.
    """
    if s > classes:
        raise DataError(f"clients cannot hold {s} classes each: there are only {classes}.")
    members = (np.arange(clients)[:, None] + np.arange(s)) % classes  # [K, s]
    quota = np.broadcast_to(samples // s + (np.arange(s) < samples % s), members.shape)
    demand = np.bincount(members.ravel(), quota.ravel(), minlength=classes).astype(np.int64)
    available = np.bincount(labels, minlength=classes)
    short = np.flatnonzero(demand > available)
    if len(short):
        holders = np.bincount(members.ravel(), minlength=classes)
        most = int((available[holders > 0] // holders[holders > 0]).min()) * s
        raise DataError(
            f"class {short[0]} has {available[short[0]]} samples, but {clients} clients with {setting}={samples} need "
            f"{demand[short[0]]} of it; " + (f"use at most {setting}={most}." if most else "use fewer clients.")
        )
    order = np.argsort(members.ravel(), kind="stable")
    holder = np.repeat(order // s, quota.ravel()[order])  # client of each assigned sample, grouped by class
    rows = shuffled_by_label(labels, rng)
    c = labels[rows]
    rank = rank_within(c)
    is_assigned = rank < demand[c]
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[rows[is_assigned]] = holder[((np.cumsum(demand) - demand)[c] + rank)[is_assigned]]
    return owner


@partitions.register
@dataclass(frozen=True)
class Natural(Partition):
    """One client for each natural id of the source (writer, role, user, hospital, speaker), in order of their ids.

    Ids with fewer than ``min_size`` samples are left out. If a number of clients is given, that many of the remaining
    ids are drawn at random. A warning reports what is left out.

    Raises:
        DataError: if the source has no natural ids, or fewer than the number of clients.

    >>> index = Natural()(np.zeros(5, int), None, np.random.default_rng(0), groups=np.array([7, 3, 7, 7, 3]))
    >>> [index[client].tolist() for client in range(len(index))]
    [[1, 4], [0, 2, 3]]
    """

    reads_labels: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = False

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        if groups is None:
            raise DataError(
                "partition 'natural' needs natural client ids (writers, roles, hospitals), "
                "which this source does not have."
            )
        ids, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        eligible = np.flatnonzero((ids >= 0) & (sizes >= self.min_size))
        if len(eligible) < max(clients, 1):
            raise DataError(
                f"there are {len(eligible)} natural ids with at least {self.min_size} samples, "
                f"too few for {max(clients, 1)} clients; choose fewer clients, or a smaller min_size."
            )
        if clients:
            eligible = np.sort(rng.choice(eligible, clients, replace=False))
        client = np.full(len(ids), -1)
        client[eligible] = np.arange(len(eligible))
        owner = client[which]
        if len(eligible) < len(ids):
            out = ids[client < 0]
            listed = ", ".join(map(str, out[:8])) + (f" and {len(out) - 8} more" if len(out) > 8 else "")
            warnings.warn(
                f"partition 'natural' keeps {len(eligible)} of {len(ids)} natural ids and leaves out "
                f"{int((owner < 0).sum())} of {len(groups)} samples (ids {listed}).",
                stacklevel=3,
            )
        return owner


@dataclass(frozen=True)
class Rows(Partition):
    """The rows of each client as given; rows that no client holds are left out.

    Args:
        rows: one list of row numbers per client.

    Raises:
        DataError: for a row that does not exist or is listed twice, or a client without rows.

    >>> index = Rows([[0, 2], [1]])(np.zeros(4, int), None, np.random.default_rng(0))
    >>> [index[client].tolist() for client in range(len(index))]
    [[0, 2], [1]]
    """

    rows: Any = ()

    reads_labels: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = False

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        try:
            lists = [np.asarray(part) for part in self.rows]
        except ValueError:  # of lists in lists
            raise DataError("the rows of each client must be a list of whole numbers.") from None
        if clients not in (0, len(lists)):
            raise DataError(f"there are {len(lists)} lists of rows, but {clients} clients; leave clients= out.")
        owner = np.full(len(labels), -1, dtype=np.int64)
        for client, part in enumerate(lists):
            if part.dtype.kind not in "iu" or part.ndim != 1 or not len(part):
                raise DataError(f"the rows of client {client} must be a list of one or more whole numbers.")
            if part.min() < 0 or part.max() >= len(labels):
                raise DataError(f"client {client} holds a row that is not among 0 to {len(labels) - 1}.")
            if len(np.unique(part)) < len(part) or (owner[part] >= 0).any():
                raise DataError(f"client {client} holds a row twice, or one that another client holds already.")
            owner[part] = client
        return owner

    @property
    def name(self) -> str:
        return "rows"

    def describe(self) -> dict[str, Any]:
        """Name and number of clients; the assignment itself is in the federation's fingerprint."""
        return {"name": self.name, "clients": len(self.rows)}


@partitions.register
@dataclass(frozen=True)
class File(Partition):
    """The client of every sample as a file says; ``save_partition`` and ``fedloom partition --save`` write one.

    A table (``.parquet``, ``.csv``) has a column ``client``, ``client_id`` (FedScale) or ``partition_id``
    (flwr-datasets), and the row number of the sample as ``sample``, ``row`` or ``index``; without that its rows are
    those of the data, in order. A ``.json`` file maps clients to lists of row numbers, or has LEAF's ``users`` and
    ``num_samples``, whose samples follow each other in the data. Clients are numbered in the order of their sorted ids
    in tables, and as listed in JSON.

    Args:
        path: the file.

    Raises:
        DataError: if it cannot be read, or names no clients, or a row that the data do not have, or one twice.
    """

    path: Path

    reads_labels: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = False

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        lists = _lists(self.path.expanduser(), len(labels))
        return Rows(lists).owners(labels, clients, rng)


def _lists(path: Path, samples: int) -> list[Any]:
    """The rows of each client in a file, of data with so many samples."""
    if path.suffix.lower() == ".json":
        return _lists_of_json(path, samples)
    from fedloom.data.sources.table import read_frame  # slow to import

    frame = read_frame(path)
    client = next((name for name in ("client", "client_id", "partition_id") if name in frame), None)
    row = next((name for name in ("sample", "row", "index") if name in frame), None)
    if client is None:
        raise DataError(f"{path} has no column client, client_id or partition_id.")
    if row is None and len(frame) != samples:
        raise DataError(f"{path} has {len(frame)} rows, but there are {samples} samples; add their numbers as sample.")
    rows = np.arange(samples) if row is None else frame[row].to_numpy()
    if rows.dtype.kind not in "iu":
        raise DataError(f"{path}: the column {row!r} must hold row numbers.")
    owner = np.unique(clients_of(frame[client], str(path)), return_inverse=True)[1]
    return np.split(rows[np.argsort(owner, kind="stable")], np.cumsum(np.bincount(owner))[:-1])


def _lists_of_json(path: Path, samples: int) -> list[Any]:
    from fedloom.data.sources.files import reading  # which imports rich

    with reading(path, "cannot be read as JSON"):
        content = json.loads(readable_path(path).read_text(encoding="utf-8"))
    if isinstance(content, dict) and {"users", "num_samples"} <= content.keys():
        counts = content["num_samples"]
        if not isinstance(counts, list) or not all(type(n) is int and n > 0 for n in counts):
            raise DataError(f"{path}: num_samples must be a list of whole numbers of at least 1.")
        if sum(counts) != samples:
            raise DataError(f"{path} lists {sum(counts)} samples in num_samples, but the data have {samples}.")
        return np.split(np.arange(samples), np.cumsum(counts)[:-1])
    lists = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(lists, list) or not lists or not all(isinstance(part, list) for part in lists):
        raise DataError(f"{path} maps no clients to lists of rows, and has no users and num_samples, like LEAF's.")
    return lists


@partitions.register
@dataclass(frozen=True)
class Flower(Partition):
    """Any partitioner of ``flwr-datasets``, given as an object or as a class name with settings.

    The partitioner sees a data set with the columns ``label``, ``row`` and, if the source has natural ids, ``client``;
    use ``partition_by="label"`` or ``"client"``. An object brings its own seed and number of clients; for a class name,
    ``num_partitions``, ``partition_by`` and ``seed`` are filled in unless the settings give them.

    ::

        Flower(DirichletPartitioner(num_partitions=20, partition_by="label", alpha=0.3))
        Flower(kind="DirichletPartitioner", settings={"alpha": 0.3})

    Args:
        partitioner: an object with ``dataset``, ``num_partitions`` and ``load_partition``; it is copied, not modified.
        kind: alternatively, the name of a class in ``flwr_datasets.partitioner``.
        settings: arguments of that class.

    Raises:
        DataError: if flwr-datasets is missing (``pip install "fedloom[hub]"``), or the partitioner fails, makes
            another number of partitions than there are clients, or assigns a sample twice.
    """

    partitioner: Any = None
    kind: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    needs_clients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partitioner is not None and self.kind:
            raise ConfigError("partition 'flower' takes a partitioner or the kind of one, not both.")

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        dataset = table(labels, groups)
        partitioner = copy.deepcopy(self.partitioner) if self.partitioner is not None else self._make(clients, rng)
        what = f"flwr-datasets' {type(partitioner).__name__}"
        try:
            partitioner.dataset = dataset
            count = partitioner.num_partitions
            parts = [np.asarray(partitioner.load_partition(k).with_format("numpy")["row"]) for k in range(count)]
        except Exception as error:
            raise DataError(
                f"{what} failed ({with_type(error)}); the columns are {', '.join(dataset.column_names)}."
            ) from error
        owner = Rows(parts).owners(labels, clients, rng)
        if (owner < 0).any():
            warnings.warn(f"{what} leaves out {int((owner < 0).sum())} of {len(owner)} samples.", stacklevel=3)
        return owner

    def _make(self, clients: int, rng: Generator) -> Any:
        import flwr_datasets.partitioner as kinds  # pyright: ignore[reportMissingImports]

        one_of("flwr-datasets has no partitioner", self.kind, kinds.__all__)
        make = getattr(kinds, self.kind)
        filled = {"num_partitions": clients or None, "partition_by": "label", "seed": int(rng.integers(2**31))}
        accepted = inspect.signature(make).parameters
        settings = {name: value for name, value in filled.items() if name in accepted and value is not None}
        try:
            return make(**{**settings, **self.settings})
        except Exception as error:
            raise DataError(f"flwr-datasets' {self.kind} cannot be made ({with_type(error)}).") from error

    def describe(self) -> dict[str, Any]:
        """Name, kind and settings as plain data; an object is described by its class and constructor arguments."""
        if self.partitioner is None:
            return {"name": self.name, "kind": self.kind, "settings": dict(self.settings)}
        attributes, arguments = vars(self.partitioner), inspect.signature(type(self.partitioner)).parameters
        settings = {name: attributes.get(f"_{name}", attributes.get(name)) for name in arguments}
        settings = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in settings.items()
        }
        plain = {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, str, list))}
        return {"name": self.name, "kind": type(self.partitioner).__name__, "settings": plain}


def table(labels: ndarray, groups: ndarray | None) -> Any:
    """The data as partitioners see them: a ``datasets.Dataset`` of labels, rows and natural clients, without inputs."""
    import_extra("hub", "flwr_datasets", "partition=flower")
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    columns = {"label": labels, "row": np.arange(len(labels))}
    return Dataset.from_dict(columns if groups is None else {**columns, "client": groups})
