"""Every client sees a few classes only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.partitions.base import Partition, by_label, partitions


@partitions.register
@dataclass(frozen=True)
class Pathological(Partition):
    """Exactly k classes per client, every class at equally many clients.

    Classes are dealt so that the numbers of clients that hold two classes differ by one at most; the samples of a class
    are then dealt equally, at random, to the clients that hold it.

    Args:
        classes: classes per client, k.

    Raises:
        DataError: if k exceeds the number of classes, if the clients together have fewer places than there are classes,
            or if a class has fewer samples than clients that are to hold it.

    >>> labels = np.repeat(np.arange(5), 20)
    >>> index = Pathological(classes=2)(labels, 10, np.random.default_rng(0))
    >>> [len(set(labels[index[client]])) for client in range(10)]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    classes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 1:
            raise ConfigError(f"classes must be at least 1 per client, not {self.classes}.")

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        present, label = np.unique(labels, return_inverse=True)
        available = np.bincount(label)  # [C]
        if self.classes > len(present):
            raise DataError(f"clients cannot hold {self.classes} classes each: there are only {len(present)}.")
        if clients * self.classes < len(present):
            raise DataError(
                f"{clients} clients with {self.classes} classes each cannot hold all {len(present)} classes: "
                "samples would vanish."
            )
        chosen = deal_classes(clients, len(present), self.classes, rng)  # [K, k]
        holders = np.argsort(chosen.ravel(), kind="stable") // self.classes  # clients, grouped by class
        held = np.bincount(chosen.ravel())  # [C] how many clients hold each class
        short = np.flatnonzero(available < held)
        if len(short):
            c = short[0]
            raise DataError(f"class {present[c]} has {available[c]} samples, but {held[c]} clients are to hold it.")
        rows = by_label(label, rng)
        c = label[rows]
        rank = np.arange(len(rows)) - (np.cumsum(available) - available)[c]  # place of a sample within its class
        owner = np.empty(len(rows), dtype=np.int64)
        owner[rows] = holders[(np.cumsum(held) - held)[c] + rank % held[c]]
        return owner


def deal_classes(clients: int, classes: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """``k`` different classes for every client, all classes equally often; int [K, k].

    One client after the other takes the ``k`` classes dealt least often so far, ties broken at random. After ``period``
    clients every class has been dealt equally often, so that blocks of that many clients are independent and are dealt
    side by side.
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
