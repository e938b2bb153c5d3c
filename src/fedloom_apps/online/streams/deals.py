"""Two ways to deal a source's samples to tasks: class by class, or as they come."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fedloom.core import rng
from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source
from fedloom.data.split import shuffled_by_label, sums_within
from fedloom_apps.online.streams.base import Dealt


def by_class(source: Source, table: np.ndarray, sizes: tuple[int, int], seed: int) -> Dealt:
    """Tasks of given classes, whose sizes differ by at most one within a task.

    Each class's samples are shuffled once and dealt task by task: a sample is reused only after all samples of its
    class have been used.

    Args:
        source: its training samples make the tasks' training samples, its test samples their test samples.
        table: the source's classes of every task, in the order of the task's labels; int [T, k].
        sizes: number of training and of test samples per task.
        seed: seed of the order of the samples.

    Raises:
        DataError: if a class has fewer samples than a task needs.
    """
    pools = (source.train, source.test)
    ways = table.shape[1]
    quotas = [size // ways + (np.arange(ways) < size % ways) for size in sizes]
    decks = [Deck.of(pool, rng.stream(seed, "tasks", 1 + k)) for k, pool in enumerate(pools)]
    for deck, quota, what in zip(decks, quotas, ("training", "test"), strict=True):
        deck.check(np.unique(table), int(quota.max()), f"{source.name}: a {what}")

    before = [sums_within(table, np.broadcast_to(quota, table.shape)) for quota in quotas]  # [T, k] dealt already

    def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, list[int]]:
        chosen, splits = table[number], []
        names = tuple(source.train.names[c] for c in chosen) if source.train.names else ()
        for deck, quota, starts, pool in zip(decks, quotas, before, pools, strict=True):
            rows = [deck.take(c, start, n) for c, start, n in zip(chosen, starts[number], quota, strict=True)]
            order = draw.permutation(int(quota.sum()))
            x = pool.x[torch.from_numpy(np.concatenate(rows)[order])]
            y = torch.from_numpy(np.repeat(np.arange(ways), quota)[order])
            splits.append(replace(pool, x=x, y=y, classes=ways, names=names))
        return splits[0], splits[1], chosen.tolist()

    return deal


def as_they_come(source: Source, sizes: tuple[int, int], seed: int) -> Dealt:
    """Tasks of all classes: the shuffled samples are dealt in turn, whatever their labels.

    A sample is reused only after all others; within a task the class frequencies are random.

    Args:
        source: its training samples make the tasks' training samples, its test samples their test samples.
        sizes: number of training and of test samples per task.
        seed: seed of the order of the samples.
    """
    pools = (source.train, source.test)
    for pool, size, what in zip(pools, sizes, ("training", "test"), strict=True):
        if len(pool) < size:
            raise DataError(f"{source.name}: a {what} set needs {size} samples, of which there are {len(pool)}.")
    orders = [rng.stream(seed, "tasks", 1 + k).permutation(len(pool)) for k, pool in enumerate(pools)]

    def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, range]:
        places = [(number * size + np.arange(size)) % len(order) for order, size in zip(orders, sizes, strict=True)]
        train, test = (pool.take(torch.from_numpy(o[at])) for pool, o, at in zip(pools, orders, places, strict=True))
        return train, test, range(source.train.classes)

    return deal


@dataclass(frozen=True)
class Deck:
    """The shuffled rows of every class, dealt cyclically."""

    rows: np.ndarray  # int [N], grouped by class
    starts: np.ndarray  # int [C + 1]

    @classmethod
    def of(cls, pool: Arrays, draw: np.random.Generator) -> Deck:
        """Shuffle the rows of all classes."""
        labels = pool.y.numpy()
        starts = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=pool.classes))])
        return cls(shuffled_by_label(labels, draw), starts)

    def take(self, label: int, start: int, count: int) -> np.ndarray:
        """``count`` rows of a class from position ``start`` on."""
        first, size = self.starts[label], self.starts[label + 1] - self.starts[label]
        return self.rows[first + (start + np.arange(count)) % size]

    def check(self, classes: np.ndarray, needed: int, what: str) -> None:
        """Raise a ``DataError`` if a class has fewer samples than a task needs."""
        sizes = np.diff(self.starts)[classes]
        if (sizes < needed).any():
            c = int(np.argmin(sizes))
            raise DataError(
                f"{what} set needs {needed} samples of class {classes[c]}, which has {sizes[c]}; "
                "lower stream.train or stream.test."
            )
