"""What passes between the server and a client in a round: the broadcast, the client's state, its result or failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.tree import Float, Tree
from fedloom.core.context import Heard
from fedloom.rounds.plan import ClientPlan

State = dict[str, Tree]  # a client's state: the part's place -> its tree
BUFFERS = "buffers"  # the slot of batch statistics in every message that has any
PRIVATE = ("private", BUFFERS)  # the private parameters and buffers, beside the personal part's own state


@dataclass(frozen=True)
class Broadcast:
    """The message to the cohort of a round.

    Attributes:
        round: t.
        lr: η_t.
        theta: θ^t, the shared parameters.
        buffers: the shared buffers.
        parts: the ``downloads`` of each part's server state, by place.
        invited: the numbers of all clients that receive it.
        heard: further models that it comes with.
        models: the messages of several models that clients of one call have received; the fields above are empty then.
        model_of: which of them each client has received.
    """

    round: int
    lr: float
    theta: Float[Tensor, "P"]
    buffers: Float[Tensor, "buffers"]
    parts: State
    invited: tuple[int, ...] = ()
    heard: Heard | None = None
    models: tuple[Broadcast, ...] = ()
    model_of: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of_models(cls, clients: Sequence[Sequence[int]], models: Sequence[Broadcast]) -> Broadcast:
        """The messages of one round to the clients of several models."""
        first, owners = models[0], {client: n for n, members in enumerate(clients) for client in members}
        return cls(first.round, first.lr, first.theta[:0], first.buffers[:0], {}, models=tuple(models), model_of=owners)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are sent."""
        slices = (value for tree in self.parts.values() for value in tree.values())
        heard = () if self.heard is None else (*self.heard.models.values(), self.heard.shares)
        return self.theta, self.buffers, *slices, *heard

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(value.nbytes for value in self.tensors)

    def at(self, level: ClientPlan) -> Broadcast:
        """What clients of a level receive, given its plan."""
        if level.submodel is None:
            return self
        return replace(self, theta=level.level_params(self.theta), buffers=level.level_buffers(self.buffers))

    def to(self, client: int) -> Broadcast:
        """What a client has received."""
        return self.models[self.model_of[client]] if self.models else self

    def places(self, clients: Sequence[int]) -> list[int] | None:
        """Which of several models each client has received; None for one model."""
        return [self.model_of[client] for client in clients] if self.models else None


class FailureKind(str, Enum):
    """The reason why a client is left out of a round."""

    __str__ = str.__str__

    CODE = "code"  # an exception in a part, the model or the data
    DIED = "died"  # its worker process died
    DIVERGED = "diverged"  # something in its result is not finite
    MALFORMED = "malformed"  # a tensor of its result has another shape or type than the plan's or the others'
    ABSENT = "absent"  # it dropped out after receiving the model
    REFUSED = "refused"  # it declined the work, for its data do not fit


@dataclass
class Failure:
    """A client left out of a round's aggregation, and why.

    Attributes:
        round: t, from 0; messages count rounds from 1, as records do.
        client: its number.
        kind: what went wrong.
        reason: the reason of the failure, as text.
        stage: the stage of the local work, like ``step 1 of 4``; empty if it had not started.
        trace: the traceback if its work raised an exception.
    """

    round: int
    client: int
    kind: FailureKind
    reason: str
    stage: str = ""
    trace: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.kind = FailureKind(self.kind)

    def __str__(self) -> str:
        where = f"failed in {self.stage}: " if self.kind is FailureKind.CODE and self.stage else ""
        return f"round {self.round + 1}, client {self.client}: {where}{self.reason}"


@dataclass
class Result:
    """The outcome of one client's local work: its update, uploads and new state, or a failure.

    Attributes:
        client: the client's number.
        update: Δ_i = θ^t - θ_i on the shared parameters [P], as uploaded.
        buffers: the shared buffers after training [buffers].
        uploads: uploaded slices by place of their part; shapes are the part's own.
        state: the client's new state.
        moved: θ^t - θ_i [P] before any part changed it, if the plan has ``report_models``.
        traffic: number of scalars and bytes actually uploaded, if an uplink changed them.
        loss: mean training loss over the local steps.
        failure: set if the client is left out; all other fields are then void.
    """

    client: int
    update: Tensor = field(default_factory=lambda: torch.zeros(0))
    buffers: Tensor = field(default_factory=lambda: torch.zeros(0))
    uploads: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    moved: Tensor | None = None
    traffic: tuple[int, int] | None = None
    loss: float = float("nan")
    failure: Failure | None = None


def own_state(state: State, place: str) -> Tree:
    """A part's own state at a client, without the private parameters and buffers that are kept beside it."""
    part_state = state.get(place, {})
    return {name: part_state[name] for name in part_state if name not in PRIVATE} if place == "personal" else part_state


def own_values(state: State | None) -> Tree | None:
    """The personal part's state with the private values kept beside it; None if a client keeps none."""
    part_state = (state or {}).get("personal", {})
    return part_state if "private" in part_state else None


def add_private(state: State, private: Tree, hook: str) -> None:
    """Put private parameters and buffers into a client's state, beside what the personal part's hook returned."""
    part_state = state.get("personal", {})
    for name in PRIVATE:
        if name in part_state:
            raise ConfigError(
                f"personal.{hook} returned a state {name!r}, the name under which the client's private values are "
                "kept; choose another name."
            )
    if private:
        state["personal"] = part_state | private
