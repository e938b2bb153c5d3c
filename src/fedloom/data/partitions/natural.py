"""The partition by natural clients: writers, roles, users, hospitals, speakers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.core.errors import DataError
from fedloom.data.partitions.base import Partition, partitions


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
            out = ids[client < 0]
            listed = ", ".join(map(str, out[:8])) + (f" and {len(out) - 8} more" if len(out) > 8 else "")
            warnings.warn(
                f"partition 'natural' keeps {len(kept)} of {len(ids)} natural ids and leaves out "
                f"{int((owner < 0).sum())} of {len(groups)} samples (ids {listed}).",
                stacklevel=3,
            )
        return owner
