"""Means of clients' models: of all clients' last models, and of the models of one round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Result
from fedloom.core.plan import ClientPlan
from fedloom.core.server import Server
from fedloom.core.tree import Tree
from fedloom.experiment.store import MODELS, StateStore, StateUpdate


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
