"""What a task stream is: tasks that arrive one by one, made when they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.core.registry import Registry
from fedloom.data.sources import Source, sources


@dataclass(frozen=True)
class Task:
    """One task: what is learnt from, and what is tested on.

    Args:
        number: its place in the stream.
        train: training samples, labelled 0 .. k - 1.
        test: test samples, labelled likewise.
        classes: the source's class behind each label.
        about: how the task was made, as arrays by name.
    """

    number: int
    train: Arrays
    test: Arrays
    classes: tuple[int, ...] = ()
    about: Mapping[str, np.ndarray] = field(default_factory=dict)


class TaskStream(Sequence[Task]):
    """Tasks by number, each made anew whenever it is asked for; the same number gives the same task, bit for bit.

    Nothing is kept, so that what an online learner remembers is what it keeps itself.

    Args:
        count: how many tasks there are.
        make: gives the task of a number.

    >>> stream = TaskStream(3, lambda number: Task(number, *[Arrays(torch.zeros(2, 1), torch.tensor([0, 1]), 2)] * 2))
    >>> len(stream), stream[-1].number, [task.number for task in stream[1:]]
    (3, 2, [1, 2])
    """

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count, self._make = count, make

    @classmethod
    def of(cls, tasks: Sequence[tuple[Arrays, Arrays]]) -> TaskStream:
        """Anyone's sequence of (training, test) arrays, which may itself make them when they are asked for."""
        return cls(len(tasks), lambda number: Task(number, *tasks[number]))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> Task: ...
    @overload
    def __getitem__(self, number: slice) -> TaskStream: ...
    def __getitem__(self, number: int | slice) -> Task | TaskStream:
        if isinstance(number, slice):
            chosen = range(self._count)[number]
            return TaskStream(len(chosen), lambda n: self[chosen[n]])
        return self._make(range(self._count)[number])  # an IndexError beyond the end


@dataclass(frozen=True)
class Tasks(ABC):
    """A kind of task: which classes, and what is done to their samples."""

    @abstractmethod
    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        """The source's classes of every task, in the order of the task's labels; int [T, k]."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Training and test samples of a task."""

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        """The inputs of a task's splits as the task has them, and what was done."""
        return x, {}


streams = Registry[Tasks]("task stream")


def task_stream(source: Source | str, kind: Tasks | str, seed: int = 0) -> TaskStream:
    """The stream of tasks of a kind from a source's training and test samples.

    Each class's samples are shuffled once and dealt out task by task: a sample is used again only when all of its class
    have been used. A task has as many samples of each of its classes as can be, to within one.

    Args:
        source: a source, or the name of one that needs no settings.
        kind: a kind of task, or the name of one.
        seed: of everything that is random.

    >>> stream = task_stream("digits", "k_way", seed=1)
    >>> len(stream), len(stream[7].train), stream[7].train.classes, len(stream[7].classes)
    (200, 250, 5, 5)

    Raises:
        DataError: if the source cannot give such tasks.
    """
    source = sources.make(source) if isinstance(source, str) else source
    kind = streams.make(kind) if isinstance(kind, str) else kind
    pools = (source.train, source.test)
    table = kind.table(source.train.classes, rng.stream(seed, "tasks"))
    turn = turns(table)
    ways = table.shape[1]
    quotas = [size // ways + (np.arange(ways) < size % ways) for size in kind.sizes]
    decks = [Deck.of(pool, rng.stream(seed, "tasks", 1 + k)) for k, pool in enumerate(pools)]
    for deck, quota, what in zip(decks, quotas, ("training", "test"), strict=True):
        deck.check(np.unique(table), int(quota.max()), f"{source.name}: a {what}")

    def make(number: int) -> Task:
        draw = rng.stream(seed, "task", number)
        chosen = table[number]
        x, y = [], []
        for deck, quota, pool in zip(decks, quotas, pools, strict=True):
            starts = turn[number] * quota.max()
            rows = [deck.take(c, start, n) for c, start, n in zip(chosen, starts, quota, strict=True)]
            order = draw.permutation(int(quota.sum()))
            x.append(pool.x[torch.from_numpy(np.concatenate(rows)[order])])
            y.append(torch.from_numpy(np.repeat(np.arange(ways), quota)[order]))
        x, about = kind.change(x, y, source.train, ways, draw)
        names = tuple(source.train.names[c] for c in chosen) if source.train.names else ()
        train, test = (
            replace(pool, x=a, y=b, classes=ways, names=names) for pool, a, b in zip(pools, x, y, strict=True)
        )
        return Task(number, train, test, tuple(map(int, chosen)), about)

    return TaskStream(len(table), make)


@dataclass(frozen=True)
class Deck:
    """Every class's rows in random order, dealt from the top and again from the start when it is through."""

    rows: np.ndarray  # int [N], grouped by class
    starts: np.ndarray  # int [C + 1]

    @classmethod
    def of(cls, pool: Arrays, draw: np.random.Generator) -> Deck:
        """Shuffled rows of all classes."""
        if pool.y.is_floating_point() or pool.y.ndim != 1:
            raise DataError("task streams need samples with class numbers.")
        labels = pool.y.numpy()
        rows = draw.permutation(len(labels))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        return cls(rows, np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=pool.classes))]))

    def take(self, label: int, start: int, count: int) -> np.ndarray:
        """``count`` rows of a class from a place on."""
        first, size = self.starts[label], self.starts[label + 1] - self.starts[label]
        return self.rows[first + (start + np.arange(count)) % size]

    def check(self, classes: np.ndarray, most: int, what: str) -> None:
        """Refuse a class with too few samples for one task."""
        sizes = np.diff(self.starts)[classes]
        if (sizes < most).any():
            c = int(np.argmin(sizes))
            raise DataError(f"{what} set needs {most} samples of class {classes[c]}, which has {sizes[c]}.")


def turns(table: np.ndarray) -> np.ndarray:
    """In how many earlier tasks each class of each task has occurred, int [T, k].

    >>> turns(np.array([[0, 1], [1, 2], [1, 0]])).tolist()
    [[0, 0], [1, 0], [2, 1]]
    """
    flat = table.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat)
    found = np.empty(len(flat), dtype=np.int64)
    found[order] = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found.reshape(table.shape)


def at_least_one(**settings: int) -> None:
    """Refuse counts below 1."""
    for name, value in settings.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}.")
