"""FedSplit: operator splitting with an inexact proximal step at the clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves, Reduce

EVERYBODY = 1 - 1e-9  # the fraction of clients that have participated, up to rounding


@dataclass(frozen=True)
class FedSplitDrift(Drift):
    """Peaceman-Rachford splitting of Σ F_i(z_i) subject to equal z_i, with local SGD from x in place of the exact prox.

    ::

        u_i ≈ argmin F_i(u) + (1/2s)‖u - (2x - z_i)‖²          z_i ← z_i + 2(u_i - x)          x ← mean z_i

    Absent clients keep their z_i [P]. x is the mean over all K clients (*All*, whatever the mixing coefficients), or
    with ``active`` over the cohort's new z_i (*Act*). With full participation both are the same, and x converges to the
    minimiser of Σ F_i up to the accuracy of the local solutions; with partial participation All lags behind and Act
    fluctuates. A server optimiser receives Δ = x - mean z_i, so that the minimiser is a fixed point for it, too. Pathak
    & Wainwright, NeurIPS 2020, algorithm 1; the variants are those of Acar, thesis 2023, §A.1.1.

    All z_i start at the initial model θ⁰, so that x is the mean of all z_i from the first round on. A client that joins
    later needs θ⁰ for its first 2x - z_i: θ⁰ is broadcast beside x until all clients have participated. From then on a
    round costs as much as FedAvg's, and one number: every upload says whether its client has just joined.

    Args:
        s: s > 0, the step size of the proximal operator; the pull towards 2x - z_i is 1/s.
        active: average over the cohort (Act) instead of all clients (All).
    """

    s: Positive = 10.0
    active: bool = False

    uploads = {"new": Reduce.SHARE, "update": Reduce.SHARE}  # noqa: RUF012
    downloads = ("start",)
    affine = True
    update_kind = "other"
    citation = "pathak2020fedsplit"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """θ⁰, the fraction 0 of clients that have joined, and, for All, the mean z of all z_i."""
        mean = {} if self.active else {"z": theta.clone()}
        return {"start": theta.clone(), "joined": theta.new_zeros((), dtype=torch.float64), **mean}

    def init_client(self, theta: Tensor) -> Tree:
        """A placeholder for z_i, which is θ⁰ and comes with the first broadcast."""
        return {"z": torch.zeros_like(theta), "new": theta.new_ones((), dtype=torch.float64)}

    def begin(self, ctx: Context) -> Tree:
        """-(2x - z_i)/s, constant over the local steps."""
        return {"pull": (self._z(ctx) - 2 * ctx.received) * (1 / self.s)}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """g + (u - (2x - z_i))/s."""
        return grad.add_(w, alpha=1 / self.s).add_(ctx.local["pull"])

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """z_i ← z_i - 2Δ_i; uploads x - z_i (Act) or the decrease 2Δ_i of z_i (All)."""
        z = self._z(ctx) - 2 * update
        sent = ctx.received - z if self.active else 2 * update
        return ClientEnd({"z": z, "new": torch.zeros_like(ctx.state["new"])}, {"new": ctx.state["new"]}, sent)

    def after_send(self, ctx: Context, state: Tree, update: Tensor, uploads: Tree) -> Tree:
        """The z_i that the server reads."""
        return state | {"z": ctx.received - update if self.active else self._z(ctx) - update}

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The mixed x - z_i (Act), or x - z after z ← z - (2/K) Σ Δ_i (All); θ⁰ is dropped when no longer needed."""
        fraction = state["joined"] + uploads["new"]
        complete = "start" not in state or bool(fraction >= EVERYBODY)
        new = {"joined": fraction} if complete else {"start": state["start"], "joined": fraction}
        if self.active:
            return new, update
        new["z"] = state["z"] - uploads["update"]
        return new, info.received - new["z"]

    def _z(self, ctx: Context) -> Tensor:
        """z_i, or θ⁰ for a client that participates for the first time."""
        if "start" not in ctx.down:
            return ctx.state["z"]
        return torch.where(ctx.state["new"] > 0, ctx.down["start"], ctx.state["z"])
