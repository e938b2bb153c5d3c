"""What persists between rounds: the server's state, and where client states are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.base.tree import Float
from fedloom.core.hook_results import like, tensors, without_shared_storage
from fedloom.core.parts import Topology
from fedloom.core.slots import hook_name
from fedloom.rounds.exchange import Broadcast, State, add_private
from fedloom.rounds.plan import ClientPlan


class Store(Protocol):
    """Storage of states between rounds, by number, like a dict; a client without a state has not participated yet."""

    def get(self, client: int, /) -> State | None:
        """The client's state, or None."""
        ...


MODEL = "model"  # the place of θ_r and its buffers in the state of a model
MEAN = "models"  # the place of the models' mean in the server's state


@dataclass(frozen=True)
class Models:
    """The R models of a topology; a model is the initial one until a round changes it.

    Attributes:
        first: returns an initial model.
        stored: the models of finished rounds, each as a state: ``model`` with ``theta`` [P] and ``buffers``, and the
            parts' server states.
        changed: the models of rounds that are not committed yet.
    """

    first: Callable[[int], Server]
    stored: Store
    changed: Mapping[int, State] = field(default_factory=dict)

    def get(self, number: int) -> Server:
        """A model with its server states, as if it were the only one; its round is not known here."""
        state = self.changed.get(number) or self.stored.get(number)
        if state is None:
            return self.first(number)
        model = state[MODEL]
        parts = {place: tree for place, tree in state.items() if place != MODEL}
        return Server(model["theta"], model["buffers"], parts)

    def is_first(self, number: int) -> bool:
        """Whether no round has changed a model."""
        return self.changed.get(number) is None and self.stored.get(number) is None

    def after(self, servers: Mapping[int, Server]) -> Models:
        """The models with those that a round has changed."""
        states: dict[int, State] = {
            number: {MODEL: {"theta": server.theta, "buffers": server.buffers}, **server.parts}
            for number, server in servers.items()
        }
        return replace(self, changed={**self.changed, **states})


@dataclass(frozen=True)
class Server:
    """The server's state after ``round`` rounds: θ, shared buffers, and each part's server state.

    With several models these are the mean over clients of the models that they receive, its buffers, and the states
    that are common to all models (``ClientPlan.common``); other parts have theirs for each model.
    """

    theta: Float[Tensor, "P"]
    buffers: Float[Tensor, "buffers"]
    parts: State
    round: int = 0
    models: Models | None = None

    @classmethod
    def initial(
        cls, plan: ClientPlan, theta: Float[Tensor, "model"], buffers: Float[Tensor, "model_buffers"]
    ) -> Server:
        """The state before the first round; θ and buffers are those of a newly initialised model."""
        shared, topology = theta[: plan.layout.shared_size].clone(), plan.method.topology
        sizes = np.cumsum([leaf.size for leaf in plan.layout.parameters])
        leaves = tuple(np.diff(sizes[sizes <= len(shared)], prepend=0).tolist())
        alike = type(topology).first is Topology.first

        @cache
        def first(number: int) -> Server:
            start = shared if alike else like(topology.first(shared, number, leaves), shared, "topology: first").clone()
            states = {
                place: tensors(part.init_server(start, plan.facts), f"{place}.init_server")
                for place, part in plan.method.hooks["init_server"]
            }
            shared_buffers = buffers[: plan.layout.shared_buffers].clone()
            return cls(start, shared_buffers, without_shared_storage(states, start))

        if plan.models == 1:
            return first(0)
        mean = torch.cat([shared, buffers[: plan.layout.shared_buffers]]).double()
        for number in () if alike else range(plan.models):
            share = plan.receivers[number] / plan.receivers.sum()
            mean[: len(shared)] += share * (first(number).theta.double() - shared)
        models = Models((lambda number: first(0)) if alike else first, {})
        common = {place: state for place, state in first(0).parts.items() if place in plan.common}
        return replace(first(0), parts=common, models=models).with_mean(mean)

    def with_mean(self, mean: Float[Tensor, "shared"]) -> Server:
        """The server with another mean of the models and their buffers, float64 [P + buffers]."""
        theta, buffers = mean.to(self.theta.dtype).split([len(self.theta), len(self.buffers)])
        return replace(self, theta=theta.clone(), buffers=buffers.clone(), parts=self.parts | {MEAN: {"mean": mean}})

    def model(self, number: int | None) -> Server:
        """One of several models, with its server states, as if it were the only one; None: the server itself."""
        if self.models is None or number is None:
            return self
        model, common = self.models.get(number), {place: state for place, state in self.parts.items() if place != MEAN}
        return replace(model, parts=model.parts | common, round=self.round)

    def distance(self, shares: np.ndarray) -> float:
        """The consensus distance Σ_r s_r ‖θ_r - θ̄‖² / Σ_r s_r of the models from their mean, with shares s [R]."""
        assert self.models is not None
        total, mean, distances = 0.0, self.parts[MEAN]["mean"][: len(self.theta)], dict[int, float]()
        for number, share in enumerate(shares.tolist()):
            theta = self.models.get(number).theta
            square = distances.get(id(theta))  # models that no round has changed are one
            if square is None:
                square = float((theta.double() - mean).square().sum())
                if self.models.is_first(number):
                    distances[id(theta)] = square
            total += share * square
        return total / float(shares.sum())

    def broadcast(self, plan: ClientPlan) -> Broadcast:
        """The message to the cohort of the next round."""
        slices: State = {}
        for place, part in plan.method.parts.items():
            if part.downloads:
                state = self.parts.get(place, {})
                slices[place] = {name: state[name] for name in part.downloads if name in state}
        theta = self.theta
        for place, part in plan.method.hooks["broadcast"] if self.models is None else ():
            output = part.broadcast(self.parts.get(place, {}), theta.clone())  # which it may write over
            theta = like(output, theta, hook_name(place, part, "broadcast"))
        return Broadcast(self.round, plan.local.rate(self.round), theta, self.buffers, slices)


def first_state(plan: ClientPlan, theta: Float[Tensor, "P"]) -> State:
    """The parts' states at a client that participates for the first time; θ is the model that it received."""
    hooks = plan.method.hooks["init_client"]
    state = {place: tensors(part.init_client(theta), f"{place}.init_client") for place, part in hooks}
    add_private(state, {}, "init_client")
    return state
