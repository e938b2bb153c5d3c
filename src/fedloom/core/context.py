"""The records that parts receive: mini-batches, model outputs, the client, the round, the experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.server_data import ServerData
from fedloom.core.tree import Tree


class Batch(NamedTuple):
    """One mini-batch: inputs [B, ...] and targets [B].

    ``mask`` [B] of ones and zeros leaves rows out of every mean, where there is one. ``twin`` [B, ...] is another
    augmented view of the same samples, if some part needs it. ``teacher`` are the teacher's logits [B, C], for the
    ``on_step`` of parts that need one.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    twin: Tensor | None = None
    teacher: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one number a row [B] over the rows that count, []."""
        return values.mean() if self.mask is None else (values * self.mask).sum() / self.mask.sum().clamp(min=1)


Model = Callable[..., Any]  # a client's module with its parameters as they stand, called like the module


class Output(NamedTuple):
    """The model's output: logits [B, C] and, if some part needs them, features [B, d] and the twin's logits [B, C].

    ``teacher`` are the teacher's logits [B, C]; ``early`` the logits [B, C] at the network's earlier exits, where those
    are trained too; ``model`` is the module with the parameters that are being trained, differentiable, for parts that
    ask about other inputs; ``features_at`` gives the features [B, d] of the mini-batch at other shared parameters [P],
    run forward only.
    """

    logits: Tensor
    features: Tensor | None = None
    twin: Tensor | None = None
    teacher: Tensor | None = None
    early: tuple[Tensor, ...] = ()
    model: Model | None = None
    features_at: Callable[[Tensor], Tensor] | None = None


Forward = Callable[[Tensor, Tensor], Output]  # (parameters [P], inputs [N, ...]) -> the model's output


class Facts(NamedTuple):
    """Public facts of an experiment, known before training begins.

    Attributes:
        inputs: shape of one input.
        classes: how many class numbers there are.
        low: the least value that an input can have, [channels, 1, 1] for images, else [].
        high: the largest one.
        clients: K, the number of all clients.
        rounds: T.
        seed: of everything that is random.
    """

    inputs: tuple[int, ...]
    classes: int
    low: Tensor
    high: Tensor
    clients: int
    rounds: int
    seed: int


class Context(NamedTuple):
    """The view that a part has of the client it works for.

    Attributes:
        received: θ^t, the shared parameters as received, [P].
        down: what the server sent down of the part's own state.
        state: the part's own state at this client.
        local: what its ``begin`` and ``on_step`` returned last.
        size: n_i / (mean n), the client's samples relative to the average client's.
        steps: number of local steps of this round.
        lr: η_t, the learning rate really applied this round.
        round: t.
        facts: of the experiment.
    """

    received: Tensor
    down: Tree
    state: Tree
    local: Tree
    size: float
    steps: int
    lr: float
    round: int
    facts: Facts


NO_ROUND = Context(  # for a loss that is taken outside a federated round
    torch.zeros(0), {}, {}, {}, 1.0, 1, 1.0, 0, Facts((), 0, torch.zeros(()), torch.ones(()), 1, 1, 0)
)


@dataclass(frozen=True)
class RoundInfo:
    """The record of a round that server halves receive, so that no client need upload what the server knows.

    One row of an array stands for one member of the cohort S_t whose work counts (for all who were sent the model
    where coefficients are chosen before local work).

    Attributes:
        t: the round's number.
        lr: η_t, the local learning rate of this round.
        cohort: client numbers, int64 [|S|].
        samples: n_i, int64 [|S|].
        steps: τ_i, the members' numbers of local steps, int64 [|S|].
        facts: of the experiment; K is ``facts.clients`` and T is ``facts.rounds``.
        received: θ^t [P].
        p: the mixing coefficients, float64 [|S|]; None until they are chosen.
        mixed: Σ p_i Δ_i [P], before a mixing's own step; None until the updates are in.
        losses: F_i(θ^t) before local work, float64 [|S|], if a part needs them.
        updates: the members' uploaded updates Δ_i [P], if a part needs all of them.
        buffers: their buffers after local work, where there are updates.
        server_data: the server's unlabelled inputs and the model, if a part needs them.
    """

    t: int
    lr: float
    cohort: np.ndarray
    samples: np.ndarray
    steps: np.ndarray
    facts: Facts
    received: Tensor
    p: np.ndarray | None = None
    mixed: Tensor | None = None
    losses: np.ndarray | None = None
    updates: Sequence[Tensor] = field(default_factory=tuple)
    buffers: Sequence[Tensor] = field(default_factory=tuple)
    server_data: ServerData | None = None

    @classmethod
    def of_cohort(
        cls, cohort: Sequence[int], samples: Sequence[int], clients: int, losses: Sequence[float] | None = None
    ) -> RoundInfo:
        """The record of a first round with so much known, for a policy that is tried by itself."""
        facts = NO_ROUND.facts._replace(clients=clients)
        known = None if losses is None else np.asarray(losses, dtype=np.float64)
        return cls(
            0, 1.0, np.asarray(cohort), np.asarray(samples), np.ones(len(cohort), dtype=np.int64), facts,
            torch.zeros(0), losses=known,
        )  # fmt: skip

    def restrict(self, rows: np.ndarray, updates: Sequence[Tensor] = (), buffers: Sequence[Tensor] = ()) -> RoundInfo:
        """The record of some members alone, with their updates where those were kept."""
        return replace(
            self,
            cohort=self.cohort[rows],
            samples=self.samples[rows],
            steps=self.steps[rows],
            losses=None if self.losses is None else self.losses[rows],
            updates=updates,
            buffers=buffers,
        )

    def models(self) -> Tensor:
        """The members' models θ_i = θ^t - Δ_i as uploaded, [|S|, P]."""
        return torch.stack([self.received - update for update in self.updates])
