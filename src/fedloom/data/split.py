"""Rows grouped by label or by client, and the samples that each client holds back for validation and test."""

from __future__ import annotations

import numpy as np

from fedloom.core.federation import Index


def split_rows(
    index: Index,
    labels: np.ndarray,
    validation: float,
    held_out: float,
    rng: np.random.Generator,
    in_time: bool = False,
) -> tuple[Index, Index, Index]:
    """Training, validation and held-out rows of every client, stratified by label.

    Of n rows, round(n · held_out) are held out and round(n · validation) kept for validation; at least one stays for
    training. A client's rows are ordered by label (at random within a label) and taken at equal steps from a random
    offset, so that every label contributes its share to the rows that stay for training, to within one row. Held-out
    rows are chosen among those removed from training, so that they depend on how many are kept for validation.

    Rows that are ``in_time`` are split by it: a client's last rows are held out, those before them kept for validation.

    >>> labels = np.repeat([0, 1], 50)
    >>> train, validation, held = split_rows(Index.of([range(100)]), labels, 0.1, 0.2, np.random.default_rng(0))
    >>> np.bincount(labels[train[0]]).tolist(), len(validation[0]), np.bincount(labels[held[0]]).tolist()
    ([35, 35], 10, [10, 10])
    >>> split_rows(Index.of([[3, 0, 2, 1]]), np.zeros(4, int), 0.25, 0.25, np.random.default_rng(0), in_time=True)[2][0]
    array([3])
    """
    sizes, owner = index.sizes, index.owners
    test = np.minimum(np.rint(sizes * held_out).astype(np.int64), np.maximum(sizes - 1, 0))
    away = np.minimum(test + np.rint(sizes * validation).astype(np.int64), np.maximum(sizes - 1, 0))
    role = np.zeros(len(index.rows), dtype=np.int8)
    if in_time:
        order, left = np.lexsort((index.rows, owner)), sizes[owner] - rank_within(owner)  # owners come one by one
        role[order] = (left <= away[owner]).astype(np.int8) + (left <= test[owner])
    elif away.any():
        classes = int(labels.max(initial=0)) + 1
        places = shuffled_by_label(owner * classes + labels[index.rows], rng)
        leaving = places[systematic(sizes, away, rng)]
        role[leaving] = 1
        role[leaving[systematic(away, test, rng)]] = 2
    train, val, out = (select(index, owner, role == r) for r in range(3))
    return train, val, out


def systematic(sizes: np.ndarray, take: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Systematic sampling of ``take[i]`` of ``sizes[i]`` members of concatenated groups: a mask, bool [sum of sizes].

    In a group of n with m to take, member r is taken if a multiple of n lies in (rm + u, (r + 1)m + u], with u uniform
    on 0 .. n - 1: exactly m are taken, each with probability m / n.

    >>> systematic(np.array([4, 6]), np.array([2, 0]), np.random.default_rng(0)).sum()
    np.int64(2)
    """
    group = np.repeat(np.arange(len(sizes)), sizes)
    n, m = sizes[group], take[group]
    phase = rank_within(group) * m + rng.integers(0, np.maximum(sizes, 1))[group]
    return (phase + m) // n > phase // n


def select(index: Index, owner: np.ndarray, mask: np.ndarray) -> Index:
    """The same clients with only the marked entries of ``index.rows``."""
    return Index(index.rows[mask], np.concatenate([[0], np.cumsum(np.bincount(owner[mask], minlength=len(index)))]))


def by_distribution(index: Index, labels: np.ndarray, test_labels: np.ndarray, rng: np.random.Generator) -> Index:
    """Deal the common test set so that each client's test labels are distributed like its training labels.

    The test rows of a class are assigned by systematic sampling in proportion to the clients' training rows of that
    class: each client gets its expected number to within one. Rows of a class without training rows are left out.

    >>> index = Index.of([[0, 1], [2, 3]])
    >>> test = by_distribution(index, np.array([0, 0, 1, 1]), np.array([1, 0, 1, 2]), np.random.default_rng(0))
    >>> test[0].tolist(), test[1].tolist()
    ([1], [0, 2])
    """
    classes = int(max(labels.max(initial=0), test_labels.max(initial=0))) + 1
    label = labels[index.rows]
    holders = index.owners[np.argsort(label, kind="stable")]  # clients of the training rows, grouped by class
    trained, tested = np.bincount(label, minlength=classes), np.bincount(test_labels, minlength=classes)
    rows = shuffled_by_label(test_labels, rng)
    c = test_labels[rows]
    tick = np.floor((rank_within(c) + rng.random(classes)[c]) / tested[c] * trained[c]).astype(np.int64)
    tick = np.minimum(tick, np.maximum(trained[c] - 1, 0))
    owner = np.full(len(rows), -1)
    trainable = trained[c] > 0
    owner[rows[trainable]] = holders[((np.cumsum(trained) - trained)[c] + tick)[trainable]]
    return index_of(owner, len(index))


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
    ordered, terms = values.ravel()[order], amounts.ravel()[order]
    before = np.cumsum(terms) - terms
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
