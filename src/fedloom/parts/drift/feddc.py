"""FedDC's local drift decoupling and correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves, Needs, Reduce


@dataclass(frozen=True)
class FedDCDrift(Drift):
    """Client i tracks its accumulated drift h_i, and the server mixes the drift-corrected models θ_i + h_i.

    Client i minimises F_i(θ) + (α/2)‖h_i + θ - θ^t‖² + (1/(ηk))⟨θ, g_i - g⟩ in k local steps, and then::

        h_i ← h_i + (θ_i - θ^t)          g_i ← θ_i - θ^t          θ ← Σ p_i (θ_i + h_i)          g ← Σ p_i g_i

    with the new h_i. All vectors are [P]. g_i is the client's last displacement and g the mixed one of the last round's
    cohort, both *towards* the new model, the negative of the library's Δ_i = θ^t - θ_i: about -ηk times a gradient, so
    that the last term adds ∇F - ∇F_i to the client's gradient, as in SCAFFOLD. η is the decayed rate of the round; with
    local momentum ‖a‖₁ replaces k (``ctx.effective_steps``). h_i, g_i and g start at zero: the first round's local work
    is FedProx's with μ = α. Gao et al., CVPR 2022, algorithm 1.

    That is the term as the paper's text defines it. A corrected displacement, however, says little about the client's
    gradient: with constant gradients, all clients move alike in one round and are not corrected in the next. The
    authors' code uses SCAFFOLD's control variates instead (``control=True``), ⟨θ, c - c_i⟩ with::

        c_i⁺ = c_i - c + (θ^t - θ_i)/(ηk)          c ← c + (1/K) Σ_{i∈S} (c_i⁺ - c_i)

    At a fixed point θ_i = θ^t and h_i = -∇F_i/α, so Σ p_i ∇F_i = 0: with full participation it is the minimiser for any
    number of local steps. With partial participation Σ_S p_i h_i, which the algorithm box adds
    (``average_over_all=False``), does not vanish there, and θ fluctuates with the spread of ∇F_i/α. The default adds
    the mean of all K clients' h_i instead, as the authors' experiments do, and converges. Without the gradient term
    that is FedDyn with equal weights, whose h_i is -α times this one. With the gradient term g is broadcast, and a
    round costs one and a half times FedAvg's communication; twice if a second vector is uploaded as well: g_i if the
    cohort's drift is added, or c_i⁺ - c_i.

    ``size_weighted=True`` minimises Σ (n_i/n̄) F_i (n̄ the mean size) with uniform mixing, as the authors' code does: α
    and c are divided by n_i/n̄ at the client, and c is the mean of (n_i/n̄) c_i.

    α = 0 alone is not FedAvg, since drifts are still added to the models: the first step is twice as long.
    ``decouple=False`` keeps h_i = 0; without the gradient term this is FedProx, and with α = 0 FedAvg.

    Args:
        alpha: α ≥ 0, weight of the drift penalty.
        gradient: include the gradient term.
        control: take it from control variates, as the authors' code does, instead of displacements.
        decouple: learn h_i; False keeps it at zero.
        average_over_all: add the mean drift of all K clients instead of the cohort's mixed drift.
        size_weighted: weight clients by samples rather than equally.
    """

    alpha: NonNegative = 0.01
    gradient: bool = True
    decouple: bool = True
    average_over_all: bool = True
    control: bool = False
    size_weighted: bool = False

    boundable = ("control",)
    affine = True
    citation = "gao2022feddc"

    @property
    def downloads(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """g or c, unless there is no gradient term."""
        return ("g",) if self.gradient else ()

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """SGD, with or without momentum, if displacements are used as gradients."""
        return Needs(sgd=self.gradient)

    @property
    def update_kind(self) -> Literal["displacement", "other"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The client's displacement Δ_i, or θ^t - (θ_i + h_i)."""
        return "displacement" if not self.decouple or self.average_over_all else "other"

    @property
    def uploads(self) -> Mapping[str, Reduce]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """c_i⁺ - c_i or g_i, unless the update itself is g_i; Σ Δ_i / K if the mean of all h_i is tracked."""
        controls = self.gradient and self.control
        reductions = {"control": Reduce.SHARE} if controls else {}
        if self.decouple and self.average_over_all:
            reductions["update"] = Reduce.SHARE
        elif self.decouple and self.gradient and not controls:
            reductions["g"] = Reduce.MIX
        return reductions

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """g = 0 (or c = 0), and h = 0, the mean drift of all clients, if it is tracked."""
        names = ["g"] * self.gradient + ["h"] * (self.decouple and self.average_over_all)
        return {name: torch.zeros_like(theta) for name in names}

    def init_client(self, theta: Tensor) -> Tree:
        """g_i = h_i = 0 (or c_i = h_i = 0)."""
        names = ["g"] * self.gradient + ["h"] * self.decouple
        return {name: torch.zeros_like(theta) for name in names}

    def begin(self, ctx: Context) -> Tree:
        """α(h_i - θ^t)/w_i + (g_i - g)/(ηk), or c/w_i - c_i, constant over the steps; w_i is 1, or n_i/n̄."""
        centre = ctx.state["h"] - ctx.received if self.decouple else -ctx.received
        constant = self.alpha / self._weight(ctx) * centre
        if self.gradient and self.control:
            constant = constant + (ctx.down["g"] / self._weight(ctx) - ctx.state["g"])
        elif self.gradient:
            constant = constant + (ctx.state["g"] - ctx.down["g"]) * (1 / (ctx.effective_steps * ctx.lr))
        return {"pull": constant}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """∇F_i + α(h_i + θ - θ^t)/w_i + (g_i - g)/(ηk), or + c/w_i - c_i."""
        return grad.add_(w, alpha=self.alpha / self._weight(ctx)).add_(ctx.local["pull"])

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """New h_i and g_i; uploads θ^t - (θ_i + h_i), or Δ_i with ``average_over_all``, and g_i or w_i (c_i⁺ - c_i)."""
        state, sent = {"g": -update} if self.gradient else {}, {}
        if self.gradient and self.control:
            sent["control"] = self._weight(ctx) * update / (ctx.effective_steps * ctx.lr) - ctx.down["g"]
            state["g"] = ctx.state["g"] + sent["control"] / self._weight(ctx)
        elif "g" in self.uploads:
            sent["g"] = -update
        if self.decouple:
            state["h"] = ctx.state["h"] - update
        return ClientEnd(state, sent, update if "h" not in state or self.average_over_all else update - state["h"])

    def after_send(self, ctx: Context, state: Tree, update: Tensor, uploads: Tree) -> Tree:
        """The states of which the server keeps means, by what it reads."""
        new = dict(state)
        if self.gradient and self.control:
            new["g"] = ctx.state["g"] + uploads["control"] / self._weight(ctx)
        elif self.gradient:
            new["g"] = uploads.get("g", -update)
        if self.decouple and self.average_over_all:
            new["h"] = ctx.state["h"] - update
        return new

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The new g or c; with ``average_over_all``, h ← h - (1/K) Σ Δ_i and the update Δ - h."""
        assert info.mixed is not None
        new: Tree = {}
        if self.gradient:
            new["g"] = state["g"] + uploads["control"] if self.control else uploads.get("g", -info.mixed)
        if self.decouple and self.average_over_all:
            new["h"] = state["h"] - uploads["update"]
            update = update - new["h"]
        return new, update

    def _weight(self, ctx: Context) -> float:
        return ctx.relative_size if self.size_weighted else 1.0
