"""The timeline of a deployment: work is done when its answer comes, and schedules are those of simulations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from fedloom.base.errors import ClientError
from fedloom.core.timeline import Arrivals, InFlight, World
from fedloom.rounds.exchange import Broadcast
from fedloom.timing import Equal
from fedloom_apps.deploy.answers import work_seconds
from fedloom_apps.deploy.engine import POLL, Deployed

SCHEDULES = ("rounds", "deadline", "over_select", "buffered", "asynchronous", "semi")
"""The schedules that need not know durations beforehand."""


@dataclass(frozen=True)
class Real(Equal):
    """The nodes' own devices: time is measured, and nothing of it is known before."""


class AtWork(NamedTuple):
    """A client at work when the server was stopped: the order that it is given again."""

    client: int
    version: int
    ticket: str
    begin: float


@dataclass(frozen=True)
class RealWorld(World):
    """What a schedule knows of nodes: who can be reached, and whose work has come.

    Attributes:
        engine: reaches the nodes.
        broadcast: the newest version of the model.
        versions: earlier ones on which clients are at work.
        zero: the moment at which the clock of the run was 0.
        interrupted_work: the clients that were at work when the server was stopped.
    """

    engine: Deployed = field(kw_only=True)
    broadcast: Callable[[], Broadcast] = field(kw_only=True)
    versions: Mapping[int, Broadcast] = field(kw_only=True)
    zero: float = field(kw_only=True)
    interrupted_work: tuple[AtWork, ...] = field(default=(), kw_only=True)

    @property
    def now(self) -> float:
        """The clock."""
        return time.monotonic() - self.zero

    def cohort(self, version: int, time: float, count: int | None = None) -> tuple[np.ndarray, float]:
        """A whole cohort, whoever can be reached; its work begins now."""
        return super().cohort(version, self.now, count)

    def done(
        self, clients: np.ndarray, version: int, start: float, enough: int | None = None, until: float = inf
    ) -> np.ndarray:
        """When the answers came, float64 [clients]: inf if it is not waited for, and the end for what is of no use."""
        engine = self.engine
        engine.begin(self.broadcast(), clients, start)
        tickets = [engine.work[client].ticket for client in clients.tolist()]
        engine.gather(tickets, version, enough=enough, until=until + self.zero)
        engine.compare(clients, {})
        answers, now = [engine.answer(client) for client in clients.tolist()], self.now
        return np.array([
            inf if answer is None else now if answer.failure is not None else answer.time - self.zero
            for answer in answers
        ])  # fmt: skip

    def flight(self, version: int, clock: float) -> InFlight:
        """The clients at work, of whom some may have been when the server was stopped."""
        flight = RealFlight(self, clock, version)
        for number in sorted({work.version for work in self.interrupted_work}):
            at_work = [work for work in self.interrupted_work if work.version == number]
            clients = np.array([work.client for work in at_work], dtype=np.int64)
            down = self.versions[number] if number in self.versions else self.broadcast()
            self.engine.begin(down, clients, clock, {work.client: work.ticket for work in at_work})
            flight.working += [(inf, work.client, number, work.begin) for work in at_work]
            flight.busy.update(clients.tolist())
            flight.flying[number] = len(at_work)
        return flight


@dataclass
class RealFlight(InFlight):
    """The clients at work at nodes.

    Who fails or diverges takes part in the next step and is not invited before, but takes no place in it, so that a
    node that refuses at once, or says that its work diverged, neither uses up the rounds of the run nor ends it. Only
    if as many clients have failed as work at a time, or nobody is at work for the deadline, their failures make a step.
    """

    world: RealWorld  # pyright: ignore[reportIncompatibleVariableOverride]
    failed: list[tuple[float, int, int, float]] = field(default_factory=list)
    idle: float = field(init=False)

    def __post_init__(self) -> None:
        self.idle = self.clock

    def begin(self, clients: np.ndarray) -> None:
        """Order work from clients."""
        self.world.engine.begin(self.world.broadcast(), clients, self.clock)
        self.working += [(inf, client, self.version, self.clock) for client in clients.tolist()]

    def wait(self, until: float) -> None:
        """Wait for the next answers, or for nodes that come while places are free, until a time at the latest."""
        world, engine, started = self.world, self.world.engine, time.monotonic()
        before, waited = engine.reachable() | self.busy, False
        while True:
            engine.send_orders()
            answers = {entry: answer for entry in self.working if (answer := engine.answer(entry[1])) is not None}
            self.clock = world.now
            free = len(self.working) < world.size
            if answers or self.clock >= until or (free and engine.reachable() - before):
                break
            self.idle = self.clock if self.working else self.idle
            if waited := self.clock - self.idle > engine.terms.deadline:
                if self.failed:
                    break
                raise ClientError(
                    f"step {self.version + 1}: no node is at work, and none can be reached; check that nodes are "
                    "running, and continue with resume=…"
                )
            engine.receive(min(POLL, until - self.clock))
        engine.compare(np.array([entry[1] for entry in answers], dtype=np.int64), engine.norms)
        self.working = [entry for entry in self.working if entry not in answers]
        for entry, answer in sorted(answers.items(), key=lambda item: item[1].time):
            is_update = answer.result is not None and answer.result.failure is None
            (self.arrived if is_update else self.failed).append((answer.time - world.zero, *entry[1:]))
        if waited or len(self.failed) >= world.size:
            self.arrived, self.failed = self.arrived + self.failed, []
        seconds = [work_seconds(answer.packet, self.clock - entry[3]) for entry, answer in answers.items()]
        engine.tally.work = max(engine.tally.work, *seconds) if seconds else engine.tally.work
        engine.tally.seconds += time.monotonic() - started

    def take(self, count: int) -> Arrivals:
        """A server step with the first ``count`` arrivals of use, and all that failed before it."""
        failed, self.failed, self.arrived = len(self.failed), [], self.failed + self.arrived
        return super().take(failed + count)
