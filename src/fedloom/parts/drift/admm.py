"""FedADMM: the alternating direction method of multipliers on the consensus problem."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves


@dataclass(frozen=True)
class ADMM(Drift):
    """Client i lowers the augmented Lagrangian L_i(w) + ⟨y_i, w - θ^t⟩ + (ρ/2)‖w - θ^t‖², and keeps w_i and y_i [P].

    ::

        y_i ← y_i + ρ(w_i - θ^t)        u_i = w_i + y_i/ρ        θ ← θ + (η/|S|) Σ_{i∈S} (u_i - previous u_i)

    with y_i = 0 and w_i = θ⁰ at first, and η the rate of the server. What is uploaded is the change of u_i, so that
    with η = |S|/K the model is the mean of u_i over all K clients, and the mean of y_i vanishes at the solution. With
    all clients in all rounds and η = 1 it is FedDyn with equal clients, α = ρ and h_i = -y_i; otherwise the two differ
    in how absent clients count. Local steps start at θ^t; with ``personal=own_start`` at w_i. A client's first upload,
    in round t, is u_i - θ^t; the server, which knows θ⁰ and who has taken part, corrects the mixed update by p_i(θ⁰ -
    θ^t). Gong, Li & Freris, ICDE 2022, algorithm 1.

    Args:
        rho: ρ > 0.
    """

    rho: Positive = 0.01

    update_kind = "other"
    affine = True
    citation = "gong2022fedadmm"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """θ⁰, and whether each client has taken part, [K]."""
        return {"first": theta.clone(), "known": torch.zeros(facts.clients, dtype=torch.bool)}

    def init_client(self, theta: Tensor) -> Tree:
        """y_i = 0, and θ^t for u_i."""
        return {"y": torch.zeros_like(theta), "u": theta.clone()}

    def begin(self, ctx: Context) -> Tree:
        """y_i - ρθ^t, constant over the local steps."""
        return {"pull": torch.sub(ctx.state["y"], ctx.received, alpha=self.rho)}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """g + y_i + ρ(w - θ^t)."""
        return grad.add_(w, alpha=self.rho).add_(ctx.local["pull"])

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """y_i and the change of u_i, with the sign of an update."""
        y = torch.sub(ctx.state["y"], update, alpha=self.rho)
        change = ctx.state["u"] - (ctx.received - update + y / self.rho)
        return ClientEnd({"y": y, "u": ctx.state["u"] - change}, {}, change)

    def after_send(self, ctx: Context, state: Tree, update: Tensor, uploads: Tree) -> Tree:
        """u_i as the server knows it, so that the next change makes up for errors of uplinks."""
        return {"y": state["y"], "u": ctx.state["u"] - update}

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Δ with θ⁰ for the u_i of newcomers."""
        assert info.p is not None
        visited, new = state["known"].clone(), ~state["known"].cpu().numpy()[info.cohort]
        visited[info.cohort] = True
        for row in np.flatnonzero(new).tolist():
            version = info.t if info.versions is None else int(info.versions[row])
            received = info.models_received.get(version, info.received)
            update = update.sub(received - state["first"], alpha=float(info.p[row]))
        return {"first": state["first"], "known": visited}, update
