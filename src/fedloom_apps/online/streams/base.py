"""Task streams: sequences of tasks, generated on access from a source's samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
from torch import Tensor

from fedloom.core import rng
from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.core.registry import Ranged, Registry
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

    >>> import torch
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


Dealt = Callable[[int, np.random.Generator], tuple[Arrays, Arrays, Sequence[int]]]
"""The training and test samples of a task, and the source's class of each label, from its number and generator."""


@dataclass(frozen=True)
class Tasks(Ranged, ABC):
    """A distribution over tasks: their samples, and the transformation of these."""

    @abstractmethod
    def deal(self, source: Source, seed: int) -> tuple[int, Dealt]:
        """The number of tasks, and the function that deals each its samples.

        Raises:
            DataError: if the source has too few samples or classes for such tasks.
        """

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        """Transform the inputs x of a task's two splits; returns them with the parameters of the transformation."""
        return x, {}


streams = Registry[Tasks]("task stream")


def task_stream(source: Source | str, kind: Tasks | str, seed: int = 0) -> TaskStream:
    """A stream of tasks from the samples of a source.

    Args:
        source: a source, or the name of one that needs no settings.
        kind: a kind of task, or the name of one.
        seed: seed of all random draws.

    Raises:
        DataError: if the source has too few samples or classes for such tasks.

    >>> stream = task_stream("digits", "k_way", seed=1)
    >>> len(stream), len(stream[7].train), stream[7].train.classes, len(stream[7].classes)
    (200, 250, 5, 5)
    """
    source = sources.make(source) if isinstance(source, str) else source
    kind = streams.make(kind) if isinstance(kind, str) else kind
    if not source.train.has_classes:
        raise DataError("task streams need samples with class numbers.")
    count, deal = kind.deal(source, seed)

    def make(number: int) -> Task:
        draw = rng.stream(seed, "task", number)
        train, test, chosen = deal(number, draw)
        x, about = kind.change((train.x, test.x), (train.y, test.y), source.train, train.classes, draw)
        return Task(number, replace(train, x=x[0]), replace(test, x=x[1]), tuple(map(int, chosen)), about)

    return TaskStream(count, make)
