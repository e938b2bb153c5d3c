"""What a data source gives: arrays, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays, Federation
from fedloom.core.registry import Registry


@dataclass(frozen=True)
class Source:
    """A data set before anyone has dealt it out.

    Args:
        name: what it is called in captions and provenance.
        train: the pool that is dealt to clients.
        test: the common test set (may have no rows).
        licence: under which terms it may be used.
        citation: BibTeX.
        groups: natural client of each training row, int [N]; -1 for none.
        groups_test: the same for the test rows.
        group_names: name of each natural client, indexed by ``groups``.
        federation: where the clients are given with their own splits, the ready-made federation.
        settings: how it was made, as plain data.
    """

    name: str
    train: Arrays
    test: Arrays
    licence: str
    citation: str
    groups: np.ndarray | None = None
    groups_test: np.ndarray | None = None
    group_names: tuple[str, ...] = ()
    federation: Federation | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split, arrays, groups in (("training", self.train, self.groups), ("test", self.test, self.groups_test)):
            if groups is not None and len(groups) != len(arrays):
                raise DataError(f"{self.name}: there are {len(arrays)} {split} samples but {len(groups)} client ids.")

    def describe(self) -> dict[str, Any]:
        """Name, settings, licence and citation as plain data."""
        about = {"licence": self.licence, "citation": self.citation}
        return {"name": self.name, **self.settings, **about}


sources = Registry[Source]("data source")


def numbered(
    clients: ArrayLike | Sequence[str], clients_test: ArrayLike | Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]:
    """Natural clients by number: those of the training rows, those of the test rows, and their names.

    >>> numbered(["bob", "ann", "bob"], ["cid"])
    (array([1, 0, 1]), array([2]), ('ann', 'bob', 'cid'))
    """
    known = [np.asarray(ids).ravel() for ids in (clients, clients_test) if ids is not None]
    ids, which = np.unique(np.concatenate(known), return_inverse=True)
    rows = len(known[0])
    return which[:rows], which[rows:] if len(known) > 1 else None, tuple(map(str, ids))
