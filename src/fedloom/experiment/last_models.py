"""Each client's last model, for the average over all clients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Result
from fedloom.core.plan import ClientPlan
from fedloom.core.round import Server


@dataclass
class LastModels:
    """Each client's last model and the sum over all K clients, for the ``average`` evaluation only.

    A client that has not participated counts with the initial model, as in the published curves of FedDyn. The sum is
    kept in float64 and updated by differences, so that a round costs O(cohort).

    Attributes:
        initial: the initial shared parameters and buffers, [P + buffers]; with levels, those of all levels,
            concatenated.
        clients: K.
        plan: the plan if clients have levels, else None.
        models: last models of the clients that have participated, shaped as ``initial`` (with levels, their level's
            segment).
        total: Σ over all clients, float64, shaped as ``initial``.
        pending: models of the current round, not committed yet.
    """

    initial: Tensor
    clients: int
    plan: ClientPlan | None = None  # where clients have levels
    models: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor = field(init=False)
    pending: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = self.initial.double().clone()
        for number in range(len(self.levels) or 1):
            self.total[self.segment(number)] *= self.members(number)

    @classmethod
    def of(cls, plan: ClientPlan, clients: int) -> LastModels:
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

    def members(self, number: int) -> int:
        """Number of clients of a level."""
        return self.clients if self.plan is None else int((self.plan.level[: self.clients] == number).sum())

    def where(self, client: int) -> slice:
        """The slice of a client's level."""
        return self.segment(0 if self.plan is None else int(self.plan.level[client]))

    def observe(self, server: Server, result: Result) -> None:
        """Store a client's model of this round; it takes effect at ``commit``."""
        received = server.theta if self.plan is None else self.plan.received(result.client, server.theta)
        assert result.moved is not None
        theta = received - result.moved
        self.pending[result.client] = torch.cat([theta, result.buffers]).cpu()

    def commit(self) -> None:
        """End the round: its models become the last ones."""
        for client, model in self.pending.items():
            at = self.where(client)
            self.total[at] += model.double() - self.models.get(client, self.initial[at]).double()
            self.models[client] = model
        self.pending.clear()

    def mean(self, number: int = 0) -> Tensor:
        """The average model, parameters and buffers in one vector; with levels, over the clients of that level."""
        return (self.total[self.segment(number)] / self.members(number)).to(self.initial.dtype)
