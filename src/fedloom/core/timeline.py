"""The timeline of a run: which clients take part in which server step, and from which version of the model.

Version t is the model before step t (both from 0). A client is *invited*: it receives the newest version, works, and
its work *arrives* when its device is done; a server step takes some of what has arrived. Durations are functions of
(seed, client, version) and never of what training returns, so that the whole timeline is a pure function, known
before anything is trained, the same on every engine and after every interruption. Client work is done when a step
takes it, with the version that the client received.

From its invitation until the step that takes its work a client is *busy*, and is not invited again: nobody else writes
its state in between, and (client, version) is a key of its random draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import ClassVar

import numpy as np

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.registry import Ranged


@dataclass(frozen=True)
class Arrivals:
    """One server step: the clients whose work ends in it, sorted by (version, client).

    Attributes:
        clients: numbers of the clients, int64 [S]; each occurs once.
        versions: the version that each of them received, int64 [S].
        clock: the time of the step in seconds since the start of the run.
        begin: the time of each client's invitation, float64 [S].
        end: the time at which each client's work is done, or given up, float64 [S].
        late: whether the work comes too late for the server, which ignores it, bool [S].
        received: the clients that received version t, in the order of their invitations, int64 [I].
        punctual: the probability that each client's work would be in time, float64 [S]; None if it is 1.
        included: the probability π_i that each client's work is part of this step, float64 [S], if it is known.
        in_flight: the versions, sorted, of clients still at work after the step.
    """

    clients: np.ndarray
    versions: np.ndarray
    clock: float
    begin: np.ndarray
    end: np.ndarray
    late: np.ndarray
    received: np.ndarray
    in_flight: tuple[int, ...] = ()
    punctual: np.ndarray | None = None
    included: np.ndarray | None = None


@dataclass(frozen=True)
class World:
    """What a schedule knows.

    Attributes:
        clients: K.
        size: the number of clients at work at a time; the size of a cohort.
        draw: so many clients for a version t at which nobody is busy and everybody is available, sorted, int64.
        seconds: the durations, float64 [n] > 0, of the work of n clients on a version.
        seed: of invitations.
        expected: each client's duration without the chance of a single round, float64 [K].
        available: which of n clients can be invited at a time, bool [n]; None: all of them, always.
        change: the first time after a given one at which availability may change.
        punctual: the probability that the work of n clients takes at most so many seconds, float64 [n].
    """

    clients: int
    size: int
    draw: Callable[[int, int], np.ndarray]
    seconds: Callable[[np.ndarray, int], np.ndarray]
    seed: int = 0
    expected: Callable[[], np.ndarray] = lambda: np.zeros(0)
    available: Callable[[np.ndarray, float], np.ndarray] | None = None
    change: Callable[[float], float] = lambda time: inf
    punctual: Callable[[np.ndarray, float], np.ndarray] = lambda clients, seconds: np.ones(len(clients))
    _draws: rng.ReusedGenerator = field(default_factory=rng.ReusedGenerator, init=False, repr=False, compare=False)

    def ready(self, clients: np.ndarray, time: float) -> np.ndarray:
        """Which of the clients can be invited at a time, bool [clients]."""
        return np.ones(len(clients), dtype=bool) if self.available is None else self.available(clients, time)

    def invite(self, count: int, version: int, wave: int, busy: Set[int], time: float) -> np.ndarray:
        """Up to ``count`` clients that are neither busy nor unavailable; int64.

        The first invitations of a version at which nobody is busy are those of ``draw``; others are drawn uniformly, by
        version and wave.
        """
        if not wave and not busy:
            cohort = self.draw(version, count)
            if self.available is None or (ready := self.ready(cohort, time)).all():
                return cohort
            absent, cohort = int((~ready).sum()), cohort[ready]
            more = self._free_clients(absent, version, wave, set(cohort.tolist()), time)
            return np.sort(np.concatenate([cohort, more]))
        return np.sort(self._free_clients(count, version, wave, busy, time))

    def _free_clients(self, count: int, version: int, wave: int, busy: Set[int], time: float) -> np.ndarray:
        draw = self._draws.stream(self.seed, "invitation", version, wave)
        clients: list[int] = []
        if len(busy) + 2 * count < self.clients:  # as a rule most of the clients are free
            for _ in range(20):
                draws = draw.integers(self.clients, size=count - len(clients))
                if self.available is not None:
                    draws = draws[self.available(draws, time)]
                clients += [c for c in dict.fromkeys(draws.tolist()) if c not in busy and c not in clients]
                if len(clients) == count:
                    return np.array(clients, dtype=np.int64)
        excluded = np.fromiter((*busy, *clients), dtype=np.int64)
        free = np.setdiff1d(np.arange(self.clients), excluded, assume_unique=True)
        free = free[self.ready(free, time)]
        more = draw.choice(free, min(count - len(clients), len(free)), replace=False)
        return np.concatenate([np.array(clients, dtype=np.int64), more])

    def cohort(self, version: int, time: float, count: int | None = None) -> tuple[np.ndarray, float]:
        """A whole cohort while nobody is at work, and the time at which its first member is available."""
        while not len(clients := self.invite(count or self.size, version, 0, frozenset(), time)):
            time = self.later(time)
        return clients, time

    def done(
        self, clients: np.ndarray, version: int, start: float, enough: int | None = None, until: float = inf
    ) -> np.ndarray:
        """When the work of clients on a version is done that they begin at ``start``, float64 [clients].

        A caller that waits for the first ``enough`` of them, or until a time, does not need the times of the others,
        which may be inf.
        """
        return start + self.seconds(clients, version)

    def flight(self, version: int, clock: float) -> InFlight:
        """The clients at work from a version on, for schedules whose steps overlap."""
        return InFlight(self, clock, version)

    def later(self, time: float) -> float:
        """The next time at which availability may change."""
        if (then := self.change(time)) == inf:
            raise ConfigError("no client is ever available again; see devices.availability.")
        return then


@dataclass(frozen=True)
class Schedule(Ranged, ABC):
    """Base class of schedules: how long the server waits, and for whom; a condition of a run, not part of a method.

    Attributes:
        stale: whether clients of one step may have received different versions.
    """

    stale: ClassVar[bool] = False

    def members(self, size: int) -> int | None:
        """The number of clients whose work a step takes, ``size`` of them being at work; None if it varies."""
        return size

    @abstractmethod
    def steps(self, world: World, version: int = 0, clock: float = 0.0) -> Iterator[Arrivals]:
        """The server steps from a version on, without end; a pure function of its arguments.

        Only the steps of a schedule that is not ``stale`` can begin at another version than 0.
        """


@dataclass
class InFlight:
    """The clients at work and the work that has arrived, for schedules whose steps overlap."""

    world: World
    clock: float = 0.0
    version: int = 0
    wave: int = 0
    working: list[tuple[float, int, int, float]] = field(default_factory=list)  # heap: end, client, version, begin
    arrived: list[tuple[float, int, int, float]] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    received: list[int] = field(default_factory=list)
    flying: Counter[int] = field(default_factory=Counter)

    def advance(self, until: float = inf) -> None:
        """Invite as many clients as places are free, then go to the next arrivals, at ``until`` at the latest."""
        if (free := self.world.size - len(self.working)) > 0:
            clients = self.world.invite(free, self.version, self.wave, self.busy, self.clock)
            self.wave += 1
            if len(clients):
                self.begin(clients)
                self.busy.update(clients.tolist())
                self.received += clients.tolist()
                self.flying[self.version] += len(clients)
        self.wait(until)

    def begin(self, clients: np.ndarray) -> None:
        """Let clients begin their work on the newest version."""
        seconds = self.world.seconds(clients, self.version)
        for client, duration in zip(clients.tolist(), seconds.tolist(), strict=True):
            heappush(self.working, (self.clock + duration, client, self.version, self.clock))

    def wait(self, until: float) -> None:
        """Go to the next arrivals, or to the next time at which clients may come, at ``until`` at the latest."""
        then = self.working[0][0] if self.working else inf
        if len(self.working) < self.world.size:
            then = min(then, self.world.change(self.clock))
        if min(then, until) == inf:
            raise ConfigError("no client is ever available again; see devices.availability.")
        self.clock = min(then, until)
        while self.working and self.working[0][0] == self.clock:
            self.arrived.append(heappop(self.working))

    def take(self, count: int) -> Arrivals:
        """A server step with the first ``count`` arrivals."""
        uploads, self.arrived = self.arrived[:count], self.arrived[count:]
        uploads.sort(key=lambda upload: (upload[2], upload[1]))
        for _, client, version, _ in uploads:
            self.busy.remove(client)
            self.flying[version] -= 1
            if not self.flying[version]:
                del self.flying[version]
        step = Arrivals(
            np.array([upload[1] for upload in uploads], dtype=np.int64),
            np.array([upload[2] for upload in uploads], dtype=np.int64),
            self.clock,
            np.array([upload[3] for upload in uploads]),
            np.array([upload[0] for upload in uploads]),
            np.zeros(len(uploads), dtype=bool),
            np.array(self.received, dtype=np.int64),
            tuple(self.flying),  # versions are counted upwards
        )
        self.version, self.wave, self.received = self.version + 1, 0, []
        return step


def one_version(
    version: int, clients: np.ndarray, start: float, end: np.ndarray, clock: float, late: np.ndarray | None = None
) -> Arrivals:
    """A step whose members have all received its own version at one time, sorted by client, [S] each."""
    begin, late = np.full(len(clients), start), np.zeros(len(clients), dtype=bool) if late is None else late
    return Arrivals(clients, np.full(len(clients), version), clock, begin, end, late, clients)


NOBODY = one_version(0, np.zeros(0, np.int64), 0.0, np.zeros(0), 0.0)
"""The step of a run without rounds."""


class Timeline:
    """The server steps of a run, by number.

    Args:
        schedule: the schedule.
        world: what it knows.
        version: the first step, which is 0 for stale schedules.
        clock: the time at which it begins.
    """

    def __init__(self, schedule: Schedule, world: World, version: int = 0, clock: float = 0.0) -> None:
        self.schedule, self.world, self.begin = schedule, world, (version, clock)
        self._start()

    def _start(self) -> None:
        self._steps = self.schedule.steps(self.world, *self.begin)
        self._number, self._last = self.begin[0] - 1, None

    def step(self, number: int) -> Arrivals:
        """The step of a number, from 0; those before it are passed through, which takes microseconds a client."""
        if number < self._number:
            self._start()
        while self._number < number:
            self._last = next(self._steps)
            self._number += 1
        assert self._last is not None
        return self._last
