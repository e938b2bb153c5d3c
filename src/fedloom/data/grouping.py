"""Vectorised grouping of rows by label or by client."""

from __future__ import annotations

import numpy as np

from fedloom.core.federation import Index


def index_of(owner: np.ndarray, clients: int) -> Index:
    """Invert "the client of every sample", int [N], into "the samples of every client"; -1 marks unassigned samples.

    >>> index = index_of(np.array([1, 0, -1, 1]), 2)
    >>> [index[client].tolist() for client in range(2)]
    [[1], [0, 3]]
    """
    sizes = np.bincount(owner + 1, minlength=clients + 1)
    rows = np.argsort(owner, kind="stable")[sizes[0] :]
    sizes[0] = 0
    return Index(rows, np.cumsum(sizes))


def shuffled_by_label(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All row numbers, sorted by label and shuffled within each label; int64 [N].

    >>> shuffled_by_label(np.array([1, 0, 2, 0]), np.random.default_rng(0)).tolist() in ([1, 3, 0, 2], [3, 1, 0, 2])
    True
    """
    rows = rng.permutation(len(labels))
    return rows[np.argsort(labels[rows], kind="stable")]


def sums_within(values: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """For each entry, the sum of the amounts of earlier entries with the same value, in the shape of ``values``.

    >>> sums_within(np.array([[0, 1], [1, 2], [1, 0]]), np.array([[4, 3]] * 3)).tolist()
    [[0, 0], [3, 0], [7, 4]]
    """
    order = np.argsort(values.ravel(), kind="stable")
    ordered, each = values.ravel()[order], amounts.ravel()[order]
    before = np.cumsum(each) - each
    _, starts, counts = np.unique(ordered, return_index=True, return_counts=True)
    sums = np.empty(values.size, dtype=np.int64)
    sums[order] = before - np.repeat(before[starts], counts)
    return sums.reshape(values.shape)


def rank_within(values: np.ndarray) -> np.ndarray:
    """Number of earlier entries equal to each entry, int64 of the same shape.

    >>> rank_within(np.array([[0, 1], [1, 2], [1, 0]])).tolist()
    [[0, 0], [1, 0], [2, 1]]
    """
    return sums_within(values, np.ones_like(values, dtype=np.int64))
