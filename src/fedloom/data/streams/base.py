"""Task streams: sequences of tasks, generated on access from a source's training and test samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.core.registry import Registry
from fedloom.data.grouping import rank_within, shuffled_by_label
from fedloom.data.sources import Source, sources


@dataclass(frozen=True)
class Task:
    """One task of a stream.

    Args:
        number: its position in the stream.
        train: training samples, labelled 0 .. k - 1.
        test: test samples with the same labels.
        classes: the source's class of each label.
        about: parameters of the task's construction, as arrays by name.
    """

    number: int
    train: Arrays
    test: Arrays
    classes: tuple[int, ...] = ()
    about: Mapping[str, np.ndarray] = field(default_factory=dict)


class TaskStream(Sequence[Task]):
    """A sequence of tasks, each generated on access and identical, bit for bit, on every access.

    Nothing is cached: an online learner remembers only what it stores itself.

    Args:
        count: number of tasks.
        make: generates the task of a given number.

    >>> stream = TaskStream(3, lambda number: Task(number, *[Arrays(torch.zeros(2, 1), torch.tensor([0, 1]), 2)] * 2))
    >>> len(stream), stream[-1].number, [task.number for task in stream[1:]]
    (3, 2, [1, 2])
    """

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count, self._make = count, make

    @classmethod
    def of(cls, tasks: Sequence[tuple[Arrays, Arrays]]) -> TaskStream:
        """A stream of the given (training, test) arrays; the sequence may itself generate them on access."""
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
    """A distribution over tasks: their classes and the transformation of their samples."""

    @abstractmethod
    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        """The source's classes of every task, in the order of the task's labels; int [T, k]."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Number of training and of test samples per task."""

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        """Transform the inputs x of a task's two splits; returns them with the parameters of the transformation."""
        return x, {}


streams = Registry[Tasks]("task stream")


def task_stream(source: Source | str, kind: Tasks | str, seed: int = 0) -> TaskStream:
    """A stream of tasks from the training and test samples of a source.

    Each class's samples are shuffled once and dealt task by task: a sample is reused only after all samples of its
    class have been used. Within a task, class sizes differ by at most one.

    Args:
        source: a source, or the name of one that needs no settings.
        kind: a kind of task, or the name of one.
        seed: of all random draws.

    Raises:
        DataError: if the source has too few samples or classes for such tasks.

    >>> stream = task_stream("digits", "k_way", seed=1)
    >>> len(stream), len(stream[7].train), stream[7].train.classes, len(stream[7].classes)
    (200, 250, 5, 5)
    """
    source = sources.make(source) if isinstance(source, str) else source
    kind = streams.make(kind) if isinstance(kind, str) else kind
    pools = (source.train, source.test)
    table = kind.table(source.train.classes, rng.stream(seed, "tasks"))
    turn = rank_within(table)  # [T, k] earlier tasks with the same class
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
    """The shuffled rows of every class, dealt cyclically."""

    rows: np.ndarray  # int [N], grouped by class
    starts: np.ndarray  # int [C + 1]

    @classmethod
    def of(cls, pool: Arrays, draw: np.random.Generator) -> Deck:
        """Shuffle the rows of all classes."""
        if pool.y.is_floating_point() or pool.y.ndim != 1:
            raise DataError("task streams need samples with class numbers.")
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
            raise DataError(f"{what} set needs {needed} samples of class {classes[c]}, which has {sizes[c]}.")
