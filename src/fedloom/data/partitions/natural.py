"""Clients as they are in the data: writers, roles, users, hospitals, speakers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.partitions.base import Partition, partitions


@partitions.register
@dataclass(frozen=True)
class Natural(Partition):
    """One client for each natural id of the source (writer, role, user, hospital, speaker).

    Ids with fewer than ``min_size`` samples are left out; if a number of clients is asked for, that many of the others
    are drawn at random. Clients keep the order of their ids. What is left out is said in a warning.

    Raises:
        DataError: if the source has no natural ids, or fewer of them than clients asked for.

    >>> index = Natural()(np.zeros(5, int), None, np.random.default_rng(0), groups=np.array([7, 3, 7, 7, 3]))
    >>> [index[client].tolist() for client in range(len(index))]
    [[1, 4], [0, 2, 3]]
    """

    by_label: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = False

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        if groups is None:
            raise DataError(
                "partition 'natural' needs natural client ids (writers, roles, hospitals), "
                "which this source does not have."
            )
        ids, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        kept = np.flatnonzero((ids >= 0) & (sizes >= self.min_size))
        if len(kept) < max(clients, 1):
            raise DataError(
                f"there are {len(kept)} natural ids with at least {self.min_size} samples, "
                f"too few for {max(clients, 1)} clients."
            )
        if clients:
            kept = np.sort(rng.choice(kept, clients, replace=False))
        client = np.full(len(ids), -1)
        client[kept] = np.arange(len(kept))
        owner = client[which]
        if len(kept) < len(ids):
            warnings.warn(
                f"partition 'natural' keeps {len(kept)} of {len(ids)} natural ids and leaves out "
                f"{int((owner < 0).sum())} of {len(groups)} samples (ids {shortlist(ids[client < 0])}).",
                stacklevel=3,
            )
        return owner


def shortlist(ids: np.ndarray, most: int = 8) -> str:
    """The first few of many.

    >>> shortlist(np.arange(100), 3)
    '0, 1, 2 and 97 more'
    """
    rest = len(ids) - most
    return ", ".join(map(str, ids[:most])) + (f" and {rest} more" if rest > 0 else "")
