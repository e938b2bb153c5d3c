"""Partitions of personalised meta-learning: a window of classes per client, with common or permuted labels."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.ranges import Count
from fedloom.data.grouping import rank_within, shuffled_by_label
from fedloom.data.partitions.base import Partition, partitions


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

    deals_test: ClassVar[bool] = True

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

    names: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("partition 'alid' has no names", self.names, ("all", "local"))

    @property
    def outputs(self) -> int | None:
        return self.classes if self.names == "local" else None

    def relabelling(self, clients: int, classes: int, rng: Generator) -> ndarray:
        if self.names == "local":
            own = (np.arange(classes) - np.arange(clients)[:, None]) % classes  # of client i, class i mod C is number 0
            turned = rng.permuted(np.tile(np.arange(self.classes), (clients, 1)), axis=1)
            rest = np.tile(np.arange(self.classes, classes), (clients, 1))
            return np.take_along_axis(np.concatenate([turned, rest], axis=1), own, axis=1)
        return rng.permuted(np.tile(np.arange(classes), (clients, 1)), axis=1)


def windows(labels: ndarray, classes: int, clients: int, s: int, samples: int, setting: str, rng: Generator) -> ndarray:
    """The client of every sample, int [N], where client i takes ``samples`` of the s classes from i mod C on.

    Raises:
        DataError: if there are too few samples; the message says how many a client could have.
    """
    if s > classes:
        raise DataError(f"clients cannot hold {s} classes each: there are only {classes}.")
    held = (np.arange(clients)[:, None] + np.arange(s)) % classes  # [K, s]
    quota = np.broadcast_to(samples // s + (np.arange(s) < samples % s), held.shape)
    wanted = np.bincount(held.ravel(), quota.ravel(), minlength=classes).astype(np.int64)
    available = np.bincount(labels, minlength=classes)
    short = np.flatnonzero(wanted > available)
    if len(short):
        holders = np.bincount(held.ravel(), minlength=classes)
        most = int((available[holders > 0] // holders[holders > 0]).min()) * s
        raise DataError(
            f"class {short[0]} has {available[short[0]]} samples, but {clients} clients with {setting}={samples} need "
            f"{wanted[short[0]]} of it; " + (f"use at most {setting}={most}." if most else "use fewer clients.")
        )
    order = np.argsort(held.ravel(), kind="stable")
    holder = np.repeat(order // s, quota.ravel()[order])  # client of each wanted sample, grouped by class
    rows = shuffled_by_label(labels, rng)
    c = labels[rows]
    rank = rank_within(c)
    given = rank < wanted[c]
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[rows[given]] = holder[((np.cumsum(wanted) - wanted)[c] + rank)[given]]
    return owner
