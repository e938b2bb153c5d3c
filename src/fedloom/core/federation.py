"""Who holds which data: arrays that live once, and clients that are lists of row numbers into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError


@dataclass(frozen=True)
class Arrays:
    """One split of a data set: inputs ``x`` [N, ...] and targets ``y`` [N] (class numbers), checked when made.

    Raises:
        DataError: if the lengths differ, ``x`` holds NaN or infinity, or a label is outside ``0 .. classes - 1``.

    >>> Arrays(torch.zeros(3, 2), torch.tensor([0, 1, 5]), classes=2)
    Traceback (most recent call last):
    ...
    fedloom.core.errors.DataError: sample 2 has label 5, but there are 2 classes (0 to 1).
    """

    x: Tensor
    y: Tensor
    classes: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"there are {len(self.x)} inputs but {len(self.y)} labels.")
        if self.x.is_floating_point() and len(self.x) and not bool(torch.isfinite(self.x.sum())):
            bad = torch.isfinite(self.x.reshape(len(self.x), -1)).all(1).logical_not().nonzero()
            if len(bad):
                raise DataError(f"{len(bad)} samples hold NaN or infinity; the first is sample {int(bad[0])}.")
        if not self.y.is_floating_point():
            wrong = ((self.y < 0) | (self.y >= self.classes)).nonzero()
            if len(wrong):
                row = int(wrong[0, 0])
                label = int(self.y[tuple(wrong[0])])
                raise DataError(
                    f"sample {row} has label {label}, but there are {self.classes} classes (0 to {self.classes - 1})."
                )

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor | np.ndarray) -> Arrays:
        """The given rows as arrays of their own (copies)."""
        rows = torch.as_tensor(rows)
        return Arrays(self.x[rows], self.y[rows], self.classes, self.names)


@dataclass(frozen=True)
class Index:
    """Row numbers of every client, end to end: client i holds ``rows[offsets[i]:offsets[i + 1]]``.

    Two arrays serve a million clients; nothing is kept per client.

    >>> index = Index.of([[4, 5], [], [7]])
    >>> len(index), index.sizes.tolist(), index[0].tolist()
    (3, [2, 0, 1], [4, 5])
    """

    rows: np.ndarray  # int64 [sum of sizes]
    offsets: np.ndarray  # int64 [K + 1]

    @classmethod
    def of(cls, lists: Iterable[Sequence[int] | np.ndarray]) -> Index:
        """From one list of rows per client."""
        parts = [np.asarray(part, dtype=np.int64) for part in lists]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.int64), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client, int64 [K]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """The client of each entry of ``rows``, int64 [sum of sizes]."""
        return np.repeat(np.arange(len(self)), self.sizes)


@dataclass(frozen=True)
class Split:
    """Arrays and who holds which of their rows."""

    arrays: Arrays
    index: Index

    def client(self, client: int) -> Arrays:
        """One client's samples (copies)."""
        return self.arrays.take(self.index[client])

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Federation:
    """K clients' training data, their own validation and test samples, and the common test set.

    Args:
        train: what the clients train on.
        validation: each client's samples for choosing settings (may be empty).
        held_out: each client's own test samples, for the ``clients`` evaluation (may be empty).
        test: the common test set, for the ``global`` and ``average`` evaluations.
        names: the clients' names where they have any (writers, roles, hospitals).
        provenance: how it was made (source, partition, seed), as plain data for the run directory.
    """

    train: Split
    validation: Split
    held_out: Split
    test: Arrays
    names: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.train):
            raise DataError("a federation needs at least one client.")
        if len({len(self.train), len(self.validation), len(self.held_out)}) != 1:
            raise DataError("training, validation and test splits must list the same clients.")

    def __len__(self) -> int:
        return len(self.train)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.train.arrays.classes

    def pooled(self) -> Federation:
        """The same data at one client: what centralised training, the oracle of the papers, sees."""

        def together(split: Split) -> Split:
            return Split(split.arrays, Index.of([split.index.rows]))

        return Federation(
            together(self.train),
            together(self.validation),
            together(self.held_out),
            self.test,
            ("everyone",),
            {**self.provenance, "pooled": True},
        )
