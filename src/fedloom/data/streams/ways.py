"""Tasks of a few classes out of many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.streams.base import Tasks, at_least_one, streams


@streams.register(name="k_way")
@dataclass(frozen=True)
class KWay(Tasks):
    """k random classes a task, labelled in random order (Acar, thesis ch. 5).

    With overlap, each task's classes are drawn by themselves; without, no class comes in two tasks.

    Args:
        ways: classes per task, k.
        tasks: how many tasks; without overlap at most ⌊C/k⌋, and 0 takes all of those.
        train: training samples per task.
        test: test samples per task.
        overlap: whether tasks may share classes.

    >>> KWay(ways=3, tasks=0, overlap=False).table(10, np.random.default_rng(0)).shape
    (3, 3)
    """

    ways: int = 5
    tasks: int = 200
    train: int = 250
    test: int = 50
    overlap: bool = True

    def __post_init__(self) -> None:
        at_least_one(ways=self.ways, train=self.train, test=self.test)
        if self.tasks or self.overlap:
            at_least_one(tasks=self.tasks)

    @property
    def sizes(self) -> tuple[int, int]:
        """See ``Tasks.sizes``."""
        return self.train, self.test

    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        """See ``Tasks.table``."""
        if self.ways > classes:
            raise DataError(f"tasks of {self.ways} classes cannot be made from {classes}.")
        if self.overlap:
            return np.stack([draw.permutation(classes)[: self.ways] for _ in range(self.tasks)])
        most = classes // self.ways
        count = self.tasks or most
        if count > most:
            raise DataError(f"{classes} classes give {most} tasks of {self.ways} without overlap, not {count}.")
        return draw.permutation(classes)[: count * self.ways].reshape(count, self.ways)
