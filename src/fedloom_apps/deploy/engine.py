"""The engine of a deployment: clients are nodes, which hold their own data and states, and work is messages.

An order goes to a client that begins its work, once its node is online, and the broadcast of a version once for all.
Answers are checked when they come, and folded when a step takes them, in the order of its members and in the blocks of
the compute, so that the model has the bits of the serial engine. Who does not answer in time is absent; late answers
are dropped and counted. When a step is due, and with whose work, is said by ``arrivals``.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from fedloom.base.errors import ClientError
from fedloom.rounds.aggregate import Fold, fold
from fedloom.rounds.engine import ComputeFactory, Engine, Group, States, Traits
from fedloom.rounds.exchange import Broadcast, Failure, FailureKind, Result, State
from fedloom.rounds.plan import ClientPlan
from fedloom_apps.deploy.answers import (
    Norms,
    is_loss,
    least_loss,
    read_metrics,
    read_result,
    same_scale,
    same_shapes,
    work_seconds,
)
from fedloom_apps.deploy.assignment import Assignment, Forms
from fedloom_apps.deploy.messages import (
    EVALUATE,
    LOSSES,
    VALIDATION_LOSSES,
    WORK,
    Code,
    Delivered,
    NodeRequest,
    Order,
    Transport,
    pack_broadcast,
    reason_in,
)
from fedloom_apps.deploy.settings import Deployment
from fedloom_apps.deploy.wire import Packet, WireError, unpack

POLL = 0.5  # least seconds between looks at who is online
SPARE = 9  # looks take at most a tenth of the time
NODE_KINDS = (FailureKind.CODE, FailureKind.DIVERGED, FailureKind.MALFORMED, FailureKind.REFUSED)
"""What a node may say of its own work; who is absent is the server's to say."""
HANDLE = "node"  # the place, in the server's store, of the version of a state that its node keeps


@dataclass
class Tally:
    """Statistics of one round's messages.

    Attributes:
        asked: number of orders sent.
        answered: number of answers in time.
        late: number of answers that came after their round, or for no known order.
        down_bytes: bytes sent, the broadcast once per node.
        up_bytes: bytes received.
        unmeasured: number of nodes that refused or failed to evaluate their models.
        seconds: time from the first order to the last answer, over all exchanges of the round.
        work: the part of it in which the slowest node of each exchange worked.
    """

    asked: int = 0
    answered: int = 0
    late: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    unmeasured: int = 0
    seconds: float = 0.0
    work: float = 0.0

    def record(self) -> dict[str, float]:
        """The numbers for the round's record."""
        counts = {f"deploy/{name}": count for name, count in vars(self).items() if name not in ("seconds", "work")}
        return counts | {
            "deploy/work_seconds": round(self.work, 4),
            "deploy/transport_seconds": round(max(self.seconds - self.work, 0.0), 4),
        }


@dataclass
class PendingOrder:
    """An order whose answer is awaited."""

    client: int
    do: tuple[str, ...]
    down: Broadcast
    level: int
    request: NodeRequest
    since: float
    session: str | None = None  # in which its node got it; None while the node is offline


@dataclass
class Answer:
    """An answer, or the reason why there is none."""

    down: Broadcast
    packet: Packet | Failure
    time: float
    failure: Failure | None = None
    result: Result | None = None


class Work(NamedTuple):
    """The work of a client that no step has taken yet: its order, the version it is on, and when it began."""

    ticket: str
    version: int
    begin: float


@dataclass
class Deployed(Engine):
    """The engine that sends messages.

    Attributes:
        terms: how long answers are waited for, how many must come, and how large they may be.
        oldest: returns the oldest version whose work may not have counted at the oldest checkpoint of the run.
        versions: the version of each client's state that counted last.
        tally: statistics of the current round.
        unmeasured: the refusals and failures of the last evaluation; nodes that are absent are not among them.
        work: the clients at work, and those whose work has arrived and waits for its step.
        online: the session of each node that can be reached.
    """

    plan: ClientPlan
    compute: ComputeFactory
    transport: Transport
    names: tuple[str, ...]
    assignment: Assignment
    terms: Deployment = field(default_factory=Deployment)
    oldest: Callable[[], int] = lambda: 0
    forms: Forms | None = None
    tests: Mapping[str, int] = field(default_factory=dict)
    versions: dict[int, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    unmeasured: list[Failure] = field(default_factory=list)
    work: dict[int, Work] = field(default_factory=dict)
    online: Mapping[str, str] = field(default_factory=dict)

    traits = Traits(devices=("cpu",), states="clients")

    def __post_init__(self) -> None:
        self.blocks = [self.compute(level).blocks for level in self.plan.levels]
        self.numbers = {name: client for client, name in enumerate(self.names)}
        self.proposed: dict[int, str] = {}
        self.orders: dict[str, PendingOrder] = {}
        self.answers: dict[str, Answer] = {}
        self.norms: Norms = {}
        self._next_look = -inf  # when to look who is online
        losses = VALIDATION_LOSSES if self.plan.method.needs("validation") else LOSSES
        self.usual = (losses, WORK) if self.plan.method.needs("losses") else (WORK,)

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        """The folds of each group's blocks, in order, of work that has arrived."""
        for number, (down, clients, _, weights, level) in enumerate(groups):
            results = [self._take_result(down, client) for client in clients.tolist()]
            for block in self.blocks[level](len(clients)):
                members = slice(block.start, block.stop)
                block_weights = None if weights is None else weights[members]
                yield number, fold(self.plan.levels[level], results[members], block_weights)

    def _take_result(self, down: Broadcast, client: int) -> Result:
        """The work of a client, with the version in place of its state."""
        work = self.work.pop(client)
        result = self.answers.pop(work.ticket).result
        assert result is not None
        assert work.version == down.round
        if result.state:
            self.proposed[client] = version_in(result.state)
        return result

    def losses(
        self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0, on_validation: bool = False
    ) -> np.ndarray:
        """F_i(θ^t), NaN for members that did not answer.

        If the method needs these, they have come with the work, which does not depend on the coefficients.
        """
        kind = VALIDATION_LOSSES if on_validation else LOSSES
        if kind in self.usual:
            answers = {client: self.answer(client) for client in clients.tolist()}
        else:
            answers = self.exchange((kind,), down, clients, level)
        losses, least = np.full(len(clients), np.nan), least_loss(self.plan)
        for row, client in enumerate(clients.tolist()):
            answer = answers[client]
            if answer is None or answer.failure is not None or isinstance(answer.packet, Failure):
                continue
            if is_loss(value := answer.packet.facts.get("loss_received"), self.plan):
                losses[row] = max(value, least)
        return losses

    def committed(self, round: int, accepted: np.ndarray) -> None:
        """Remember which states count, for the next order to each of these clients."""
        for client in accepted.tolist():
            if client in self.proposed:
                self.versions[client] = self.proposed[client]
        self.proposed.clear()

    def evaluate(self, down: Broadcast, clients: np.ndarray) -> Mapping[str, np.ndarray]:
        """One row per client that answered in time; no node is waited for beyond the deadline."""
        answers = self.exchange((EVALUATE,), down, clients, 0, quorum=0)
        failures = [answers[client].failure for client in clients.tolist()]
        self.unmeasured = [
            failure for failure in failures if failure is not None and failure.kind is not FailureKind.ABSENT
        ]
        rows: dict[int, dict[str, float]] = {}
        for client, failure in zip(clients.tolist(), failures, strict=True):
            answer = answers[client].packet
            if failure is not None or isinstance(answer, Failure):
                continue
            row = read_metrics(answer, self.plan, self.tests.get(self.names[client]))
            if isinstance(row, str):
                reason = f"{self.names[client]}: {row}"
                self.unmeasured.append(Failure(down.round, client, FailureKind.REFUSED, reason))
            elif row is not None:
                rows[client] = row
        usual = Counter(frozenset(row) for row in rows.values()).most_common(1)
        for client in [client for client, row in rows.items() if row.keys() != usual[0][0]]:
            reason = f"{self.names[client]}: its answer holds other metrics than those of most nodes"
            self.unmeasured.append(Failure(down.round, client, FailureKind.REFUSED, reason))
            del rows[client]
        self.tally.unmeasured += len(self.unmeasured)
        columns = {
            name: np.array([row[name] for row in rows.values()], np.int64 if name == "n" else np.float64)
            for name in next(iter(rows.values()), ("n",))
        }
        return {"client": np.array([*rows], np.int64), **columns}

    def close(self) -> None:
        """Do nothing; the transport is closed by its owner."""

    def begin(
        self, down: Broadcast, clients: np.ndarray, clock: float, tickets: Mapping[int, str] | None = None
    ) -> None:
        """Order work from clients."""
        for client in clients.tolist():
            self.drop(client)
        for level in np.unique(self.plan.level[clients]).tolist():
            level_clients, level_broadcast = (
                clients[self.plan.level[clients] == level],
                down.at(self.plan.levels[level]),
            )
            for client, ticket in self._order(self.usual, level_broadcast, level_clients, level, tickets or {}).items():
                self.work[client] = Work(ticket, down.round, clock)

    def drop(self, client: int) -> None:
        """Wait no longer for a client's work, and forget it; what still comes is late."""
        if (work := self.work.pop(client, None)) is not None:
            self.orders.pop(work.ticket, None)
            self.answers.pop(work.ticket, None)

    def answer(self, client: int) -> Answer | None:
        """The answer to the last order for a client's work, if it has come."""
        work = self.work.get(client)
        return None if work is None else self.answers.get(work.ticket)

    def exchange(
        self, do: tuple[str, ...], down: Broadcast, clients: np.ndarray, level: int, quorum: int | None = None
    ) -> dict[int, Answer]:
        """Send an order to each client and return its answer, or the reason why there is none."""
        tickets = self._order(do, down, clients, level)
        self.gather([*tickets.values()], down.round, quorum)
        return {client: self.answers.pop(ticket) for client, ticket in tickets.items()}

    def gather(
        self, tickets: Sequence[str], round: int, quorum: int | None = None, enough: int | None = None,
        until: float = inf,
    ) -> None:  # fmt: skip
        """Wait for the answers to orders: all of them, or the first ``enough`` that are of use, or until a time.

        Nodes that are offline are not waited for once the others have answered.
        """
        started = time.monotonic()
        quorum = min(self.terms.quorum if quorum is None else quorum, len(tickets))
        while waiting := [self.orders[ticket] for ticket in tickets if ticket in self.orders]:
            self.send_orders()
            usable = self._count_usable(tickets)
            if time.monotonic() >= until or (enough is not None and usable >= enough):
                break
            reachable = [order for order in waiting if order.session is not None]
            if not reachable and usable >= quorum:
                for ticket in tickets:
                    self._give_up(ticket)
                break
            self.receive(until - time.monotonic())
        self.tally.seconds += time.monotonic() - started
        answers = [self.answers[ticket] for ticket in tickets if ticket in self.answers]
        seconds = time.monotonic() - started
        self.tally.work += max((work_seconds(answer.packet, seconds) for answer in answers), default=0.0)
        if (usable := self._count_usable(tickets)) < quorum:
            reasons = "; ".join(str(answer.failure) for answer in answers if answer.failure is not None)
            raise ClientError(
                f"round {round + 1}: {usable} of {len(tickets)} nodes gave a usable answer in time, fewer than "
                f"deploy.quorum={quorum} ({reasons[:500]}); check that nodes are running, and continue with resume=…"
            )

    def _count_usable(self, tickets: Sequence[str]) -> int:
        return sum(ticket in self.answers and self.answers[ticket].failure is None for ticket in tickets)

    def compare(self, clients: np.ndarray, norms: Norms) -> None:
        """Refuse arrived work whose uploads have other shapes than most, or norms beyond all others."""
        answers = [answer for client in clients.tolist() if (answer := self.answer(client)) is not None]
        for refuse in (same_shapes, partial(same_scale, earlier_norms=norms)):
            usable = [answer for answer in answers if answer.result is not None and answer.result.failure is None]
            results = [answer.result for answer in usable if answer.result is not None]
            for answer, result in zip(usable, refuse(results, [answer.down for answer in usable]), strict=True):
                answer.result, answer.failure = result, result.failure

    def reachable(self) -> set[int]:
        """The clients whose nodes can be reached."""
        self.send_orders()
        return {client for name, client in self.numbers.items() if name in self.online}

    def send_orders(self) -> None:
        """Send orders to nodes that came online or have a new session; looks take a tenth of the time."""
        if (now := time.monotonic()) < self._next_look:
            return
        self.online = self.transport.online()
        batches: list[dict[str, NodeRequest]] = []  # a node may have several orders
        for order in self.orders.values():
            name = self.names[order.client]
            session = self.online.get(name)
            if session is not None and order.session != session:
                batch = next((batch for batch in batches if name not in batch), None)
                if batch is None:
                    batches.append(batch := {})
                batch[name] = order.request
            order.session = session
        for batch in batches:
            self.tally.asked += len(batch)
            self.tally.down_bytes += sum(request.nbytes for request in batch.values())
            self.transport.send(batch)
        self._next_look = time.monotonic() + max(POLL, SPARE * (time.monotonic() - now))

    def receive(self, seconds: float) -> None:
        """Take answers, and wait for one, but not much longer than so many seconds; orders may end without one."""
        ends = min((order.since for order in self.orders.values()), default=inf) + self.terms.deadline
        seconds = min(POLL, seconds, ends - time.monotonic())
        for delivered in self.transport.receive(max(seconds, 0.0)):
            self.tally.up_bytes += len(delivered.blob)
            self._match(delivered)
        now = time.monotonic()
        for ticket in [ticket for ticket, order in self.orders.items() if now >= order.since + self.terms.deadline]:
            self._give_up(ticket)

    def _order(
        self, do: tuple[str, ...], down: Broadcast, clients: np.ndarray, level: int,
        tickets: Mapping[int, str] = MappingProxyType({}),
    ) -> dict[int, str]:  # fmt: skip
        """Give an order to each client; returns their tickets."""
        broadcast, now, tickets_by_client = pack_broadcast(down), time.monotonic(), {}
        for client in clients.tolist():
            tickets_by_client[client] = ticket = tickets.get(client) or secrets.token_hex(16)
            facts = replace(self.assignment, client=client).facts
            order = Order(ticket, do, facts, level, self.versions.get(client), self.oldest())
            self.orders[ticket] = PendingOrder(client, do, down, level, NodeRequest(order.packed(), broadcast), now)
        self._next_look = -inf
        return tickets_by_client

    def _give_up(self, ticket: str) -> None:
        """End an order that has no answer yet."""
        if (order := self.orders.pop(ticket, None)) is None:
            return
        reason = "it is offline" if order.session is None else f"it did not answer within {self.terms.deadline:g} s"
        failure = Failure(order.down.round, order.client, FailureKind.ABSENT, f"{self.names[order.client]}: {reason}")
        result = Result(order.client, failure=failure)
        self.answers[ticket] = Answer(order.down, failure, time.monotonic(), failure, result)

    def _match(self, delivered: Delivered) -> None:
        """Match an answer with its order; what is late, comes twice or answers another server is counted alone."""
        client = self.numbers.get(delivered.node)
        try:
            packet: Packet | Failure = unpack(delivered.blob, self.terms.limit)
            ticket = str(packet.facts.get("ticket"))
        except WireError as error:
            reason = f"{delivered.node}: its answer cannot be read: {str(error).rstrip('.')}"
            packet, ticket = Failure(0, -1 if client is None else client, FailureKind.REFUSED, reason), ""
        if not ticket:  # or its node could not read the order
            ticket = next((ticket for ticket, order in self.orders.items() if order.client == client), "")
        order = self.orders.get(ticket)
        if order is None or order.client != client:
            self.tally.late += 1
            return
        if isinstance(packet, Failure):
            packet = replace(packet, round=order.down.round)
        del self.orders[ticket]
        self.tally.answered += 1
        result = self._result(order, ticket, packet) if WORK in order.do else None
        failure = self._failure(order, packet) if result is None else result.failure
        if failure is not None and failure.kind is FailureKind.DIVERGED:
            failure = None  # repeating the same order would diverge again
        self.answers[ticket] = Answer(order.down, packet, time.monotonic(), failure, result)

    def _failure(self, order: PendingOrder, packet: Packet | Failure) -> Failure | None:
        """The failure of a client whose answer holds no result."""
        if isinstance(packet, Failure):
            return packet
        facts, status = packet.facts, packet.facts.get("status")
        kind = FailureKind.CODE if facts.get("code") == Code.FAILED else FailureKind.REFUSED
        reason = reason_in(facts)
        if status == "left out" and facts.get("kind") in NODE_KINDS:
            kind = FailureKind(facts["kind"])
        if {LOSSES, VALIDATION_LOSSES} & {*order.do} and (status == "done" or kind is FailureKind.DIVERGED):
            loss = facts.get("loss_received")
            diverged = isinstance(loss, float) and not np.isfinite(loss)
            if not diverged and not is_loss(loss, self.plan):
                status, kind, reason = "", FailureKind.REFUSED, "the loss in its answer is out of its range"
        if status == "done":
            return None
        return Failure(order.down.round, order.client, kind, f"{self.names[order.client]}: {reason}")

    def _result(self, order: PendingOrder, ticket: str, packet: Packet | Failure) -> Result:
        """A client's result as the serial engine would return it, with the version in place of its state."""
        client, down = order.client, order.down
        if (failure := self._failure(order, packet)) is not None:
            return Result(client, failure=failure)
        assert isinstance(packet, Packet)
        try:
            result = read_result(client, packet, down, self.plan.levels[order.level], self.forms)
            version = packet.facts.get("version")
            if version not in (None, f"{down.round:09d}-{ticket}"):
                raise WireError("the state in its answer is not that of the order")
        except Exception as error:  # whatever a node sends, only its own work is lost
            message = error if isinstance(error, WireError) else f"its answer cannot be used ({type(error).__name__})"
            reason = f"{self.names[client]}: {message}"
            return Result(client, failure=Failure(down.round, client, FailureKind.REFUSED, reason))
        if isinstance(version, str):
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
