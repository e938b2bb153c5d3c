"""What a partition is: an answer to "which client holds each sample?"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Index
from fedloom.core.registry import Registry


@dataclass(frozen=True)
class Partition(ABC):
    """Deals the rows of a training set to clients.

    A subclass says one thing, ``owners``: the client of every sample. As a sample has one owner, it cannot sit at two
    clients; everything else that must hold is checked here, once.

    Args:
        min_size: samples that every client must get; a draw that leaves a client with fewer is redrawn.
        redraws: how many further draws there may be before giving up.
    """

    min_size: int = field(default=1, kw_only=True)
    redraws: int = field(default=50, kw_only=True)

    by_label: ClassVar[bool] = True  # reads the labels, so that they must be class numbers
    needs_clients: ClassVar[bool] = True  # False: the number of clients follows from the data
    deals_test: ClassVar[bool] = False  # True: it says itself who holds which row of the common test set

    def __post_init__(self) -> None:
        if self.min_size < 1:
            raise ConfigError(f"min_size must be at least 1, not {self.min_size}.")
        if self.redraws < 0:
            raise ConfigError(f"redraws must be 0 or more, not {self.redraws}.")

    @abstractmethod
    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> np.ndarray:
        """The client (0 .. clients - 1) of every sample, or -1 for a sample that is left out; int [N]."""

    def test_owners(self, labels: np.ndarray, classes: int, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The client of every row of the common test set, int [N], where the partition ``deals_test``."""
        raise DataError(f"partition {self.name!r} does not say who holds which row of the common test set.")

    @property
    def outputs(self) -> int | None:
        """How many class numbers clients use, where these are their own and fewer than the classes."""
        return None

    def relabelling(self, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray | None:
        """What each client calls each class, int [K, C]; None if all use the common numbers."""
        return None

    def __call__(
        self,
        labels: np.ndarray,
        clients: int | None,
        rng: np.random.Generator,
        groups: np.ndarray | None = None,
    ) -> Index:
        """Who holds which rows; each client's rows ascend.

        Args:
            labels: class number of every sample, int [N].
            clients: how many clients; None only where the data say it (natural ids).
            rng: where every draw comes from.
            groups: natural client of every sample, int [N], where there is one.

        Raises:
            DataError: if the partition is impossible with these samples and clients.
        """
        self._possible(len(labels), clients)
        for _ in range(self.redraws + 1):
            owner = self.owners(labels, clients or 0, rng, groups)
            index = holdings(owner, clients or int(owner.max(initial=-1)) + 1)
            if len(index) and index.sizes.min() >= self.min_size:
                return index
        raise DataError(
            f"partition {self.name!r} left a client with fewer than {self.min_size} samples in each of "
            f"{self.redraws + 1} draws ({len(labels)} samples, {clients or 'natural'} clients); "
            "ask for fewer clients, a smaller min_size or less skew."
        )

    def _possible(self, samples: int, clients: int | None) -> None:
        if clients is None:
            if self.needs_clients:
                raise DataError(f"partition {self.name!r} needs a number of clients.")
        elif clients < 1:
            raise DataError(f"there must be at least 1 client, not {clients}.")
        elif clients > samples:
            raise DataError(
                f"{samples} samples cannot be dealt to {clients} clients: there are more clients than samples."
            )
        elif clients * self.min_size > samples:
            raise DataError(
                f"{samples} samples cannot give {clients} clients {self.min_size} each (min_size); "
                f"that needs {clients * self.min_size}."
            )

    @property
    def name(self) -> str:
        """The name under which this kind of partition is registered."""
        return next((entry.name for entry in partitions if entry.factory is type(self)), type(self).__name__)

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain data, for a caption or a provenance."""
        unsaid = {"min_size": Partition.min_size, "redraws": Partition.redraws}
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"name": self.name} | {k: v for k, v in given.items() if unsaid.get(k) != v or k not in unsaid}


partitions = Registry[Partition]("partition")


def holdings(owner: np.ndarray, clients: int) -> Index:
    """Turn "the client of every sample" into "the samples of every client"; -1 is nobody.

    >>> index = holdings(np.array([1, 0, -1, 1]), 2)
    >>> [index[client].tolist() for client in range(2)]
    [[1], [0, 3]]
    """
    sizes = np.bincount(owner + 1, minlength=clients + 1)
    rows = np.argsort(owner, kind="stable")[sizes[0] :]
    sizes[0] = 0
    return Index(rows, np.cumsum(sizes))


def by_label(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All rows, sorted by label and in random order within a label; int64 [N].

    >>> by_label(np.array([1, 0, 2, 0]), np.random.default_rng(0)).tolist() in ([1, 3, 0, 2], [3, 1, 0, 2])
    True
    """
    rows = rng.permutation(len(labels))
    return rows[np.argsort(labels[rows], kind="stable")]


def equal_sizes(samples: int, clients: int) -> np.ndarray:
    """As equal as whole numbers can be; the first clients hold the remainder.

    >>> equal_sizes(11, 3).tolist()
    [4, 4, 3]
    """
    return np.full(clients, samples // clients) + (np.arange(clients) < samples % clients)


def lognormal_sizes(samples: int, clients: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Whole sizes proportional to exp(sigma z), z standard normal, that add up to ``samples``.

    The largest remainders are rounded up.

    >>> lognormal_sizes(100, 4, 0.5, np.random.default_rng(0)).sum()
    np.int64(100)
    """
    share = np.exp(sigma * rng.standard_normal(clients))
    exact = share / share.sum() * samples
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: samples - sizes.sum()]] += 1
    return sizes


def positive(name: str, value: float) -> None:
    """Refuse a setting that is not a finite number above zero."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a finite number above 0, not {value}.")
