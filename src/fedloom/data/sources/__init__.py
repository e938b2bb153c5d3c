"""Data sources by name: the arrays of a data set, their origin and their natural clients.

>>> from fedloom.data.sources import sources
>>> sources.names()[:4]
['digits', 'mnist', 'fashion_mnist', 'emnist']
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedloom.base.errors import ConfigError, DataError
from fedloom.base.registry import Entry, Registry
from fedloom.core.federation import Arrays


@dataclass(frozen=True)
class Source:
    """A data set before it is partitioned.

    Args:
        name: its name in captions and provenance.
        train: the training pool, which is dealt to clients.
        test: the common test set; may be empty.
        licence: terms of use.
        citation: BibTeX.
        groups: natural client of each training row, int [N]; -1 for none.
        groups_test: the same for the test rows.
        validation: samples for validation that the data keep apart; None if there are none.
        groups_validation: the same for the validation rows.
        group_names: name of each natural client, indexed by ``groups``.
        settings: how the source was made, as plain data.

    Raises:
        DataError: if the numbers of samples and of client ids differ.
    """

    name: str
    train: Arrays
    test: Arrays
    licence: str
    citation: str
    groups: np.ndarray | None = None
    groups_test: np.ndarray | None = None
    group_names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    validation: Arrays | None = None
    groups_validation: np.ndarray | None = None

    def __post_init__(self) -> None:
        validation = self.train.take(np.arange(0)) if self.validation is None else self.validation
        for split, arrays, groups in (
            ("training", self.train, self.groups), ("test", self.test, self.groups_test),
            ("validation", validation, self.groups_validation),
        ):  # fmt: skip
            if groups is not None and len(groups) != len(arrays):
                raise DataError(f"{self.name}: there are {len(arrays)} {split} samples but {len(groups)} client ids.")
            for what in ("x", "y") if len(arrays) else ():
                train, values = getattr(self.train, what), getattr(arrays, what)
                if train.shape[1:] != values.shape[1:] or train.dtype != values.dtype:
                    raise DataError(
                        f"{self.name}: a training sample has {what} of shape {list(train.shape[1:])} and type "
                        f"{train.dtype}, but a {split} sample {list(values.shape[1:])} and {values.dtype}."
                    )

    def describe(self) -> dict[str, Any]:
        """Name, settings, licence and citation as plain data."""
        return {"name": self.name, **self.settings, "licence": self.licence, "citation": self.citation}


CSV = (".csv", *(f".csv.{packed}" for packed in ("gz", "bz2", "xz", "zip", "zst")))
READERS = {".npz": "npz", ".parquet": "table", **dict.fromkeys(CSV, "table")}
"""The sources that read user files, by the end of a file's name."""


def reader_of(name: str) -> str:
    """The source that reads a file of this name, or "".

    >>> reader_of("visits.CSV.gz"), reader_of("visits.tsv")
    ('table', '')
    """
    return next((reader for ending, reader in READERS.items() if name.lower().endswith(ending)), "")


class Sources(Registry[Source]):
    """The registry of data sources; for a file or folder in place of a name, the error says how to read it.

    A factory may also return data as a user gives them, like arrays (x, y) or a torch data set.
    """

    def make(self, name: str, /, **settings: Any) -> Source:
        """Call the factory registered under ``name``, as any registry does."""
        from fedloom.data.user import as_source  # imports this

        source = super().make(name, **settings)
        return source if isinstance(source, Source) else as_source(source, name=name)

    def __getitem__(self, name: str) -> Entry[Source]:
        if isinstance(name, str) and name not in self:
            kind, colon, path = name.partition(":")
            if colon and kind in (*READERS.values(), "folder"):
                raise ConfigError(f"{name!r} has a path in its name; write {{name: {kind}, path: {path}}}.")
            if reader := reader_of(name):
                raise ConfigError(f"{name!r} is a file, not a data source; to read it, write {reader}:{name}.")
            if os.path.isdir(name):
                reader = "npz" if (Path(name) / "x_train.npy").is_file() else "folder"
                reader = "table" if any(reader_of(path.name) == "table" for path in Path(name).glob("*")) else reader
                raise ConfigError(f"{name!r} is a folder, not a data source; to read it, write {reader}:{name}.")
            if os.path.isfile(name):
                raise ConfigError(
                    f"{name!r} is a file of a kind that no data source reads; write it as .npz, .csv or .parquet, or "
                    "register a source of your own, which reads it."
                )
        return super().__getitem__(name)


sources = Sources(
    "data source",
    shared={
        "root": "the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.",
        "download": "whether torchvision may download missing files.",
        "normalise": "whether to normalise by the training set's mean and deviation per channel; otherwise 0..1.",
        "validation": "whether the validation samples join the training pool (true), are the clients' for validation "
        "(apart), or are not used (false).",
        "seed": "seed of every draw.",
    },
)


def natural_clients(
    train: ArrayLike | Sequence[str], test: ArrayLike | Sequence[str] | None = None, prefix: str = "",
    validation: ArrayLike | Sequence[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A source's ``groups``, ``groups_test``, … and ``group_names`` from the client ids of its rows.

    >>> natural_clients(["bob", "ann", "bob"], ["cid"], "user ")
    {'groups': array([1, 0, 1]), 'groups_test': array([2]), 'group_names': ('user ann', 'user bob', 'user cid')}
    """
    splits = {"groups": train, "groups_test": test, "groups_validation": validation}
    columns = {key: np.asarray(ids).ravel() for key, ids in splits.items() if ids is not None}
    ids, which = np.unique(np.concatenate([*columns.values()]), return_inverse=True)
    pieces = np.split(which, np.cumsum([len(rows) for rows in columns.values()])[:-1])
    return dict(zip(columns, pieces, strict=True)) | {"group_names": tuple(f"{prefix}{name}" for name in ids)}


# The order is that in listings.
sources.register_lazily(__name__, ["included.digits"])
sources.register_lazily(
    "fedloom_apps.readers",
    [
        "mnist.mnist", "mnist.fashion_mnist", "mnist.emnist", "mnist.emnist_l", "cifar.cifar10", "cifar.cifar100",
        "cifar.cinic10", "imagenets.tiny_imagenet", "imagenets.mini_imagenet", "omniglot.omniglot", "leaf.femnist",
        "celeba.celeba", "shakespeare.shakespeare", "reddit.reddit", "mqp.mqp", "speech.speech_commands", "berka.berka",
        "heart.heart", "medical.isic2019", "medical.dermamnist", "medical.organcmnist",
    ],
)  # fmt: skip
sources.register_lazily(
    __name__,
    [
        "included.synthetic", "included.intervals", "included.six_gaussians", "arrays.npz", "table.table", "table.text",
        "arrays.folder", "table.hub", "generated.generated",
    ],
)  # fmt: skip
