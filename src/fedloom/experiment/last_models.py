"""Each client's last model, for the average of all of them."""

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
    """Each client's last model and the sum over all K of them, for the ``average`` evaluation only.

    A client that has not taken part counts with the initial model, as in the published curves of FedDyn. The sum is
    kept in float64 and updated by differences, so a round costs O(cohort). Where clients have levels, ``initial`` and
    ``total`` hold those of all levels, one after the other.
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
        """Nobody has taken part yet."""
        if plan.has_levels:
            return cls(torch.cat([level.theta0 for level in plan.levels]).cpu(), clients, plan)
        split, own = plan.layout.shared_size, plan.layout.shared_buffers
        return cls(torch.cat([plan.theta0[:split], plan.buffers0[:own]]).cpu(), clients)

    @property
    def levels(self) -> tuple[ClientPlan, ...]:
        """The levels' plans; none if all clients train the same network."""
        return () if self.plan is None else self.plan.levels

    def segment(self, number: int) -> slice:
        """Where the models of a level lie."""
        if not self.levels:
            return slice(None)
        ends = np.cumsum([0, *(len(level.theta0) for level in self.levels)])
        return slice(int(ends[number]), int(ends[number + 1]))

    def members(self, number: int) -> int:
        """How many clients a level has."""
        return self.clients if self.plan is None else int((self.plan.level[: self.clients] == number).sum())

    def where(self, client: int) -> slice:
        """Where the model of a client's level lies."""
        return self.segment(0 if self.plan is None else int(self.plan.level[client]))

    def observe(self, server: Server, result: Result) -> None:
        """Remember what a client of this round has arrived at; nothing changes before ``commit``."""
        received = server.theta if self.plan is None else self.plan.received(result.client, server.theta)
        assert result.moved is not None
        theta = received - result.moved
        self.pending[result.client] = torch.cat([theta, result.buffers]).cpu()

    def commit(self) -> None:
        """The round is over: its models become the last ones."""
        for client, model in self.pending.items():
            at = self.where(client)
            self.total[at] += model.double() - self.models.get(client, self.initial[at]).double()
            self.models[client] = model
        self.pending.clear()

    def mean(self, number: int = 0) -> Tensor:
        """The average model, parameters and buffers in one vector; of a level's clients, where there are several."""
        return (self.total[self.segment(number)] / self.members(number)).to(self.initial.dtype)
