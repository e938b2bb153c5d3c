"""What persists between rounds: the server's state, and where client states are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedloom.core.client import Broadcast, State, with_private
from fedloom.core.hook_results import tensors, without_shared_storage
from fedloom.core.plan import ClientPlan
from fedloom.core.tree import Float


@dataclass(frozen=True)
class Server:
    """The server's state after ``round`` rounds: θ, shared buffers, and each part's server state."""

    theta: Float[Tensor, "P"]
    buffers: Float[Tensor, "buffers"]
    parts: State
    round: int = 0

    @classmethod
    def initial(
        cls, plan: ClientPlan, theta: Float[Tensor, "model"], buffers: Float[Tensor, "model_buffers"]
    ) -> Server:
        """The state before the first round; θ and buffers are those of a newly initialised model."""
        shared = theta[: plan.layout.shared_size].clone()
        states = {
            place: tensors(part.init_server(shared, plan.facts), f"{place}.init_server")
            for place, part in plan.method.hooks["init_server"]
        }
        return cls(shared, buffers[: plan.layout.shared_buffers].clone(), without_shared_storage(states, shared))

    def broadcast(self, plan: ClientPlan) -> Broadcast:
        """The message to the cohort of the next round."""
        slices: State = {}
        for place, part in plan.method.parts.items():
            if part.downloads:
                mine = self.parts.get(place, {})
                slices[place] = {name: mine[name] for name in part.downloads if name in mine}
        return Broadcast(self.round, plan.local.rate(self.round), self.theta, self.buffers, slices)


def first_state(plan: ClientPlan, theta: Float[Tensor, "P"]) -> State:
    """The parts' states at a client that participates for the first time; θ is the model that it received."""
    hooks = plan.method.hooks["init_client"]
    state = {place: tensors(part.init_client(theta), f"{place}.init_client") for place, part in hooks}
    with_private(state, {}, "init_client")
    return state


class Store(Protocol):
    """Storage of client states between rounds; a client without a state has not participated yet."""

    def get(self, client: int) -> State | None:
        """The client's state, or None."""
        ...
