"""Federated data: every array exists once; clients are lists of row numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.applications import notebook_html
from fedloom.base.errors import DataError, in_words
from fedloom.core.samples import Samples, batch_of, rows_of
from fedloom.core.targets import are_numbers, one_class_each


@dataclass(frozen=True)
class Arrays:
    """One split of a data set: inputs ``x`` [N, ...] and targets ``y`` [N] (class numbers), validated on creation.

    Args:
        x: inputs [N, ...]; or N ``Samples`` of any structure, which may have their targets in them.
        y: targets [N]; or the other part of these samples.
        classes: C, the number of classes.
        names: class names.
        mean: per-channel mean if images were normalised, x = (pixel - mean) / std with pixels in [0, 1].
        std: per-channel standard deviation, likewise; empty if ``x`` was not normalised.

    Raises:
        DataError: if lengths differ, NaN or infinity is held, a label is outside ``0 .. classes - 1``, or only some
            classes have names.

    >>> Arrays(torch.zeros(3, 2), torch.tensor([0, 1, 5]), classes=2)
    Traceback (most recent call last):
    ...
    fedloom.base.errors.DataError: sample 2 has label 5, but there are 2 classes (0 to 1).
    """

    x: Any
    y: Any
    classes: int
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("x", self.x), ("y", self.y)):
            if not isinstance(values, Tensor | Samples):
                raise DataError(f"{name} of Arrays is a tensor, not {in_words(values)}; use torch.as_tensor({name}).")
        if len(self.x) != len(self.y):
            raise DataError(f"there are {len(self.x)} inputs but {len(self.y)} labels.")
        if self.names and len(self.names) != self.classes:
            raise DataError(
                f"there are {len(self.names)} class names for {self.classes} classes; name each class once."
            )
        for name, values in (("samples", self.x), ("targets", self.y)):
            if not (isinstance(values, Tensor) and values.is_floating_point() and len(values)):
                continue
            if not bool(torch.isfinite(values.sum())):
                bad = torch.isfinite(values.reshape(len(values), -1)).all(1).logical_not().nonzero()
                if len(bad):
                    raise DataError(
                        f"NaN or infinity in {len(bad)} of {len(values)} {name}, first in sample {int(bad[0])}; fill "
                        "in the missing values, scale numbers beyond float32, or drop those samples."
                    )
        if not self.has_numbers:
            wrong = ((self.y < 0) | (self.y >= self.classes)).nonzero()
            if len(wrong):
                row = int(wrong[0, 0])
                label = int(self.y[tuple(wrong[0])])
                raise DataError(
                    f"sample {row} has label {label}, but there are {self.classes} classes (0 to {self.classes - 1})."
                )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        """One line, however many samples there are.

        >>> Arrays(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 1]), classes=2)
        <Arrays: 3 samples of shape [1, 8, 8], 2 classes>
        """
        return f"<Arrays: {len(self)} {self.form}>"

    @property
    def form(self) -> str:
        """What the samples are, as a noun phrase."""
        targets = "numbers" if self.has_numbers else f"{self.classes} classes"
        if not isinstance(self.x, Samples):
            return f"samples of shape {list(self.x.shape[1:])}, {targets}"
        return f"samples to collate{'' if self.has_structures else f', {targets}'}"

    @property
    def has_structures(self) -> bool:
        """Whether samples have targets of any structure, which come with their inputs."""
        return isinstance(self.y, Samples)

    def batch(self, rows: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of these rows: the one place where samples become a mini-batch.

        >>> pairs = [(torch.ones(1), "a"), (torch.ones(2), "b")]
        >>> x, y = (Samples(pairs, lambda items: list(zip(*items)), part) for part in (0, 1))
        >>> Arrays(x, y, classes=1).batch(torch.tensor([1]))
        ((tensor([1., 1.]),), ('b',))
        """
        if isinstance(self.y, Samples):
            inputs, targets = self.y.together(rows)
            return inputs, targets
        return batch_of(self.x, rows), self.y[rows]

    @property
    def has_classes(self) -> bool:
        """Whether every sample has one class number."""
        return one_class_each(self.y)

    @property
    def has_numbers(self) -> bool:
        """Whether targets are real numbers (or truth values given as such), not class numbers."""
        return are_numbers(self.y)

    def take(self, rows: Tensor | np.ndarray) -> Arrays:
        """The given rows, as copies."""
        rows = torch.as_tensor(rows)
        return replace(self, x=rows_of(self.x, rows), y=rows_of(self.y, rows))


@dataclass(frozen=True)
class Index:
    """The rows of all clients, concatenated: client i holds ``rows[offsets[i]:offsets[i + 1]]``.

    Two arrays suffice for a million clients; there is no object per client.

    >>> index = Index.of([[4, 5], [], [7]])
    >>> len(index), index.sizes.tolist(), index[0].tolist()
    (3, [2, 0, 1], [4, 5])
    """

    rows: np.ndarray  # int64 [sum of sizes]
    offsets: np.ndarray  # int64 [K + 1]

    @classmethod
    def of(cls, lists: Iterable[Sequence[int] | np.ndarray]) -> Index:
        """The index for one list of rows per client."""
        parts = [np.asarray(part, dtype=np.int64) for part in lists]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.int64), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def first(self, clients: int) -> Index:
        """The first ``clients`` clients (views, no copies)."""
        return Index(self.rows[: self.offsets[clients]], self.offsets[: clients + 1])

    def pick(self, clients: np.ndarray) -> Index:
        """The given clients, in the given order.

        >>> index = Index.of([[4, 5], [], [7]]).pick(np.array([2, 0]))
        >>> index[0].tolist(), index[1].tolist()
        ([7], [4, 5])
        """
        sizes = self.sizes[clients]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return Index(
            self.rows[np.repeat(self.offsets[clients] - offsets[:-1], sizes) + np.arange(offsets[-1])], offsets
        )

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client, int64 [K]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """The client of each entry of ``rows``, int64 [sum of sizes]."""
        return np.repeat(np.arange(len(self)), self.sizes)


@dataclass(frozen=True)
class Population:
    """The clients of an experiment without their rows, which a server does not hold and a single client does not see.

    Args:
        clients: K, the number of clients.
        sizes: n_i, samples per client, int64 [K]; empty at a client, which does not learn the sizes of others.
        mean_size: mean n.

    >>> Population.of(Index.of([[4, 5], [7]]))
    Population(clients=2, sizes=array([2, 1]), mean_size=1.5)
    """

    clients: int
    sizes: np.ndarray
    mean_size: float

    @classmethod
    def of(cls, index: Index) -> Population:
        """The population whose rows are listed in an index."""
        sizes = index.sizes
        return cls(len(index), sizes, float(sizes.mean()))


@dataclass(frozen=True)
class Split:
    """Arrays, the rows that each client holds, and optionally a per-client relabelling.

    Args:
        arrays: the samples.
        index: the rows of each client.
        relabel: int64 [K, C]; client k's label for class c is ``relabel[k, c]``. Applied when labels are fetched;
            ``arrays`` keep the common labels.

    Raises:
        DataError: if the index lists no rows of the arrays client by client, or ``relabel`` has the wrong shape.

    >>> Split(Arrays(torch.zeros(3, 2), torch.tensor([0, 1, 1]), classes=2), Index.of([[0], [1, 3]]))
    Traceback (most recent call last):
    ...
    fedloom.base.errors.DataError: an index lists row 3, but there are 3 samples (rows 0 to 2).
    """

    arrays: Arrays
    index: Index
    relabel: Tensor | None = None

    def __repr__(self) -> str:
        return f"<Split: {len(self.index.rows)} samples at {len(self)} clients>"

    def __post_init__(self) -> None:
        self._check_index()
        if self.relabel is not None and tuple(self.relabel.shape) != (len(self.index), self.arrays.classes):
            raise DataError(
                f"there are {len(self.index)} clients and {self.arrays.classes} classes, "
                f"but the relabelling is {list(self.relabel.shape)}."
            )

    def _check_index(self) -> None:
        rows, offsets, samples = self.index.rows, self.index.offsets, len(self.arrays)
        for name, values in (("rows", rows), ("offsets", offsets)):
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
                raise DataError(
                    f"the {name} of an index are a NumPy array of whole numbers; Index.of(lists) makes them."
                )
        if not len(offsets) or offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
            raise DataError("the offsets of an index begin with 0 and never fall; Index.of(lists) makes them.")
        if len(rows) and offsets[-1] != len(rows):  # without rows, as at a server, it tells the sizes alone
            raise DataError(f"the offsets of an index end with {offsets[-1]}, but it lists {len(rows)} rows.")
        for row in (rows.min(), rows.max()) if len(rows) else ():
            if not 0 <= row < samples:
                raise DataError(f"an index lists row {row}, but there are {samples} samples (rows 0 to {samples - 1}).")

    def labels(self, rows: Tensor, clients: int | Tensor) -> Tensor:
        """The clients' own labels for the rows; ``clients`` is one number, or one per row.

        >>> arrays = Arrays(torch.zeros(2, 1), torch.tensor([0, 1]), classes=2)
        >>> split = Split(arrays, Index.of([[0, 1], []]), torch.tensor([[1, 0], [0, 1]]))
        >>> split.labels(torch.tensor([0, 1]), 0).tolist()
        [1, 0]
        """
        y = self.arrays.y[rows]
        return y if self.relabel is None else self.relabel[clients, y]

    def batch(self, rows: Tensor, clients: int | Tensor) -> tuple[Any, Any]:
        """Inputs and targets of a mini-batch, with the clients' own labels; see ``labels``."""
        x, y = self.arrays.batch(rows)
        return x, y if self.relabel is None else self.relabel[clients, y]

    def client(self, client: int) -> Arrays:
        """One client's samples, as copies.

        >>> Split(Arrays(torch.zeros(1, 1), torch.tensor([0]), classes=2), Index.of([[0]])).client("north")
        Traceback (most recent call last):
        ...
        fedloom.base.errors.DataError: clients of a split have numbers: client(federation.names.index('north')).
        """
        if isinstance(client, str):
            raise DataError(f"clients of a split have numbers: client(federation.names.index({client!r})).")
        rows = torch.from_numpy(self.index[client])
        arrays = self.arrays.take(rows)
        return arrays if self.relabel is None else replace(arrays, y=self.relabel[client, arrays.y])

    def arrays_for(self, client: int) -> Arrays:
        """The arrays, with the names of classes in the order in which this client numbers them.

        >>> arrays = Arrays(torch.zeros(1, 1), torch.tensor([0]), classes=3, names=("a", "b", "c"))
        >>> Split(arrays, Index.of([[0]]), torch.tensor([[2, 0, 1]])).arrays_for(0).names
        ('b', 'c', 'a')
        """
        if self.relabel is None or not self.arrays.names:
            return self.arrays
        return replace(self.arrays, names=tuple(self.arrays.names[c] for c in self.relabel[client].argsort().tolist()))

    def first(self, clients: int) -> Split:
        """The first ``clients`` clients; nothing is copied."""
        if clients == len(self):
            return self
        return Split(self.arrays, self.index.first(clients), None if self.relabel is None else self.relabel[:clients])

    def pooled(self, clients: int) -> Split:
        """The rows of the first ``clients`` clients as one client, with the labels of their owners."""
        index, arrays = self.index.first(clients), self.arrays
        if self.relabel is not None:
            rows, y = torch.from_numpy(index.rows), arrays.y.clone()
            y[rows] = self.labels(rows, torch.from_numpy(index.owners).to(y.device))
            arrays = replace(arrays, y=y)
        return Split(arrays, Index.of([index.rows]))

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Unlabelled:
    """Inputs [M, ...] without labels, in random order, from which a server may learn."""

    x: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Federation:
    """Training data of K clients, their own validation and test samples, and a common test set.

    Clients that never train come last: cohorts are drawn from the first ``seen`` clients, and methods see only those;
    the ``clients`` evaluation covers all K.

    Args:
        train: the clients' training samples.
        validation: each client's samples for model selection (may be empty).
        held_out: each client's own test samples, for the ``clients`` evaluation (may be empty).
        test: the common test set, for the ``global`` and ``average`` evaluations.
        names: the clients' names, if they have any (writers, roles, hospitals).
        provenance: source, partition and seed, as plain data for the run directory.
        unseen: number of clients, the last ones, that are only evaluated.
        unlabelled: unlabelled inputs of a target distribution, if there is one.
        own_classes: whether the arrays carry labels that each client numbered in its own way; see ``classes_alike``.

    Raises:
        DataError: if there is no client to train, or the splits list different clients.
    """

    train: Split
    validation: Split
    held_out: Split
    test: Arrays
    names: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    unseen: int = 0
    unlabelled: Unlabelled | None = None
    own_classes: bool = False

    def __post_init__(self) -> None:
        if not len(self.train):
            raise DataError("a federation needs at least one client.")
        if len({len(self.train), len(self.validation), len(self.held_out)}) != 1:
            raise DataError("training, validation and test splits must list the same clients.")
        if not 0 <= self.unseen < len(self.train):
            raise DataError(f"{self.unseen} of {len(self.train)} clients are unseen: no client is left to train.")

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        """One line: clients and numbers of samples.

        >>> from fedloom.data import federate
        >>> federate("digits", "iid", clients=4)
        <Federation: 4 clients, samples of shape [1, 8, 8], 10 classes; 1154 training, 288 test, 355 common test>
        """
        arrays, splits = (
            self.train.arrays,
            {"training": self.train, "validation": self.validation, "test": self.held_out},
        )
        counts = {what: len(split.index.rows) for what, split in splits.items()} | {"common test": len(self.test)}
        sizes = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"<Federation: {len(self)} clients, {arrays.form}; {sizes}>"

    def _repr_html_(self) -> str | None:
        return notebook_html(self)

    @property
    def seen(self) -> int:
        """Number of clients that take part in training; they come first."""
        return len(self.train) - self.unseen

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return self.train.arrays.classes

    @property
    def classes_alike(self) -> bool:
        """Whether a class has the same number at all clients, so that class numbers may be compared across them.

        >>> from fedloom.data import federate
        >>> federation = federate("digits", "iid", clients=4)
        >>> federation.classes_alike, replace(federation, own_classes=True).classes_alike
        (True, False)
        """
        return not self.own_classes and all(
            split.relabel is None for split in (self.train, self.validation, self.held_out)
        )

    def pooled(self) -> Federation:
        """The same data at one client, as centralised training (the oracle of the papers) sees it."""
        return replace(
            self,
            train=self.train.pooled(self.seen),
            validation=self.validation.pooled(self.seen),
            held_out=self.held_out.pooled(len(self)),
            names=("everyone",),
            provenance={**self.provenance, "pooled": True},
            unseen=0,
            own_classes=not self.classes_alike,
        )
