"""Schedules: when the server takes a step, and with whose work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedloom.base import rng
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.ranges import Count, NonNegative, Positive
from fedloom.base.registry import Registry
from fedloom.core.timeline import Arrivals, InFlight, Schedule, World, one_version
from fedloom.timing.devices import columns

schedules: Registry[Schedule] = Registry("schedule")


@schedules.register
@dataclass(frozen=True)
class Rounds(Schedule):
    """Rounds with a barrier: the server waits for every member of the cohort.

    >>> import numpy as np
    >>> world = World(4, 2, lambda t, count: np.array([t, t + 1]), lambda clients, t: 1.0 + clients)
    >>> [(step.clients.tolist(), step.clock) for step, _ in zip(Rounds().steps(world), range(2))]
    [([0, 1], 2.0), ([1, 2], 5.0)]
    """

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        for t in count(version):
            clients, start = world.cohort(t, clock)
            end = world.done(clients, t, start)
            clock = float(end.max())
            yield one_version(t, clients, start, end, clock)


@schedules.register
@dataclass(frozen=True)
class Deadline(Schedule):
    """Rounds that end after a fixed time at the latest; work that is not done by then is lost.

    Clients that are slow never take part, so that the model is biased towards fast ones. A step to which nobody
    arrives leaves the model as it is.

    Args:
        seconds: the longest duration of a round.
    """

    seconds: Positive

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        for t in count(version):
            clients, start = world.cohort(t, clock)
            end = world.done(clients, t, start, until=start + self.seconds)
            late = end > start + self.seconds
            clock = start + self.seconds if late.any() else float(end.max())
            step = one_version(t, clients, start, np.minimum(end, clock), clock, late)
            yield replace(step, punctual=world.punctual(clients, self.seconds))


@schedules.register(name="over_select")
@dataclass(frozen=True)
class OverSelect(Schedule):
    """Rounds that invite more clients than they need and end when enough are done (Bonawitz et al. 2019, section 9).

    The others' work is lost. As with a deadline, the model is biased towards fast clients.

    Args:
        fraction: of the cohort, by which more clients are invited.
    """

    fraction: NonNegative = 0.3

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        invited = min(world.clients, int(np.ceil(world.size * (1 + self.fraction) - 1e-9)))
        for t in count(version):
            clients, start = world.cohort(t, clock, invited)
            end = world.done(clients, t, start, enough=world.size)
            rank = np.empty(len(clients), dtype=np.int64)
            rank[np.argsort(end, kind="stable")] = np.arange(len(clients))
            late = rank >= world.size
            clock = float(end[~late].max())
            yield one_version(t, clients, start, np.minimum(end, clock), clock, late)


@schedules.register
@dataclass(frozen=True)
class Tiers(Schedule):
    """Rounds whose cohort is drawn from clients of about the same speed (TiFL; Chai et al. 2020, section 4).

    Clients are sorted by their expected duration into ``n`` tiers of equal size, and each round draws one tier
    uniformly, then its cohort from that tier alone. The adaptive choice of tiers by accuracy (section 4.4 of the
    paper) is left out.

    Args:
        n: the number of tiers.
    """

    n: Count = 5

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        tiers = [np.sort(tier) for tier in np.array_split(np.argsort(world.expected(), kind="stable"), self.n)]
        tiers = [tier for tier in tiers if len(tier)]
        for t in count(version):
            draw = rng.stream(world.seed, "tier", t)
            while True:  # until some member of the tier is available
                tier = tiers[int(draw.integers(len(tiers)))]
                ready = tier[world.ready(tier, clock)]
                if len(ready):
                    break
                if not world.ready(np.arange(world.clients), clock).any():
                    clock = world.later(clock)
            clients = np.sort(draw.choice(ready, min(world.size, len(ready)), replace=False))
            end = clock + world.seconds(clients, t)
            start, clock = clock, float(end.max())
            yield one_version(t, clients, start, end, clock)


@schedules.register
@dataclass(frozen=True)
class Buffered(Schedule):
    """A step whenever ``k`` clients are done, while the others go on (FedBuff; Nguyen et al. 2022, algorithm 1).

    The cohort is the number of clients at work; whoever is done is replaced at once by another client, which receives
    the newest model. Unlike in the paper, a client whose work waits for its step is not invited again before.

    Args:
        k: clients a step; None: the cohort, which with equal devices gives ``rounds``.
    """

    stale: ClassVar[bool] = True

    k: Count | None = None

    def members(self, size: int) -> int:
        return self.k or size

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        return _buffered(world.flight(version, clock), self.members(world.size))


@schedules.register
@dataclass(frozen=True)
class Asynchronous(Schedule):
    """A step with every client that is done, alone (FedAsync; Xie et al. 2019, algorithm 1); ``buffered`` with k = 1.

    Staleness is large then, and a server rate of about 1/cohort keeps methods stable whose server sums what clients
    send, such as FedDyn and SCAFFOLD.
    """

    stale: ClassVar[bool] = True

    def members(self, size: int) -> int:
        return 1

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        return _buffered(world.flight(version, clock), 1)


def _buffered(flight: InFlight, size: int) -> Iterator[Arrivals]:
    while True:
        flight.advance()
        while len(flight.arrived) >= size:
            yield flight.take(size)


@schedules.register
@dataclass(frozen=True)
class Semi(Schedule):
    """A step at fixed times with all work that has arrived since the last one; the others go on.

    Args:
        period: seconds between steps; a time at which nothing has arrived is passed over.
    """

    stale: ClassVar[bool] = True

    period: Positive

    def members(self, size: int) -> None:
        return None

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        flight = world.flight(version, clock)
        for number in count(1):
            while flight.clock < number * self.period:
                flight.advance(number * self.period)
            if flight.arrived:
                yield flight.take(len(flight.arrived))


@schedules.register
@dataclass(frozen=True)
class Replay(Schedule):
    """The steps of a run that is on record: who took part in each, on which version, and whose work was late.

    With the settings of that run they give its model again, bit for bit, also without its devices: to look at a run
    whose timing cannot be repeated, or to give one method the timeline of another.

    Args:
        path: the directory of the run, a simulation or a deployment; or a table with the columns ``round`` (from 1),
            ``client`` and ``version`` (from 0), and ``begin``, ``end`` and ``late``, if they are known.
    """

    stale: ClassVar[bool] = True

    path: Path

    def members(self, size: int) -> None:
        return None

    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        path = self.path / "mixing.parquet" if self.path.is_dir() else self.path
        table = columns(path, ("round", "client", "version"), ("begin", "end", "late"))
        order = np.lexsort((table["client"], table["version"], table["round"]))
        t, clients, versions = (table[name][order].astype(np.int64) for name in ("round", "client", "version"))
        t, zeros = t - 1, np.zeros(len(order))
        begin, end, late = (table.get(name, zeros)[order] for name in ("begin", "end", "late"))
        self._check(world.clients, t, clients, versions)
        last = np.full(int(t.max()) + 1, -1)  # the last step that takes work on each version
        np.maximum.at(last, versions, t)
        ends = np.searchsorted(t, np.arange(len(last) + 1))
        for number, (low, high) in enumerate(pairwise(ends)):
            rows = slice(low, high)
            clock = max(clock, float(end[rows].max()))
            flying = np.flatnonzero(last[: number + 1] > number)
            received = np.unique(clients[versions == number])
            yield Arrivals(
                clients[rows],
                versions[rows],
                clock,
                begin[rows],
                end[rows],
                late[rows] > 0,
                received,
                tuple(flying.tolist()),
            )
        raise ConfigError(f"{self.path} has {len(last)} rounds, fewer than the run; set rounds={len(last)}.")

    def _check(self, count: int, t: np.ndarray, clients: np.ndarray, versions: np.ndarray) -> None:
        """Raise a ``DataError`` for steps that cannot have been."""
        if t[0] != 0 or (np.diff(t) > 1).any():
            raise DataError(f"{self.path} does not have every round from 1.")
        if clients.min() < 0 or clients.max() >= count:
            raise DataError(f"{self.path} names clients that do not exist; they are 0 to {count - 1}.")
        if versions.min() < 0 or (versions > t).any():
            raise DataError(f"{self.path} has work on versions of the model that were not there yet.")
        order = np.lexsort((t, clients))
        again = clients[order][1:] == clients[order][:-1]
        if (again & (versions[order][1:] <= t[order][:-1])).any():
            raise DataError(f"{self.path} has clients that work on two versions at a time.")
