"""The partitions of personalised meta-learning: a window of classes per client, with or without names of its own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedloom.core.errors import ConfigError, DataError, nearest
from fedloom.data.partitions.base import Partition, by_label, partitions


@partitions.register
@dataclass(frozen=True)
class Acid(Partition):
    """A window of s classes per client, equally many samples of each (Acar, thesis A.1.2).

    Client i holds classes i mod C, ..., (i + s - 1) mod C, so that many pairs of clients have no class in common.
    Training samples come from the training pool and, with ``held_out=common``, test samples from the common test set,
    without replacement: no sample goes to two clients. Where s does not divide the number of samples, the first classes
    of the window give one more. What is left over is said in a warning.

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

    classes: int = 5
    samples: int = 500
    test_samples: int = 100

    deals_test: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 1:
            raise ConfigError(f"classes must be at least 1 per client, not {self.classes}.")
        if min(self.samples, self.test_samples) < self.classes:
            raise ConfigError(
                f"samples ({self.samples}) and test_samples ({self.test_samples}) must give each of a client's "
                f"{self.classes} classes at least one."
            )

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        owner = windows(labels, int(labels.max()) + 1, clients, self.classes, self.samples, "samples", rng)
        left = int((owner < 0).sum())
        if left:
            warnings.warn(
                f"partition {self.name!r} gives {clients} clients {self.samples} samples each and leaves out "
                f"{left} of {len(labels)} samples.",
                stacklevel=3,
            )
        return owner

    def test_owners(self, labels: np.ndarray, classes: int, clients: int, rng: np.random.Generator) -> np.ndarray:
        """See ``Partition.test_owners``."""
        return windows(labels, classes, clients, self.classes, self.test_samples, "test_samples", rng)


@partitions.register
@dataclass(frozen=True)
class Alid(Acid):
    """ACID with names of its own for the classes at each client (Acar, thesis A.1.2).

    Client k calls class c π_k(c), π_k a random permutation of all classes, the same for its training and its test
    samples; the federation remembers it. A model that does not adapt to the client is then at chance.

    Args:
        names: ``all``, a permutation of the numbers of all classes; or ``local``, as published: client k calls its s
            classes 0 ... s - 1, in an order of its own, and the model has s outputs. Then the labels of all samples
            are those of their owners, and of the common test set what was dealt to clients remains.

    >>> names = Alid().relabelling(4, 3, np.random.default_rng(0))
    >>> names.shape, np.sort(names, axis=1)[2].tolist()
    ((4, 3), [0, 1, 2])
    """

    names: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names not in ("all", "local"):
            raise ConfigError(f"partition 'alid' has no names {self.names!r}; {nearest(self.names, ('all', 'local'))}")

    @property
    def outputs(self) -> int | None:
        """See ``Partition.outputs``."""
        return self.classes if self.names == "local" else None

    def relabelling(self, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray:
        """See ``Partition.relabelling``."""
        if self.names == "local":
            own = (np.arange(classes) - np.arange(clients)[:, None]) % classes  # of client i, class i mod C is number 0
            turned = rng.permuted(np.tile(np.arange(self.classes), (clients, 1)), axis=1)
            rest = np.tile(np.arange(self.classes, classes), (clients, 1))
            return np.take_along_axis(np.concatenate([turned, rest], axis=1), own, axis=1)
        return rng.permuted(np.tile(np.arange(classes), (clients, 1)), axis=1)


def windows(
    labels: np.ndarray, classes: int, clients: int, s: int, samples: int, setting: str, rng: np.random.Generator
) -> np.ndarray:
    """The client of every sample, int [N], where client i takes ``samples`` of s classes from class i mod C on.

    Raises:
        DataError: if that cannot be, saying how many samples a client could have.
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
            f"{wanted[short[0]]} of it; " + (f"ask for at most {setting}={most}." if most else "ask for fewer clients.")
        )
    order = np.argsort(held.ravel(), kind="stable")
    holder = np.repeat(order // s, quota.ravel()[order])  # clients, one entry a sample, grouped by class
    rows = by_label(labels, rng)
    c = labels[rows]
    rank = np.arange(len(rows)) - (np.cumsum(available) - available)[c]
    given = rank < wanted[c]
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[rows[given]] = holder[((np.cumsum(wanted) - wanted)[c] + rank)[given]]
    return owner
