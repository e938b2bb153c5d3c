"""Each client's rows into training, validation and held-out rows; and the common test set among clients.

All clients at once: no loop runs over them, so that a million of them take seconds.
"""

from __future__ import annotations

import numpy as np

from fedloom.core.federation import Index
from fedloom.data.partitions.base import by_label, holdings


def split_rows(
    index: Index, labels: np.ndarray, validation: float, held_out: float, rng: np.random.Generator
) -> tuple[Index, Index, Index]:
    """Training, validation and held-out rows of every client, stratified by label.

    A client with n rows gives round(n * held_out) and round(n * validation) of them, and keeps at least one for
    training. Within a client, rows are ordered by label (at random within one) and taken at equal steps from a random
    start, so that every label gives its share to within one row.

    >>> labels = np.repeat([0, 1], 50)
    >>> train, validation, held = split_rows(Index.of([range(100)]), labels, 0.1, 0.2, np.random.default_rng(0))
    >>> np.bincount(labels[train[0]]).tolist(), len(validation[0]), np.bincount(labels[held[0]]).tolist()
    ([35, 35], 10, [10, 10])
    """
    sizes, owner = index.sizes, index.owners
    held = np.minimum(np.rint(sizes * held_out).astype(np.int64), np.maximum(sizes - 1, 0))
    away = np.minimum(held + np.rint(sizes * validation).astype(np.int64), np.maximum(sizes - 1, 0))
    role = np.zeros(len(index.rows), dtype=np.int8)
    if away.any():
        places = rng.permutation(len(index.rows))
        classes = int(labels.max(initial=0)) + 1
        places = places[np.argsort((owner * classes + labels[index.rows])[places], kind="stable")]
        leaving = places[every(sizes, away, rng)]
        role[leaving] = 1
        role[leaving[every(away, held, rng)]] = 2
    train, val, out = (select(index, owner, role == r) for r in range(3))
    return train, val, out


def every(sizes: np.ndarray, take: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A mask over groups laid end to end that marks ``take[i]`` of ``sizes[i]`` members at equal steps.

    Member r of n is marked if a multiple of n lies above r m + u and up to (r + 1) m + u, where m are to be taken and u
    is drawn from 0 .. n - 1 for each group: m are marked, each with probability m / n.

    >>> every(np.array([4, 6]), np.array([2, 0]), np.random.default_rng(0)).sum()
    np.int64(2)
    """
    group = np.repeat(np.arange(len(sizes)), sizes)
    n, m = sizes[group], take[group]
    rank = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
    phase = rank * m + rng.integers(0, np.maximum(sizes, 1))[group]
    return (phase + m) // n > phase // n


def select(index: Index, owner: np.ndarray, mask: np.ndarray) -> Index:
    """The same clients with only the marked entries of ``index.rows``."""
    return Index(index.rows[mask], np.concatenate([[0], np.cumsum(np.bincount(owner[mask], minlength=len(index)))]))


def by_distribution(index: Index, labels: np.ndarray, test_labels: np.ndarray, rng: np.random.Generator) -> Index:
    """Deal the common test set so that each client's labels are distributed as in its training rows.

    The test rows of a class go to the clients in proportion to how much of the class they hold (systematic sampling: a
    client gets its expected number to within one). Every test row goes to one client; rows of a class that nobody
    trains on go to none.

    >>> index = Index.of([[0, 1], [2, 3]])
    >>> mine = by_distribution(index, np.array([0, 0, 1, 1]), np.array([1, 0, 1, 2]), np.random.default_rng(0))
    >>> mine[0].tolist(), mine[1].tolist()
    ([1], [0, 2])
    """
    classes = int(max(labels.max(initial=0), test_labels.max(initial=0))) + 1
    label = labels[index.rows]
    holders = index.owners[np.argsort(label, kind="stable")]  # clients of the training rows, grouped by class
    trained, tested = np.bincount(label, minlength=classes), np.bincount(test_labels, minlength=classes)
    rows = by_label(test_labels, rng)
    c = test_labels[rows]
    rank = np.arange(len(rows)) - (np.cumsum(tested) - tested)[c]
    tick = np.floor((rank + rng.random(classes)[c]) / tested[c] * trained[c]).astype(np.int64)
    tick = np.minimum(tick, np.maximum(trained[c] - 1, 0))
    owner = np.full(len(rows), -1)
    seen = trained[c] > 0
    owner[rows[seen]] = holders[((np.cumsum(trained) - trained)[c] + tick)[seen]]
    return holdings(owner, len(index))
