"""The round: broadcast, local work, mixing as updates arrive, server step.

Knows neither methods nor engines: it adds up what comes back as the parts' declarations say.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from fedloom.core import rng, tree
from fedloom.core.aggregate import Fold, Traffic
from fedloom.core.client import Broadcast, Failure, Result, State
from fedloom.core.errors import ClientError
from fedloom.core.parts import Cohort
from fedloom.core.plan import Plan
from fedloom.core.server_data import ServerData
from fedloom.core.tree import Tree


@dataclass(frozen=True)
class Server:
    """What the server knows after a number of rounds: θ, buffers, and each part's state."""

    shared: Tree
    buffers: Tensor
    parts: State
    round: int = 0

    @classmethod
    def initial(cls, plan: Plan, theta: Tensor, buffers: Tensor) -> Server:
        """The state before the first round, from a freshly initialised model."""
        shared = {"shared": theta[: plan.layout.shared_size].clone()}
        states = {place: part.init_server(shared) for place, part in plan.method.hooks["init_server"]}
        for place, part in plan.method.hooks["found"]:
            states[place] = states.get(place, {}) | part.found(plan.facts)
        return cls(shared, buffers[: plan.layout.shared_buffers].clone(), states)

    def broadcast(self, plan: Plan) -> Broadcast:
        """What the cohort of the coming round receives."""
        slices = {p: part.broadcast(self.parts.get(p, {})) for p, part in plan.method.hooks["broadcast"]}
        return Broadcast(self.round, plan.local.rate(self.round), self.shared, self.buffers, slices)


class Store(Protocol):
    """Where client states live between rounds; a client without one has not taken part yet."""

    def get(self, client: int) -> State | None:
        """The client's state, or None."""
        ...


class Engine(Protocol):
    """Interprets client work. Folds come in the order of ``clients``, so that sums have one order on all engines."""

    def run(
        self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State], weights: np.ndarray | None
    ) -> Generator[Fold]:
        """Local work of the given clients, one fold for each of their ``blocks``; ``weights`` as far as known."""
        ...

    def losses(self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State]) -> np.ndarray:
        """Their training losses of the received model, with what of it is their own, float64 [clients]."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


@dataclass
class Report:
    """What happened in a round."""

    cohort: np.ndarray
    p: np.ndarray  # mixing coefficients really used, 0 for clients left out
    train_loss: float
    traffic: Traffic
    losses: np.ndarray | None = None  # F_i(θ^t) before local work, where a part asked for it
    failures: list[Failure] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)  # new client states, to be stored when the round is over


def federated_round(
    plan: Plan,
    engine: Engine,
    server: Server,
    store: Store,
    cohort: np.ndarray,
    *,
    drop_rate: float = 0.0,
    bench: ServerData | None = None,
    observe: Callable[[Result], None] = lambda result: None,
) -> tuple[Server, Report]:
    """One round over the given cohort.

    Args:
        plan: the fixed part of client work.
        engine: what interprets it.
        server: the state before the round.
        store: client states; read only, so that a round broken off midway leaves no trace.
        cohort: S_t, sorted client numbers.
        drop_rate: probability that a member drops out after receiving the model (injected, for tests and studies).
        bench: the server's unlabelled inputs, for parts that learn from them.
        observe: called with what remains of every successful result, in order.

    Returns:
        The server's new state, and the round's report with the clients' new states. If nobody's update can be used
        the model stays as it is.

    Raises:
        ClientError: if every client failed with an error, which is a fault in the code and not in the clients.
    """
    method, down = plan.method, server.broadcast(plan)
    report = Report(cohort, np.zeros(len(cohort)), float("nan"), Traffic())
    if plan.ladder:
        _, first, members = np.unique(plan.level[cohort], return_index=True, return_counts=True)
        for client, receivers in zip(cohort[first], members, strict=True):
            report.traffic.down((plan.received(client, down.shared),), int(receivers))
    else:
        report.traffic.down((down.shared, {"": down.buffers}, *down.parts.values()), len(cohort))

    def leave_out(out: np.ndarray, reason: str) -> None:
        report.failures += [Failure(server.round, int(c), reason) for c in cohort[out]]

    present = np.ones(len(cohort), dtype=bool)
    if drop_rate:
        present = np.array([rng.stream(plan.seed, "drop", server.round, c).random() >= drop_rate for c in cohort])
        leave_out(~present, "dropped out")
    losses = None
    if method.needs("losses") and present.any():
        losses = np.full(len(cohort), np.nan)
        losses[present] = engine.losses(down, cohort[present], InitialStates(plan, server, store))
        diverged = present & ~np.isfinite(losses)
        leave_out(diverged, "its loss of the received model is not finite")
        present &= ~diverged
    members = cohort[present]

    samples = plan.data.index.offsets[members + 1] - plan.data.index.offsets[members]
    signals = Cohort(
        members, samples, len(plan.data), losses if losses is None else losses[present],
        received=server.shared, round=server.round, bench=bench,
    )  # fmt: skip
    report.losses = losses
    states = dict(server.parts)
    weights = None
    if len(members) and not method.mixing.needs.updates:
        states["mixing"], weights = method.mixing.coefficients(states.get("mixing", {}), signals)

    total = Fold(sent=report.traffic)
    local_losses: list[float] = []
    with closing(engine.run(down, members, InitialStates(plan, server, store), weights)) as folds:
        for fold in folds:
            total.merge(fold)
            for result in fold.results:
                if result.failure is not None:
                    report.failures.append(result.failure)
                    continue
                report.states[result.client] = result.state
                local_losses.append(result.loss)
                observe(result)

    arrived = np.flatnonzero(total.arrived)
    if not len(arrived):
        _refuse_if_broken(report, len(members))
        return replace(server, parts=states, round=server.round + 1), report
    signals = signals.of(arrived, total.kept.get("update", []))
    if weights is None:
        states["mixing"], p = method.mixing.coefficients(states.get("mixing", {}), signals)
    else:
        with np.errstate(invalid="ignore"):  # the weights of those that arrived, renormalised; NaN if they are all 0
            p = weights[arrived] / weights[arrived].sum()
    if not np.isfinite(p).all():  # all weight was on clients that failed: nobody's work counts
        report.states.clear()
        return replace(server, parts=states, round=server.round + 1), report
    update, buffers, reduced = total.mix(plan, weights, p, signals.clients)
    for place, part in method.hooks["server"]:
        states[place], update = part.server(states.get(place, {}), update, reduced[place])
    report.p[np.flatnonzero(present)[arrived]] = p
    report.train_loss = float(np.mean(local_losses))
    shared = tree.sub(server.shared, update)
    for place, part in method.hooks["refine"]:
        states[place], shared = part.refine(states.get(place, {}), shared, buffers, signals)
    moved = Server(shared, buffers, states, server.round + 1)
    if not tree.finite(moved.shared):
        raise ClientError(
            f"round {server.round}: the server model is no longer finite; lower the learning rate or clip gradients."
        )
    return moved, report


@dataclass(frozen=True)
class InitialStates:
    """Client states for the coming round, created for clients that take part for the first time."""

    plan: Plan
    server: Server
    store: Store

    def __call__(self, client: int) -> State:
        """The client's state."""
        state = self.store.get(client)
        if state is None:
            hooks = self.plan.method.hooks["init_client"]
            shared = self.plan.received(client, self.server.shared) if hooks else {}
            state = {place: part.init_client(shared) for place, part in hooks}
        return state


def _refuse_if_broken(report: Report, members: int) -> None:
    errors = [f for f in report.failures if f.reason.startswith(("failed in", "its worker process died"))]
    if members and len(errors) == members:
        raise ClientError(f"every client of the round failed; the first was {errors[0]}.")
