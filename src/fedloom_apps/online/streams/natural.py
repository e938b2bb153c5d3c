"""Natural tasks of a source: its clients, or the data in their order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.core import rng
from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays, Index
from fedloom.core.ranges import Count, NonNegativeInt
from fedloom.data.sources import Source
from fedloom.data.split import index_of
from fedloom_apps.online.streams.base import Dealt, Tasks, streams


@streams.register(name="natural")
@dataclass(frozen=True)
class NaturalTasks(Tasks):
    """Each task is one natural client (a writer, role or user); they arrive in random order, with all classes.

    A client's training and test samples are drawn from its own samples without replacement. If the source has test
    samples of that client, as Shakespeare has of its roles, test samples are drawn from these. Clients with too few
    samples are left out.

    Args:
        tasks: number of tasks; 0 takes all clients with enough samples.
        train: training samples per task.
        test: test samples per task.
    """

    tasks: NonNegativeInt = 0
    train: Count = 40
    test: Count = 10

    def deal(self, source: Source, seed: int) -> tuple[int, Dealt]:
        own, apart = _clients(source)
        split = apart.sizes >= self.test  # has test samples of its own
        fits = np.flatnonzero(own.sizes >= self.train + np.where(split, 0, self.test))
        if len(fits) < max(self.tasks, 1):
            raise DataError(
                f"{source.name}: {len(fits)} of {len(own)} natural clients have the {self.train} training and "
                f"{self.test} test samples of a task, but {max(self.tasks, 1)} are needed; lower stream.train, "
                "stream.test or stream.tasks."
            )
        clients = rng.stream(seed, "tasks").permutation(fits)

        def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, range]:
            client = clients[number]
            rows = draw.permutation(own[client])
            train, rest = rows[: self.train], rows[self.train : self.train + self.test]
            if split[client]:
                test = source.test.take(draw.permutation(apart[client])[: self.test])
            else:
                test = source.train.take(rest)
            return source.train.take(train), test, range(source.train.classes)

        return self.tasks or len(fits), deal


@streams.register(name="in_order")
@dataclass(frozen=True)
class InOrder(Tasks):
    """Each task is the next stretch of the data in their order: training samples first, then test samples.

    The order is that of the source's training pool, for a table the one of its ``time`` column. With ``by_client`` a
    stretch holds the samples of one natural client, who may come again; stretches arrive when they are complete.
    Samples that fill no stretch are left out.

    Args:
        tasks: number of tasks to take, from the first on; 0 takes all.
        train: training samples per task.
        test: test samples per task, which follow them.
        by_client: whether the samples of each natural client form tasks of their own.
    """

    tasks: NonNegativeInt = 0
    train: Count = 40
    test: Count = 10
    by_client: bool = False

    def deal(self, source: Source, seed: int) -> tuple[int, Dealt]:
        size = self.train + self.test
        groups = [np.arange(len(source.train))]
        if self.by_client:
            own, _ = _clients(source)
            groups = [own[client] for client in range(len(own))]
        rows = np.concatenate([g[: len(g) // size * size].reshape(-1, size) for g in groups])  # [T, train + test]
        rows = rows[np.argsort(rows[:, -1], kind="stable")]
        if len(rows) < max(self.tasks, 1):
            raise DataError(
                f"{source.name}: {len(source.train)} samples make {len(rows)} tasks of {self.train} + {self.test}, but "
                f"{max(self.tasks, 1)} are needed; lower stream.train, stream.test or stream.tasks."
            )

        def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, range]:
            train, test = rows[number, : self.train], rows[number, self.train :]
            return source.train.take(train), source.train.take(test), range(source.train.classes)

        return self.tasks or len(rows), deal


def _clients(source: Source) -> tuple[Index, Index]:
    """The training rows and the test rows of every natural client."""
    if source.groups is None:
        raise DataError(
            f"{source.name} has no natural clients to make tasks of; take data with writers, roles or users (see "
            "fedloom data), or name their column with data.client."
        )
    count = len(source.group_names)
    none = np.zeros(0, dtype=np.int64)
    tests = none if source.groups_test is None else source.groups_test
    return index_of(np.asarray(source.groups), count), index_of(np.asarray(tests), count)
