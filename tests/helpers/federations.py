"""Federations of a few dozen samples, with clients of unequal sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedloom.core.federation import Arrays, Federation, Index, Split

SIZES = (7, 12, 5, 9, 16, 4)
FEATURES, CLASSES = 4, 3


def federation(arrays: Arrays, lists: Sequence[Sequence[int]], test: Arrays, held_out: int = 2) -> Federation:
    """Clients with the given training rows; ``held_out`` of the test samples each, dealt in turn."""
    own = [[(held_out * i + j) % max(len(test), 1) for j in range(held_out)] for i in range(len(lists))]
    nothing = Index.of([[] for _ in lists])
    return Federation(Split(arrays, Index.of(lists)), Split(test, nothing), Split(test, Index.of(own)), test)


def dealt(sizes: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Row numbers 0 .. sum(sizes) - 1 in random order, cut to the sizes."""
    rows = np.random.default_rng(seed).permutation(sum(sizes))
    return np.split(rows, np.cumsum(sizes)[:-1])


def classes(
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
    shape: tuple[int, ...] = (FEATURES,),
    labels: int = CLASSES,
    dtype: torch.dtype = torch.float64,
) -> Federation:
    """Classification: every client has its own mean and its own mixture of labels."""
    draw = np.random.default_rng(seed)
    total = sum(sizes)
    lists = dealt(sizes, seed)
    x = draw.normal(size=(total, *shape))
    y = np.zeros(total, dtype=np.int64)
    for number, rows in enumerate(lists):
        x[rows] += draw.normal(size=shape)
        y[rows] = np.where(draw.random(len(rows)) < 0.6, number % labels, draw.integers(labels, size=len(rows)))
    test = Arrays(torch.tensor(draw.normal(size=(20, *shape)), dtype=dtype), torch.arange(20) % labels, labels)
    return federation(Arrays(torch.tensor(x, dtype=dtype), torch.tensor(y), labels), lists, test)


def regression(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> Federation:
    """Least squares: client i holds inputs x[i] [n_i, d] and targets y[i] [n_i]."""
    sizes = [len(part) for part in x]
    ends = np.cumsum(sizes)
    lists = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    arrays = Arrays(torch.tensor(np.concatenate(x)), torch.tensor(np.concatenate(y))[:, None], 1)
    return federation(arrays, lists, arrays, held_out=1)
