"""Partitions with few classes per client: label-sorted shards, exactly k classes, and FedSSA's NIID-1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.core.errors import DataError
from fedloom.core.ranges import Count
from fedloom.data.grouping import rank_within, shuffled_by_label
from fedloom.data.partitions.base import Partition, partitions


@partitions.register
@dataclass(frozen=True)
class Shards(Partition):
    """Equal shards of the label-sorted samples, dealt to the clients at random (McMahan et al., AISTATS 2017).

    With two shards per client most clients hold two labels; a shard across a label boundary adds a third.

    Args:
        shards: shards per client.

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
        present, label = np.unique(labels, return_inverse=True)
        available = np.bincount(label)  # [C]
        if self.classes > len(present):
            raise DataError(f"clients cannot hold {self.classes} classes each: there are only {len(present)}.")
        if clients * self.classes < len(present):
            raise DataError(
                f"{clients} clients with {self.classes} classes each cannot hold all {len(present)} classes; "
                "use more clients or more classes per client."
            )
        chosen = self.dealt(clients, len(present), rng)  # [K, k]
        holders = np.argsort(chosen.ravel(), kind="stable") // self.classes  # clients, grouped by class
        held = np.bincount(chosen.ravel())  # [C] number of clients that hold each class
        short = np.flatnonzero(available < held)
        if len(short):
            c = short[0]
            raise DataError(f"class {present[c]} has {available[c]} samples, but {held[c]} clients are to hold it.")
        rows = shuffled_by_label(label, rng)
        c = label[rows]
        owner = np.empty(len(rows), dtype=np.int64)
        owner[rows] = holders[(np.cumsum(held) - held)[c] + rank_within(c) % held[c]]
        return owner

    def dealt(self, clients: int, classes: int, rng: Generator) -> ndarray:
        """The classes that each client holds, int [K, k]."""
        return deal_classes(clients, classes, self.classes, rng)


def deal_classes(clients: int, classes: int, k: int, rng: Generator) -> ndarray:
    """``k`` distinct classes for every client, with all classes equally frequent; int [K, k].

    Clients in turn take the ``k`` classes taken least often so far, ties broken at random. After
    ``classes / gcd(classes, k)`` clients all counts are equal, so blocks of that many clients are independent and are
    drawn in parallel.
    """
    period = classes // math.gcd(classes, k)
    blocks = -(-clients // period)
    dealt = np.zeros((blocks, classes), dtype=np.int32)
    chosen = np.empty((blocks, period, k), dtype=np.int64)
    for turn in range(period):
        take = np.argsort(dealt + rng.random(dealt.shape), axis=1, kind="stable")[:, :k]
        chosen[:, turn] = take
        np.put_along_axis(dealt, take, np.take_along_axis(dealt, take, 1) + 1, 1)
    return chosen.reshape(-1, k)[:clients]


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
        return (_InOrder if self.order else Pathological)(classes // self.parts).owners(labels, clients, rng)


@dataclass(frozen=True)
class _InOrder(Pathological):
    """As ``Pathological``, but client 0 holds the first k classes, client 1 the next k, and so on, cyclically."""

    def dealt(self, clients: int, classes: int, rng: Generator) -> ndarray:
        return np.arange(clients * self.classes).reshape(-1, self.classes) % classes
