"""All state of a federated run between two rounds, and its form in a checkpoint.

Beside the server and the client states these are means of models, which are evaluated but never fed back: of all
clients' last models, of the models of one round, and of the server model over the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Failure, Result, State
from fedloom.core.errors import CheckpointError
from fedloom.core.plan import ClientPlan
from fedloom.core.server import Server
from fedloom.core.tree import Tree
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.store import CLIENTS, MODELS, StateStore, StateUpdate, flat, nested

REASON = ("kind", "reason", "stage", "trace")


def packed(failures: Sequence[Failure]) -> tuple[list[dict[str, str]], Tree]:
    """The different reasons, and a table of all failures: ``round``, ``client`` and ``reason``, int64 [failures].

    Drop-outs of a long run are many, and every checkpoint has all of them.

    >>> from fedloom.core.client import FailureKind
    >>> failures = [Failure(round, 7, FailureKind.ABSENT, "dropped out") for round in range(3)]
    >>> reasons, table = packed(failures)
    >>> len(reasons), table["round"].tolist(), unpacked(reasons, table) == failures
    (1, [0, 1, 2], True)
    """
    numbers: dict[tuple[str, ...], int] = {}
    rows = [
        (f.round, f.client, numbers.setdefault((f.kind.value, f.reason, f.stage, f.trace), len(numbers)))
        for f in failures
    ]
    columns = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).T
    names = ("round", "client", "reason")
    return [dict(zip(REASON, key, strict=True)) for key in numbers], dict(zip(names, columns, strict=True))


def unpacked(reasons: Sequence[Mapping[str, Any]], table: Mapping[str, Tensor] | None) -> list[Failure]:
    """The failures: the inverse of ``packed``; without a table, each reason has its round and client, as it once had.

    Raises:
        LookupError: if the table names reasons that there are not (TypeError or ValueError: other damage).
    """
    if table is None:
        return [Failure(**reason) for reason in reasons]
    rows = zip(*(table[name].tolist() for name in ("round", "client", "reason")), strict=True)
    return [Failure(round, client, **reasons[number]) for round, client, number in rows]


@dataclass
class ServerAverage:
    """θ̄_t = Σ_s ρ^(t-s) θ_s / Σ_s ρ^(t-s) over the rounds s = 1 ... t, parameters and buffers alike.

    Kept as θ̄ ← θ̄ + (1 - ρ)/(1 - ρ^t) (θ_t - θ̄) in float64: the initial model has no weight, and after one round θ̄ is
    the server's model. If few clients participate, θ fluctuates with every cohort, and θ̄ does not.

    Args:
        rho: ρ in (0, 1).
        model: θ̄ and its buffers, float64 [P + B].
        rounds: t.
    """

    rho: float
    model: Tensor
    rounds: int = 0

    @classmethod
    def of(cls, rho: float, server: Server) -> ServerAverage:
        """The state before the first round."""
        return cls(rho, torch.cat([server.theta, server.buffers]).double())

    def add(self, server: Server) -> None:
        """Add the server model of one more round."""
        self.rounds += 1
        now = torch.cat([server.theta, server.buffers]).double()
        self.model = torch.lerp(self.model, now, (1 - self.rho) / (1 - self.rho**self.rounds))

    def server(self, server: Server) -> Server:
        """The server with θ̄ in place of θ."""
        theta, buffers = self.model.split([len(server.theta), len(server.buffers)])
        return replace(server, theta=theta.to(server.theta), buffers=buffers.to(server.buffers))


@dataclass
class ClientModels:
    """Base class of sums over clients' models, parameters and buffers in one vector.

    Attributes:
        initial: the initial shared parameters and buffers, [P + buffers]; with levels, those of all levels,
            concatenated.
        clients: K.
        plan: the plan if clients have levels, else None.
        total: the sum, float64, shaped as ``initial``.
    """

    initial: Tensor
    clients: int
    plan: ClientPlan | None = None  # where clients have levels
    total: Tensor = field(init=False)

    @classmethod
    def of(cls, plan: ClientPlan, clients: int) -> Self:
        """The state before any client has participated."""
        if plan.has_levels:
            return cls(torch.cat([level.theta0 for level in plan.levels]).cpu(), clients, plan)
        split, own = plan.layout.shared_size, plan.layout.shared_buffers
        return cls(torch.cat([plan.theta0[:split], plan.buffers0[:own]]).cpu(), clients)

    @property
    def levels(self) -> tuple[ClientPlan, ...]:
        """The levels' plans; () if all clients train the same network."""
        return () if self.plan is None else self.plan.levels

    def segment(self, number: int) -> slice:
        """The slice of a level's models in ``initial`` and ``total``."""
        if not self.levels:
            return slice(None)
        ends = np.cumsum([0, *(len(level.theta0) for level in self.levels)])
        return slice(int(ends[number]), int(ends[number + 1]))

    def level(self, client: int) -> int:
        """The level of a client."""
        return 0 if self.plan is None else int(self.plan.level[client])

    def members(self, number: int) -> int:
        """Number of clients of a level."""
        return self.clients if self.plan is None else int((self.plan.level[: self.clients] == number).sum())

    def arrived(self, server: Server, result: Result) -> Tensor:
        """A client's model of this round."""
        received = server.theta if self.plan is None else self.plan.received(result.client, server.theta)
        assert result.moved is not None
        return torch.cat([received - result.moved, result.buffers]).cpu()

    def mean(self, number: int = 0) -> Tensor:
        """The average model, parameters and buffers in one vector; with levels, over the clients of that level."""
        return (self.total[self.segment(number)] / self.members(number)).to(self.initial.dtype)


@dataclass
class LastModels(ClientModels):
    """Each client's last model and the sum over all K clients, for the ``average`` evaluation only.

    A client that has not participated counts with the initial model, as in the published curves of FedDyn. The sum is
    updated by differences, so that a round costs O(cohort).

    Attributes:
        models: last models of the clients that have participated.
        pending: models of the current round, not committed yet.
    """

    models: StateStore = field(default_factory=StateStore)
    pending: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = self.initial.double().clone()
        for number in range(len(self.levels) or 1):
            self.total[self.segment(number)] *= self.members(number)
        self.total_after = self.total

    def begin(self) -> None:
        """Start a round: discard the models of an unfinished one."""
        self.pending.clear()

    def observe(self, server: Server, result: Result) -> None:
        """Store a client's model of this round; it takes effect at ``commit``."""
        self.pending[result.client] = self.arrived(server, result)

    def get(self, client: int) -> Tensor:
        """A client's last model, shaped as ``initial`` (with levels, as their level's segment).

        Raises:
            CheckpointError: if it is in a file that is missing or altered.
        """
        state = self.models.get(client)
        return self.initial[self.segment(self.level(client))] if state is None else state["average"]["model"]

    def prepare(self, round: int) -> StateUpdate:
        """Write the models of round t, from 1, if there is no more room; they take effect at ``commit``.

        Raises:
            CheckpointError: see ``StateStore.prepare``; nothing has changed then.
        """
        self.total_after = self.total.clone()
        for client, model in self.pending.items():
            self.total_after[self.segment(self.level(client))] += model.double() - self.get(client).double()
        return self.models.prepare({c: {"average": {"model": model}} for c, model in self.pending.items()}, round)

    def commit(self) -> None:
        """End the round: its models become the last ones."""
        self.total = self.total_after
        self.pending.clear()

    def saved(self, round: int) -> dict[str, Tree]:
        """Their part of a checkpoint: the sum, and the index of the models.

        Raises:
            OSError: if models cannot be written.
        """
        return {"average": {"total": self.total}, MODELS: self.models.save(round)}

    def restore(self, trees: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Adopt the models of a checkpoint.

        Raises:
            ValueError: if a file is missing or was altered.
        """
        self.total, self.models = trees["average"]["total"], self.models.opened(trees[MODELS])


@dataclass
class CohortModels(ClientModels):
    """The sum of the models of one round's cohort, for the ``cohort`` evaluation."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self.total = torch.zeros_like(self.initial, dtype=torch.float64)
        self.count = [0] * (len(self.levels) or 1)

    def observe(self, server: Server, result: Result) -> None:
        """Add the model of a client of this round."""
        number = self.level(result.client)
        self.total[self.segment(number)] += self.arrived(server, result)
        self.count[number] += 1

    def commit(self) -> None:
        """End the round; its mean can be measured."""

    def members(self, number: int) -> int:
        """Number of clients of a level that arrived in this round."""
        return self.count[number]


@dataclass
class Snapshot:
    """The state of a federated run after some rounds.

    Attributes:
        server: θ [P], buffers and the parts' server states.
        store: the client states.
        last: the clients' last models, if their average is evaluated.
        cohort: the models of the last round's cohort, if their mean is evaluated; not part of a checkpoint.
        averaged: the average of the server model over the rounds, if it is evaluated.
    """

    server: Server
    store: StateStore
    last: LastModels | None = None
    cohort: CohortModels | None = None
    averaged: ServerAverage | None = None

    @property
    def client_models(self) -> dict[str, LastModels | CohortModels]:
        """The means of clients' models that are evaluated, by the names of their evaluations."""
        both = {"average": self.last, "cohort": self.cohort}
        return {name: models for name, models in both.items() if models is not None}

    def commit(self, server: Server, states: Mapping[int, State]) -> None:
        """End a round with its new client states, and the clients' models that were observed: all or nothing.

        Raises:
            CheckpointError: see ``StateStore.prepare``.
        """
        updates = [self.store.prepare(states, server.round)]
        if self.last is not None and states:
            try:
                updates.append(self.last.prepare(server.round))
            except BaseException:
                updates[0].withdraw()
                raise
        for update in updates:
            update.adopt()
        self.server = server
        for models in self.client_models.values():
            models.commit() if states else models.begin()  # a round without any update leaves no trace
        if self.averaged is not None:
            self.averaged.add(server)

    def checkpoint(self, facts: dict[str, Any], failures: Sequence[Failure] = ()) -> Checkpoint:
        """The snapshot as a checkpoint, with all clients that were left out."""
        server, (reasons, table) = self.server, packed(failures)
        facts = facts | {"failures": reasons}
        tensors: dict[str, dict[str, Tensor]] = {
            "server": {"shared": server.theta, "buffers": server.buffers} | flat(server.parts),
            CLIENTS: self.store.save(server.round),
        }
        if self.last is not None:
            tensors |= self.last.saved(server.round)
        if failures:
            tensors["failures"] = table
        if self.averaged is not None:
            tensors["server_average"] = {"model": self.averaged.model}
            facts = facts | {"server_average": self.averaged.rho}
        return Checkpoint(server.round, tensors, facts)

    def restored(self, checkpoint: Checkpoint, out: Path) -> Snapshot:
        """The state in a checkpoint of the run directory ``out``; ``self`` is the state before the first round.

        Raises:
            ValueError: if it belongs to another model, or client states on disk are missing.
            CheckpointError: if the average is evaluated but the run did not keep last models.
        """
        parts = dict(checkpoint.tensors["server"])
        shared, buffers = parts.pop("shared"), parts.pop("buffers")
        mine = self.server.theta
        if [(t.shape, t.dtype) for t in (shared, buffers)] != [(t.shape, t.dtype) for t in (mine, self.server.buffers)]:
            raise ValueError("it belongs to another model")
        device = self.server.buffers.device
        states = {place: {k: v.to(device) for k, v in t.items()} for place, t in nested(parts).items()}
        server = replace(
            self.server,
            theta=shared.to(device),
            buffers=buffers.to(device),
            parts=states,
            round=checkpoint.round,
        )
        store = self.store.opened(checkpoint.tensors[CLIENTS])
        last = self.last
        if last is not None:
            if "average" not in checkpoint.tensors:
                raise CheckpointError(
                    f"the run in {out} did not keep its clients' last models, so the average evaluation cannot begin "
                    "now; leave average out of evaluation.what."
                )
            last.restore(checkpoint.tensors)
        averaged = self.averaged
        if averaged is not None:
            if "server_average" not in checkpoint.tensors:
                raise CheckpointError(
                    f"the run in {out} did not average its server model, so the average cannot begin now; "
                    "leave evaluation.server_average out."
                )
            if (before := checkpoint.facts.get("server_average", averaged.rho)) != averaged.rho:
                raise CheckpointError(
                    f"the run in {out} averaged its server model with {before:g}, not {averaged.rho:g}; "
                    f"set evaluation.server_average={before:g}."
                )
            model = checkpoint.tensors["server_average"]["model"].to(device)
            averaged = replace(averaged, model=model, rounds=server.round)
        return Snapshot(server, store, last, self.cohort, averaged)
