"""FedDyn's dynamic regularisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves, Reduce


@dataclass(frozen=True)
class FedDynDrift(Drift):
    """Client i minimises L_i(θ) - ⟨h_i, θ⟩ + (α/2)‖θ - θ^t‖², so that local and global optima agree in the limit.

    ::

        h_i ← h_i - α(θ_i - θ^t)          h ← h - (α/K) Σ_{i∈S} (θ_i - θ^t)          θ ← mean_S θ_i - h/α

    h [P] is the mean of all clients' h_i [P] after every round, also where uplinks change the updates: h_i follows what
    was sent, for h would add up all errors. If the local problems are solved exactly, h_i is the
    gradient of L_i at the client's last solution, and the mean vanishes at the global solution. Only models are
    communicated. Acar, thesis 2023, §2.2, algorithm 1.

    With clients of unequal sizes the objective is Σ (n_i/n̄) L_i, and the rule is applied to L_i' = (n_i/n̄) L_i;
    divided by n_i/n̄ this is L_i with α_i = α·n̄/n_i, as in the published experiments. ``size_weighted=False`` is the
    unweighted Σ L_i of the thesis's equation (2.1). The correction maps the mixed update (Δ ← Δ + h/α), so it combines
    with any mixing coefficients and server optimiser; the paper mixes uniformly.

    Args:
        alpha: α > 0; for large α, local models stay close to the received one.
        size_weighted: weight clients by samples (α_i = α·n̄/n_i, as published) rather than equally.
    """

    alpha: Positive = 0.01
    size_weighted: bool = True

    uploads = {"update": Reduce.SHARE}  # noqa: RUF012
    affine = True
    linear = True
    citation = "acar2021feddyn"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """h = 0."""
        return {"h": torch.zeros_like(theta)}

    def init_client(self, theta: Tensor) -> Tree:
        """h_i = 0."""
        return {"h": torch.zeros_like(theta)}

    def begin(self, ctx: Context) -> Tree:
        """h_i + αθ^t, constant over the local steps."""
        size = self._size(ctx)
        return {"pull": (ctx.state["h"] / size).add_(ctx.received, alpha=self.alpha / size)}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """g + (α(θ - θ^t) - h_i) / (n_i/n̄)."""
        return grad.add_(w, alpha=self.alpha / self._size(ctx)).sub_(ctx.local["pull"])

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """h_i ← h_i - α(θ_i - θ^t)."""
        return ClientEnd(self.after_send(ctx, {}, update, {}), {}, update)

    def after_send(self, ctx: Context, state: Tree, update: Tensor, uploads: Tree) -> Tree:
        """h_i ← h_i - α(θ_i - θ^t), with θ_i as the server reads it."""
        return {"h": torch.add(ctx.state["h"], update, alpha=self.alpha)}

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """h ← h + α (1/K) Σ Δ_i, then Δ + h/α."""
        h = state["h"] + self.alpha * uploads["update"]
        return {"h": h}, update + h / self.alpha

    def _size(self, ctx: Context) -> float:
        return ctx.relative_size if self.size_weighted else 1.0
