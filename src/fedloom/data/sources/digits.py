"""scikit-learn's digits, which need no download."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedloom.core.documentation import bibtex
from fedloom.core.federation import Arrays
from fedloom.data.grouping import rank_within
from fedloom.data.sources.base import Source, sources


@sources.register
def digits() -> Source:
    """scikit-learn's digits: 1797 handwritten digits, 8x8, included.

    Pixels are 0..1 in steps of 1/16. Every fifth image of each class is a test image (1442 for training, 355 for
    testing).

    >>> source = digits()
    >>> tuple(source.train.x.shape), len(source.test), source.train.classes
    ((1442, 1, 8, 8), 355, 10)
    """
    table = _table()
    x = torch.from_numpy(table[:, :-1] / 16).unflatten(1, (1, 8, 8))  # [N, 1, 8, 8]
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    test = torch.from_numpy(rank_within(y.numpy()) % 5 == 4)
    train, test = (Arrays(x[part], y[part], 10, tuple("0123456789")) for part in (~test, test))
    return Source("digits", train, test, "CC BY 4.0", bibtex("alpaydin1998optical"))


@cache
def _table() -> np.ndarray:
    """Pixels and labels as they are stored, [N, 64 + 1], read once: unpacking text takes longer than all the rest."""
    return np.loadtxt(_file(), np.float32, delimiter=",")


def _file() -> Path:
    """The file inside scikit-learn, which takes a second to import and is not needed to read it."""
    found = find_spec("sklearn")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
