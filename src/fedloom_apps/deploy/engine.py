"""The engine of a deployment: clients are nodes, which hold their own data and states, and work is messages.

An order goes to every member of the cohort that is online, the broadcast once for all. Answers are folded in the order
of the cohort and in the blocks of the compute, whatever the order of arrival, so that the model has the bits of the
serial engine. A member that does not answer in time is absent; late answers are dropped and counted.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedloom.core.aggregate import Fold, fold
from fedloom.core.client import Broadcast, Failure, FailureKind, Result, State
from fedloom.core.engine import ComputeFactory, Engine, Group, States, Traits
from fedloom.core.errors import ClientError, printable
from fedloom.core.plan import ClientPlan
from fedloom_apps.deploy.answers import (
    SLACK,
    Shapes,
    least_loss,
    measured,
    read_result,
    same_scale,
    same_shapes,
    worked,
)
from fedloom_apps.deploy.assignment import Assignment
from fedloom_apps.deploy.messages import (
    EVALUATE,
    HELD_OUT,
    LOSSES,
    WORK,
    Code,
    NodeRequest,
    Order,
    is_number,
    pack_broadcast,
    reason_in,
)
from fedloom_apps.deploy.transport import Delivered, Transport
from fedloom_apps.deploy.versions import FILE
from fedloom_apps.deploy.wire import LIMIT, Packet, WireError, unpack

POLL = 0.5  # least seconds between looks at who is online
SPARE = 9  # looks take at most a tenth of the time
HANDLE = "node"  # the place, in the server's store, of the version of a state that its node keeps


@dataclass
class Tally:
    """Statistics of one round's messages.

    Attributes:
        asked: number of orders sent.
        answered: number of answers in time.
        late: number of answers that came after their round, or for no known order.
        down: bytes sent, the broadcast once per node.
        up: bytes received.
        seconds: time from the first order to the last answer, over all exchanges of the round.
        work: the part of it in which the slowest node of each exchange worked.
        unmeasured: number of nodes that refused or failed to evaluate their models.
    """

    asked: int = 0
    answered: int = 0
    late: int = 0
    down: int = 0
    up: int = 0
    seconds: float = 0.0
    work: float = 0.0
    unmeasured: int = 0

    def record(self) -> dict[str, float]:
        """The numbers for the round's record."""
        return {
            "deploy/asked": self.asked,
            "deploy/answered": self.answered,
            "deploy/late": self.late,
            "deploy/down_bytes": self.down,
            "deploy/up_bytes": self.up,
            "deploy/work_seconds": round(self.work, 4),
            "deploy/transport_seconds": round(max(self.seconds - self.work, 0.0), 4),
            "deploy/unmeasured": self.unmeasured,
        }


@dataclass(frozen=True)
class ExchangeTerms:
    """Settings of the exchange of messages.

    Attributes:
        deadline: seconds to wait for answers.
        quorum: least number of members that must give a usable answer.
        limit: largest message in bytes.
        oldest: returns the completed rounds of the oldest checkpoint of the run.
    """

    deadline: float = 600.0
    quorum: int = 1
    limit: int = LIMIT
    oldest: Callable[[], int] = lambda: 0


@dataclass
class Deployed(Engine):
    """The engine that sends messages.

    Args:
        plan: the plan; its data are counts.
        compute: makes the compute, which determines how cohorts are cut into blocks.
        transport: reaches the nodes.
        names: the node of each client.
        assignment: the assignment of all nodes; only ``client`` differs.
        terms: deadline, quorum and limits.
        shapes: shapes of all uploads beside the update; None if unknown, so that the majority decides.
        tests: the number of test samples that each node declared, by its name.

    Attributes:
        versions: the version of each client's state that counted last.
        tally: statistics of the current round.
        unmeasured: the refusals and failures of the last evaluation; nodes that are absent are not among them.
    """

    plan: ClientPlan
    compute: ComputeFactory
    transport: Transport
    names: tuple[str, ...]
    assignment: Assignment
    terms: ExchangeTerms = field(default_factory=ExchangeTerms)
    shapes: Shapes | None = None
    tests: Mapping[str, int] = field(default_factory=dict)
    versions: dict[int, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    unmeasured: list[Failure] = field(default_factory=list)

    traits = Traits(devices=("cpu",), states="clients")

    def __post_init__(self) -> None:
        self.blocks = self.compute(self.plan).blocks
        self.numbers = {name: client for client, name in enumerate(self.names)}
        self.proposed: dict[int, str] = {}
        self.absent: dict[int, Failure] = {}
        self.ready: dict[int, Packet | Failure] = {}
        self.read: dict[int, Result] = {}  # answers that were read on arrival

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        """The folds of each group's blocks, in order, once all members have answered or the deadline is over."""
        for number, (down, clients, _, weights, level) in enumerate(groups):
            for one in self._folds(down, clients, weights, level):
                yield number, one

    def _folds(self, down: Broadcast, clients: np.ndarray, weights: np.ndarray | None, level: int) -> Generator[Fold]:
        answers = {client: self.ready.pop(client) for client in clients.tolist() if client in self.ready}
        if not answers:
            answers = self.exchange((WORK,), down, clients, level)
        results = [
            self.read.pop(client, None) or self._result(down, client, answers[client], level)
            for client in clients.tolist()
        ]
        results = same_scale(same_shapes(results, down.round), down)
        for block in self.blocks(len(clients)):
            members = slice(block.start, block.stop)
            yield fold(self.plan.levels[level], results[members], None if weights is None else weights[members])

    def losses(
        self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0, held_out: bool = False
    ) -> np.ndarray:
        """F_i(θ^t), NaN for members that did not answer.

        If the method needs these, nodes go on to their local work at once: it does not depend on the coefficients.
        """
        both = self.plan.method.needs("losses") and self.plan.method.needs("validation") == held_out
        asked = HELD_OUT if held_out else LOSSES
        answers = self.exchange((asked, WORK) if both else (asked,), down, clients, level)
        if both:
            self.ready |= answers
        losses, least = np.full(len(clients), np.nan), least_loss(self.plan)
        for row, client in enumerate(clients.tolist()):
            answer = answers[client]
            if (failure := self._failure(down, client, answer)) is not None:
                self.absent[client] = failure
                continue
            assert isinstance(answer, Packet)
            value = answer.facts.get("loss_received")
            if is_number(value, least - SLACK):
                losses[row] = max(value, least)
            elif not (isinstance(value, float) and not np.isfinite(value)):  # else it has diverged
                reason = f"{self.names[client]}: the loss in its answer is out of its range"
                self.absent[client] = Failure(down.round, client, FailureKind.REFUSED, reason)
        return losses

    def committed(self, round: int, accepted: np.ndarray) -> None:
        """Remember which states count, for the next order to each of these clients."""
        for client in accepted.tolist():
            if client in self.proposed:
                self.versions[client] = self.proposed[client]
        self.proposed.clear()
        self.absent.clear()
        self.ready.clear()
        self.read.clear()

    def evaluate(self, down: Broadcast, clients: np.ndarray) -> Mapping[str, np.ndarray]:
        """One row per client that answered in time; no node is waited for beyond the deadline."""
        answers = self.exchange((EVALUATE,), down, clients, 0, quorum=0)
        failures = [self._failure(down, client, answers[client]) for client in clients.tolist()]
        self.unmeasured = [
            failure for failure in failures if failure is not None and failure.kind is not FailureKind.ABSENT
        ]
        rows: dict[int, dict[str, float]] = {}
        for client, failure in zip(clients.tolist(), failures, strict=True):
            answer = answers[client]
            if failure is not None or isinstance(answer, Failure):
                continue
            row = measured(answer, self.plan, self.tests.get(self.names[client]))
            if isinstance(row, str):
                reason = f"{self.names[client]}: {row}"
                self.unmeasured.append(Failure(down.round, client, FailureKind.REFUSED, reason))
            elif row is not None:
                rows[client] = row
        self.tally.unmeasured += len(self.unmeasured)
        usual = Counter(frozenset(row) for row in rows.values()).most_common(1)
        kept = {client: row for client, row in rows.items() if row.keys() == usual[0][0]}
        columns = {
            name: np.array([row[name] for row in kept.values()], np.int64 if name == "n" else np.float64)
            for name in next(iter(kept.values()), ("n",))
        }
        return {"client": np.array([*kept], np.int64), **columns}

    def close(self) -> None:
        """Do nothing; the transport is closed by its owner."""

    def exchange(
        self, do: tuple[str, ...], down: Broadcast, clients: np.ndarray, level: int, quorum: int | None = None
    ) -> dict[int, Packet | Failure]:
        """Send an order to each client and return its answer, or the reason why there is none.

        A member that restarts while the order is pending gets it again, with the same ticket.
        """
        started, quorum = time.monotonic(), min(self.terms.quorum if quorum is None else quorum, len(clients))
        end = started + self.terms.deadline
        broadcast = pack_broadcast(down)
        waiting: dict[str, int] = {}
        requests: dict[int, NodeRequest] = {}
        for client in clients.tolist():
            self.read.pop(client, None)
            ticket = secrets.token_hex(16)
            facts = replace(self.assignment, client=client).facts
            order = Order(ticket, do, facts, level, self.versions.get(client), self.terms.oldest())
            requests[client], waiting[ticket] = NodeRequest(order.packed(), broadcast), client
        results: dict[int, Packet | Failure] = {}
        lacking: dict[int, Failure] = {}  # of those without a usable answer
        sessions: dict[int, str] = {}  # in which each client got its order
        look = started
        while waiting:
            now = time.monotonic()
            if now >= look:
                self._send(requests, set(waiting.values()), sessions)
                look = time.monotonic() + max(POLL, SPARE * (time.monotonic() - now))
            reached = sum(client in sessions for client in waiting.values()) + len(results) - len(lacking)
            if now > end or (reached >= quorum and not any(client in sessions for client in waiting.values())):
                break  # those left are offline, and enough have answered
            for delivered in self.transport.receive(min(POLL, max(end - now, 0.01))):
                self.tally.up += len(delivered.blob)
                client = self._take(delivered, waiting, results, down.round)
                if client is not None and (failure := self._unusable(do, down, client, results[client], level)):
                    lacking[client] = failure
        self.tally.seconds += time.monotonic() - started
        self.tally.work += max((worked(answer, time.monotonic() - started) for answer in results.values()), default=0.0)
        self.tally.answered += len(results)
        for client in waiting.values():
            seconds = f"{self.terms.deadline:g} s"
            reason = f"it did not answer within {seconds}" if client in sessions else "it is offline"
            absent = Failure(down.round, client, FailureKind.ABSENT, f"{self.names[client]}: {reason}")
            results[client] = lacking[client] = absent
        usable = len(results) - len(lacking)
        if usable < quorum:
            reasons = "; ".join(map(str, lacking.values()))
            raise ClientError(
                f"round {down.round + 1}: {usable} of {len(clients)} nodes gave a usable answer in time, fewer than "
                f"deploy.quorum={quorum} ({reasons[:500]}); check that nodes are running, and continue with resume=…"
            )
        return results

    def _send(self, requests: Mapping[int, NodeRequest], to: set[int], sessions: dict[int, str]) -> None:
        """Send orders to nodes that came online or have a new session; nodes that are gone are not waited for."""
        online = self.transport.online()
        fresh: dict[str, NodeRequest] = {}
        for client in to:
            name = self.names[client]
            session = online.get(name)
            if session is None:
                sessions.pop(client, None)
            elif sessions.get(client) != session:
                sessions[client], fresh[name] = session, requests[client]
        if fresh:
            self.tally.asked += len(fresh)
            self.tally.down += sum(request.nbytes for request in fresh.values())
            self.transport.send(fresh)

    def _take(
        self, delivered: Delivered, waiting: dict[str, int], results: dict[int, Packet | Failure], round: int
    ) -> int | None:
        """Match an answer with its order and return the client; None if it is late, or answers another server."""
        client = self.numbers.get(delivered.node)
        try:
            answer = unpack(delivered.blob, self.terms.limit)
        except WireError as error:
            reason = f"{delivered.node}: its answer cannot be read: {printable(str(error)).rstrip('.')}"
            answer = Failure(round, -1 if client is None else client, FailureKind.REFUSED, reason)
            ticket = next((ticket for ticket, other in waiting.items() if other == client), "")
        else:
            ticket = str(answer.facts.get("ticket"))
            if not ticket:  # its node could not read the order
                ticket = next((ticket for ticket, other in waiting.items() if other == client), "")
        if client is None or waiting.get(ticket) != client:
            self.tally.late += 1
            return None
        del waiting[ticket]
        results[client] = answer
        return client

    def _unusable(
        self, do: tuple[str, ...], down: Broadcast, client: int, answer: Packet | Failure, level: int
    ) -> Failure | None:
        """The reason why an answer does not count towards the quorum; None if it does.

        Work that diverged counts: repeating the same order would diverge again.
        """
        if WORK in do:
            self.read[client] = self._result(down, client, answer, level)
            failure = self.read[client].failure
        else:
            failure = self._failure(down, client, answer)
        return None if failure is not None and failure.kind is FailureKind.DIVERGED else failure

    def _failure(self, down: Broadcast, client: int, answer: Packet | Failure) -> Failure | None:
        """The failure of a client whose answer holds no result."""
        if isinstance(answer, Failure):
            return answer
        facts, status = answer.facts, answer.facts.get("status")
        if status == "done":
            return None
        kind = FailureKind.CODE if facts.get("code") == Code.FAILED else FailureKind.REFUSED
        if status == "left out" and facts.get("kind") in list(FailureKind):
            kind = FailureKind(facts["kind"])
        return Failure(down.round, client, kind, f"{self.names[client]}: {reason_in(facts)}")

    def _result(self, down: Broadcast, client: int, answer: Packet | Failure, level: int) -> Result:
        """A client's result as the serial engine would return it, with the version in place of its state."""
        if (failure := self._failure(down, client, answer)) is not None:
            return Result(client, failure=failure)
        assert isinstance(answer, Packet)
        try:
            result = read_result(client, answer, down, self.plan.levels[level], self.shapes)
        except Exception as error:  # whatever a node sends, only its own work is lost
            message = error if isinstance(error, WireError) else f"its answer cannot be used ({type(error).__name__})"
            reason = f"{self.names[client]}: {message}"
            return Result(client, failure=Failure(down.round, client, FailureKind.REFUSED, reason))
        version = answer.facts.get("version")
        if isinstance(version, str) and FILE.fullmatch(f"{version}.counted"):
            self.proposed[client] = version
            result.state = handle(version)
        return result


def handle(version: str) -> State:
    """The server's record of a client's state: its version alone."""
    return {HANDLE: {"version": torch.tensor(list(version.encode()), dtype=torch.uint8)}}


def version_in(state: State) -> str:
    """The version in the server's record of a client's state.

    >>> version_in(handle("000000003-00ff"))
    '000000003-00ff'
    """
    return bytes(state[HANDLE]["version"].tolist()).decode()
