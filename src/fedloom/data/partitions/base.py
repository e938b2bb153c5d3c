"""Base class of partitions, which answer one question: which client holds each sample?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.core.errors import DataError
from fedloom.core.federation import Index
from fedloom.core.ranges import Count, Natural
from fedloom.core.registry import Registry
from fedloom.core.settings import check_fields
from fedloom.data.grouping import index_of


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
    redraws: Natural = field(default=50, kw_only=True)

    reads_labels: ClassVar[bool] = True  # targets must be class numbers
    needs_clients: ClassVar[bool] = True  # False: the number of clients follows from the data
    deals_test: ClassVar[bool] = False  # True: implements ``test_owners``

    def __post_init__(self) -> None:
        check_fields(self, "partition.")

    @abstractmethod
    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None) -> ndarray:
        """The client (0 .. clients - 1) of every sample, or -1 for a sample that is left out; int [N]."""

    def test_owners(self, labels: ndarray, classes: int, clients: int, rng: Generator) -> ndarray:
        """The client of every row of the common test set, int [N]; only where ``deals_test``."""
        raise DataError(f"partition {self.name!r} does not assign rows of the common test set to clients.")

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

        Raises:
            DataError: if the partition is impossible with these samples and clients.
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
        return partitions.describe(self)["name"]

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain data, without ``min_size`` and ``redraws`` at their defaults."""
        usual = {"min_size": Partition.min_size, "redraws": Partition.redraws}
        return {k: v for k, v in partitions.describe(self).items() if k not in usual or usual[k] != v}


partitions = Registry[Partition]("partition")


def equal_sizes(samples: int, clients: int) -> np.ndarray:
    """Sizes that differ by at most 1 and sum to ``samples``, int [K]; the first clients get the remainder.

    >>> equal_sizes(11, 3).tolist()
    [4, 4, 3]
    """
    return np.full(clients, samples // clients) + (np.arange(clients) < samples % clients)


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
