"""FedPHP: a client deploys, and learns from, an average of its past models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Model
from fedloom.core.message import ClientEnd
from fedloom.core.parts import Needs, Personal, Start, Use, Weights


@dataclass(frozen=True)
class Inherited(Personal):
    """A client trains the received model, and keeps and deploys h_i [P], a moving average of its models θ_i.

    ::

        h_i ← μ_i h_i + (1 - μ_i) θ_i          after local work, μ_i = μ t/T in round t, and 0 at the first visit

    Early in the run h_i is nearly the last model, later an average. Terms find it in ``ctx.own`` as ``history``: FedPHP
    has the term ``inheritance`` beside the loss, which learns from it. At its first visit a client has none, and the
    received model is in its place. With μ = 0 it is the client's last model, which as a teacher is pFedSD's (Jin et
    al., IEEE TPDS 2022). Two models are kept, h_i before the last visit and θ_i. Batch statistics are the received
    ones. Drifts that read gradients from displacements are refused, as they are beside all parts with a ``start``.

    Li, Zhan, Shao, Li & Song, ECML PKDD 2021 (FedPHP). The authors' code has μ_i = μ min(1, v_i K / (T |S_t|)) for a
    client's earlier visits v_i, of which t|S_t|/K are expected until round t: here μ_i has the expected number, which a
    client knows in a deployment, too.

    Args:
        mu: μ in [0, 1], the weight of the past at the end; the authors use 0.9.
    """

    mu: Probability = 0.9

    needs = Needs(rounds="number")
    citation = "li2021fedphp"

    def init_client(self, theta: Tensor) -> Tree:
        """h_i before the last visit, and its weight after it."""
        return {"history": theta.clone(), "weight": theta.new_zeros(())}

    def start(self, ctx: Context, received: Tensor, state: Tree | None, draws: np.random.Generator) -> Start:
        """The received model; h_i as it is now, and its weight after this visit."""
        yield from ()
        if state is None:
            return ctx.state, received
        weight = self.mu * ctx.round / ctx.facts.rounds
        return {"history": _inherited(state), "weight": received.new_tensor(weight)}, received

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """What ``start`` returned."""
        return ClientEnd(ctx.local, {}, update)

    def fill(self, use: Use, shared: Weights, first: Weights, state: Tree | None, into: Weights) -> None:
        """h_i, with the server's batch statistics; the server's model at a client that never participated."""
        into.theta.copy_(shared.theta if state is None else _inherited(state))
        into.buffers.copy_(shared.buffers)


def _inherited(state: Tree) -> Tensor:
    """μ_i h_i + (1 - μ_i) θ_i [P], from the state after the last visit."""
    return torch.lerp(state["private"], state["history"], state["weight"])
