"""What a federated run is between two rounds: the server, what clients keep, and the averages that are evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import CheckpointError
from fedloom.base.tree import Tree
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.store import CLIENTS, MODELS, ROWS, Forms, StateStore, StateUpdate, flat, nested
from fedloom.rounds.exchange import Broadcast, Failure, Result, State
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server

VERSION = "version-{:06d}"  # a version's name in a checkpoint
REASON = ("kind", "reason", "stage", "trace")


def pack(failures: Sequence[Failure]) -> tuple[list[dict[str, str]], Tree]:
    """The different reasons, and a table of all failures: ``round``, ``client`` and ``reason``, int64 [failures].

    Drop-outs of a long run are many, and every checkpoint has all of them.

    >>> from fedloom.rounds.exchange import FailureKind
    >>> failures = [Failure(round, 7, FailureKind.ABSENT, "dropped out") for round in range(3)]
    >>> reasons, table = pack(failures)
    >>> len(reasons), table["round"].tolist(), unpack(reasons, table) == failures
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


def unpack(reasons: Sequence[Mapping[str, Any]], table: Mapping[str, Tensor] | None) -> list[Failure]:
    """The failures: the inverse of ``pack``; none without a table.

    Raises:
        LookupError: if the table names reasons that there are not (TypeError or ValueError: other damage).
    """
    if table is None:
        return []
    if not all(isinstance(text, str) for reason in reasons for text in reason.values()):
        raise TypeError("its failures are told in other values than texts")
    rows = zip(*(table[name].tolist() for name in ("round", "client", "reason")), strict=True)
    return [Failure(round, client, **reasons[number]) for round, client, number in rows]


@dataclass
class ServerAverage:
    """θ̄_t = Σ_s ρ^(t-s) θ_s / Σ_s ρ^(t-s) over the rounds s = 1 ... t, or the mean of the last n, with buffers alike.

    Kept as θ̄ ← θ̄ + (1 - ρ)/(1 - ρ^t) (θ_t - θ̄) in float64: the initial model has no weight, and after one round θ̄ is
    the server's model. If few clients participate, θ fluctuates with every cohort, and θ̄ does not. The mean of the last
    two is what FedExP releases, since long steps oscillate (Jhunjhunwala, Wang & Joshi, ICLR 2023).

    Args:
        rho: ρ in (0, 1), or n ≥ 2.
        model: θ̄ and its buffers, float64 [P + B].
        rounds: t.
        past: with n, the last min(t, n) models, [.., P + B].
    """

    rho: float
    model: Tensor
    rounds: int = 0
    past: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of(cls, rho: float, server: Server) -> ServerAverage:
        """The state before the first round."""
        return cls(rho, torch.cat([server.theta, server.buffers]).double())

    def add(self, server: Server) -> None:
        """Add the server model of one more round."""
        self.rounds += 1
        now = torch.cat([server.theta, server.buffers]).double()
        if self.rho < 1:
            self.model = torch.lerp(self.model, now, (1 - self.rho) / (1 - self.rho**self.rounds))
            return
        self.past = torch.cat([self.past.reshape(-1, len(now)).to(now), now[None]])[-int(self.rho) :]
        self.model = self.past.mean(0)

    def server(self, server: Server) -> Server:
        """The server with θ̄ in place of θ."""
        theta, buffers = self.model.split([len(server.theta), len(server.buffers)])
        return replace(server, theta=theta.to(server.theta), buffers=buffers.to(server.buffers), models=None)


@dataclass
class ClientModels:
    """Base class of sums over clients' models, parameters and buffers in one vector.

    Attributes:
        plan: the plan.
        clients: K.
        initial: the initial shared parameters and buffers of all levels, concatenated, [Σ (P + buffers)].
        total: the sum, float64, shaped as ``initial``.
    """

    plan: ClientPlan
    clients: int
    initial: Tensor = field(init=False)
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        models = [
            torch.cat([level.theta0[: level.layout.shared_size], level.buffers0[: level.layout.shared_buffers]])
            for level in self.plan.levels
        ]
        self.initial, self.ends = torch.cat(models).cpu(), np.cumsum([0, *map(len, models)])

    def segment(self, number: int) -> slice:
        """The slice of a level's models in ``initial`` and ``total``."""
        return slice(int(self.ends[number]), int(self.ends[number + 1]))

    def level(self, client: int) -> int:
        """The level of a client."""
        return int(self.plan.level[client])

    def members(self, number: int) -> int:
        """Number of clients of a level."""
        return int((self.plan.level[: self.clients] == number).sum())

    def client_model(self, result: Result, received: Tensor) -> Tensor:
        """A client's model of this round, given the parameters that it received."""
        assert result.moved is not None
        return torch.cat([received - result.moved, result.buffers]).cpu()

    def mean(self, number: int = 0) -> Tensor:
        """The average model of a level, parameters and buffers in one vector."""
        return (self.total[self.segment(number)] / self.members(number)).to(self.initial.dtype)


@dataclass
class LastModels(ClientModels):
    """Each client's last model and the sum over all K clients, for the ``average`` evaluation only.

    A client that has not participated counts with the initial model, as in the published curves of FedDyn. The sum is
    updated by differences, so that a round costs O(cohort).
    """

    models: StateStore = field(default_factory=StateStore)
    pending: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total = self.initial.double().clone()
        for number in range(len(self.plan.levels)):
            self.total[self.segment(number)] *= self.members(number)
        self.total_after = self.total

    def begin(self) -> None:
        """Start a round: discard the models of an unfinished one."""
        self.pending.clear()

    def observe(self, result: Result, received: Tensor) -> None:
        """Store a client's model of this round; it takes effect at ``commit``."""
        self.pending[result.client] = self.client_model(result, received)

    def get(self, client: int) -> Tensor:
        """A client's last model, shaped as its level's segment."""
        state = self.models.get(client)
        return self.initial[self.segment(self.level(client))] if state is None else state["average"]["model"]

    def first(self, client: int, tensors: Forms) -> State:
        """A client's last model as it is stored, if it is the initial one."""
        return {"average": {"model": self.initial[self.segment(self.level(client))]}}

    def prepare(self, round: int) -> StateUpdate:
        """Write the models of round t ≥ 1, if there is no room left in memory; they take effect at ``commit``."""
        self.total_after = self.total.clone()
        for client, model in self.pending.items():
            self.total_after[self.segment(self.level(client))] += model.double() - self.get(client).double()
        return self.models.prepare({c: {"average": {"model": model}} for c, model in self.pending.items()}, round)

    def commit(self) -> None:
        """End the round: its models become the last ones."""
        self.total = self.total_after
        self.pending.clear()

    def checkpoint_tensors(self, round: int) -> dict[str, Tree]:
        """The tensors of a checkpoint: the sum, and the index of the models."""
        return {"average": {"total": self.total}, MODELS: self.models.save(round)}

    def restore(self, trees: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Adopt the models of a checkpoint."""
        self.total, self.models = trees["average"]["total"], self.models.open(trees[MODELS])


@dataclass
class CohortModels(ClientModels):
    """The sum of the models of one round's cohort, for the ``cohort`` evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self.total = torch.zeros_like(self.initial, dtype=torch.float64)
        self.count = [0] * len(self.plan.levels)

    def observe(self, result: Result, received: Tensor) -> None:
        """Add the model of a client of this round."""
        number = self.level(result.client)
        self.total[self.segment(number)] += self.client_model(result, received)
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
        average: the average of the server model over the rounds, if it is evaluated.
        versions: the messages of earlier versions on which clients are still at work, by version.
        rows: the models of a topology that rounds have changed, by number, if there are several.
    """

    server: Server
    store: StateStore
    last: LastModels | None = None
    cohort: CohortModels | None = None
    average: ServerAverage | None = None
    versions: Mapping[int, Broadcast] = field(default_factory=dict)
    rows: StateStore | None = None

    @property
    def client_models(self) -> dict[str, LastModels | CohortModels]:
        """The means of clients' models that are evaluated, by the names of their evaluations."""
        means = {"average": self.last, "cohort": self.cohort}
        return {name: models for name, models in means.items() if models is not None}

    def commit(self, server: Server, states: Mapping[int, State], versions: Mapping[int, Broadcast]) -> None:
        """End a round with its new client states, and the clients' models that were observed: all or nothing.

        Args:
            server: the server after the round.
            states: the new client states.
            versions: the messages on which clients are still at work.
        """
        updates = [self.store.prepare(states, server.round)]
        try:
            if self.last is not None and states:
                updates.append(self.last.prepare(server.round))
            if self.rows is not None and server.models is not None:
                updates.append(self.rows.prepare(server.models.changed, server.round))
                server = replace(server, models=replace(server.models, changed={}))
        except BaseException:
            for update in updates:
                update.withdraw()
            raise
        for update in updates:
            update.adopt()
        self.server, self.versions = server, versions
        for models in self.client_models.values():
            models.commit() if states else models.begin()  # a round without any update leaves no trace
        if self.average is not None:
            self.average.add(server)

    def checkpoint(
        self, facts: dict[str, Any], failures: Sequence[Failure] = (), past: Tree | None = None
    ) -> Checkpoint:
        """The snapshot as a checkpoint, with all clients that were left out and what a selection knows of the past."""
        server, (reasons, table) = self.server, pack(failures)
        facts = facts | {"failures": reasons}
        tensors: dict[str, dict[str, Tensor]] = {
            "server": {"shared": server.theta, "buffers": server.buffers} | flat(server.parts),
            CLIENTS: self.store.save(server.round),
        }
        if self.last is not None:
            tensors |= self.last.checkpoint_tensors(server.round)
        if self.rows is not None:
            tensors[ROWS] = self.rows.save(server.round)
        if failures:
            tensors["failures"] = table
        if past:
            tensors["past"] = past
        for version, down in self.versions.items():
            message = {"shared": down.theta, "buffers": down.buffers} | flat(down.parts)
            tensors[VERSION.format(version)] = message
            facts = facts | {VERSION.format(version): {"lr": down.lr, "invited": list(down.invited)}}
        if self.average is not None:
            models = {"past": self.average.past} if len(self.average.past) else {}
            tensors["server_average"] = {"model": self.average.model, **models}
            facts = facts | {"server_average": self.average.rho}
        return Checkpoint(server.round, tensors, facts)

    def from_checkpoint(self, checkpoint: Checkpoint, out: Path) -> Snapshot:
        """The state in a checkpoint of the run directory ``out``; ``self`` is the state before the first round.

        Raises:
            ValueError: if it belongs to another model, or client states on disk are missing.
            CheckpointError: if an average is evaluated that the run did not keep, or kept with another weight.
        """
        shared, buffers, states = self._on_device(checkpoint.tensors["server"])
        server = replace(self.server, theta=shared, buffers=buffers, parts=states, round=checkpoint.round)
        rows = self.rows
        if rows is not None and server.models is not None:
            rows = rows.open(checkpoint.tensors[ROWS])
            server = replace(server, models=replace(server.models, stored=rows, changed={}))
        versions = {}
        for name in checkpoint.tensors:
            if name.startswith(VERSION[:8]):
                version, about = int(name[8:]), checkpoint.facts[name]
                shared, buffers, parts = self._on_device(checkpoint.tensors[name])
                versions[version] = Broadcast(version, about["lr"], shared, buffers, parts, tuple(about["invited"]))
        store = self.store.open(checkpoint.tensors[CLIENTS])
        for mean, name, lacks, setting in (
            (self.last, "average", "keep its clients' last models", "average out of evaluation.what"),
            (self.average, "server_average", "average its server model", "evaluation.server_average out"),
        ):
            if mean is not None and name not in checkpoint.tensors:
                message = f"the run in {out} did not {lacks}, so the average cannot begin now; leave {setting}."
                raise CheckpointError(message)
        if self.last is not None:
            self.last.restore(checkpoint.tensors)
        average = self.average
        if average is not None:
            if (before := checkpoint.facts.get("server_average", average.rho)) != average.rho:
                raise CheckpointError(
                    f"the run in {out} averaged its server model with {before:g}, not {average.rho:g}; "
                    f"set evaluation.server_average={before:g}."
                )
            model = checkpoint.tensors["server_average"]["model"].to(average.model)
            past = checkpoint.tensors["server_average"].get("past", average.past)
            average = replace(average, model=model, rounds=server.round, past=past.to(average.model))
        return Snapshot(server, store, self.last, self.cohort, average, versions, rows)

    def _on_device(self, saved: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, State]:
        """The parameters, buffers and parts' states of a file, on the device of the run."""
        parts, expected = dict(saved), (self.server.theta, self.server.buffers)
        values = parts.pop("shared"), parts.pop("buffers")
        if [(t.shape, t.dtype) for t in values] != [(t.shape, t.dtype) for t in expected]:
            raise ValueError("it belongs to another model")
        device = self.server.buffers.device
        states = {place: {k: v.to(device) for k, v in t.items()} for place, t in nested(parts).items()}
        return values[0].to(device), values[1].to(device), states
