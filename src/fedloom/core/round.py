"""The round: broadcast, local work, mixing as updates arrive, server step.

Knows neither methods nor engines: it folds what comes back as the parts' declarations say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng, tree
from fedloom.core.bench import Bench
from fedloom.core.client import Broadcast, Failure, Plan, Result, State
from fedloom.core.errors import ClientError
from fedloom.core.parts import Cohort, Reduce
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
    """Interprets client work. Results come in the order of ``clients``, so that sums have one order on all engines."""

    def run(self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State]) -> Iterator[Result]:
        """Local work of the given clients."""
        ...

    def losses(self, down: Broadcast, clients: np.ndarray) -> np.ndarray:
        """Their training losses of the received model, float64 [clients]."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


@dataclass
class Traffic:
    """Parameters and bytes sent in one round, counted from the trees that were sent."""

    down_params: int = 0
    up_params: int = 0
    bytes: int = 0

    def down(self, trees: Iterable[Mapping[str, Tensor]], receivers: int) -> None:
        """Count one broadcast to a number of clients."""
        for t in trees:
            self.down_params += receivers * tree.count(t)
            self.bytes += receivers * tree.nbytes(t)

    def up(self, trees: Iterable[Mapping[str, Tensor]]) -> None:
        """Count one client's upload."""
        for t in trees:
            self.up_params += tree.count(t)
            self.bytes += tree.nbytes(t)


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


class Fold:
    """Reduces uploads as they arrive; holds one accumulator a slice, and single uploads only where a part needs all."""

    def __init__(self, plan: Plan, weights: np.ndarray | None) -> None:
        self.plan, self.weights = plan, weights
        self.sums: dict[str, Tree] = {}
        self.kept: dict[str, list[Tree]] = {}
        self.arrived: list[int] = []

    def add(self, position: int, result: Result) -> None:
        """Fold in the result of the cohort's member at ``position``."""
        self.arrived.append(position)
        weight = None if self.weights is None else float(self.weights[position])
        self._fold("update", {**result.update, "buffers": result.buffers}, weight)
        if self.plan.method.needs("update_share"):
            self._fold("update/share", result.update, 1.0)
        for place, upload in result.uploads.items():
            for name, how in self.plan.method.parts[place].uploads.items():
                factor = {Reduce.ALL: None, Reduce.MIX: weight}.get(how, 1.0)
                self._fold(f"{place}/{name}", {"": upload[name]}, factor)

    def _fold(self, slot: str, value: Tree, weight: float | None) -> None:
        if weight is None or (slot == "update" and self.plan.method.needs("updates")):
            self.kept.setdefault(slot, []).append(tree.clone(value))
        if weight is None:
            return
        if slot in self.sums:
            tree.add_(self.sums[slot], value, weight)
        else:
            self.sums[slot] = tree.scale(value, weight)

    def coefficients(self) -> np.ndarray:
        """P over those that arrived: the weights chosen before local work, renormalised (NaN if they are all 0)."""
        assert self.weights is not None
        weights = self.weights[self.arrived]
        with np.errstate(invalid="ignore"):
            return weights / weights.sum()

    def mix(self, p: np.ndarray) -> tuple[Tree, Tensor, dict[str, dict[str, Tree]]]:
        """The mixed update Δ, the mixed buffers, and every part's reduced uploads, with p over those that arrived."""
        total = 1.0 if self.weights is None else float(self.weights[self.arrived].sum())
        divisor = {Reduce.MIX: total, Reduce.MEAN: len(self.arrived), Reduce.SHARE: len(self.plan.data)}

        def reduce(slot: str, how: Reduce) -> Tree:
            if slot in self.sums:
                return tree.scale(self.sums[slot], 1 / divisor[how])
            if how is Reduce.ALL:
                return {"": torch.stack([t[""] for t in self.kept[slot]])}
            mixed = tree.scale(self.kept[slot][0], float(p[0]))
            for weight, t in zip(p[1:], self.kept[slot][1:], strict=True):
                tree.add_(mixed, t, float(weight))
            return mixed

        reduced: dict[str, dict[str, Tree]] = {}
        for place, part in self.plan.method.parts.items():
            reduced[place] = {name: reduce(f"{place}/{name}", how) for name, how in part.uploads.items()}
            if part.needs.update_share:
                reduced[place]["update/share"] = reduce("update/share", Reduce.SHARE)
        update = reduce("update", Reduce.MIX)
        return update, update.pop("buffers"), reduced


def federated_round(
    plan: Plan,
    engine: Engine,
    server: Server,
    store: Store,
    cohort: np.ndarray,
    *,
    drop_rate: float = 0.0,
    bench: Bench | None = None,
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
        observe: called with every successful result, in order.

    Returns:
        The server's new state, and the round's report with the clients' new states. If nobody's update can be used
        the model stays as it is.

    Raises:
        ClientError: if every client failed with an error, which is a fault in the code and not in the clients.
    """
    method, down = plan.method, server.broadcast(plan)
    report = Report(cohort, np.zeros(len(cohort)), float("nan"), Traffic())
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
        losses[present] = engine.losses(down, cohort[present])
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
    waits = method.mixing.needs.updates
    weights = None
    if len(members) and not waits:
        states["mixing"], weights = method.mixing.coefficients(states.get("mixing", {}), signals)

    initial = InitialStates(plan, server, store)
    fold = Fold(plan, weights)
    local_losses: list[float] = []
    for position, result in enumerate(engine.run(down, members, initial)):
        if result.failure is not None:
            report.failures.append(result.failure)
            continue
        report.traffic.up(({**result.update, "buffers": result.buffers}, *result.uploads.values()))
        fold.add(position, result)
        report.states[result.client] = result.state
        local_losses.append(result.loss)
        observe(result)

    if not fold.arrived:
        _refuse_if_broken(report, len(members))
        return replace(server, parts=states, round=server.round + 1), report
    signals = signals.of(np.array(fold.arrived), fold.kept.get("update", []))
    if waits:
        states["mixing"], p = method.mixing.coefficients(states.get("mixing", {}), signals)
    else:
        p = fold.coefficients()
    if not np.isfinite(p).all():  # all weight was on clients that failed: nobody's work counts
        report.states.clear()
        return replace(server, parts=states, round=server.round + 1), report
    update, buffers, reduced = fold.mix(p)
    for place, part in method.hooks["server"]:
        states[place], update = part.server(states.get(place, {}), update, reduced[place])
    report.p[np.flatnonzero(present)[fold.arrived]] = p
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
            state = {place: part.init_client(self.server.shared) for place, part in hooks}
        return state


def _refuse_if_broken(report: Report, members: int) -> None:
    errors = [f for f in report.failures if f.reason.startswith(("failed in", "its worker process died"))]
    if members and len(errors) == members:
        raise ClientError(f"every client of the round failed; the first was {errors[0]}.")
