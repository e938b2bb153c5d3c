"""FedCM's client-level momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedloom.base.ranges import Range
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, RoundInfo
from fedloom.core.parts import Drift, Halves, Needs


@dataclass(frozen=True)
class FedCMDrift(Drift):
    """Local steps go along v = αg + (1 - α)d, where d is the cohort's mean gradient of the last round.

    ::

        d ← Σ p_i Δ_i / (η_t Σ p_i τ_i)

    d [P] is zero in the first round and is broadcast, so a round costs 1.5 times FedAvg's communication. α = 1 is
    FedAvg. The paper assumes equal numbers τ of local steps; if they differ, their weighted mean replaces τ, and with
    local momentum ‖a_i‖₁ replaces τ_i (``info.effective_steps``). Xu, Wang, Wang & Yao 2021, algorithm 2.

    Weight decay is added after v and so is part of d, too, which repeats it: the fixed point is that of FedAvg with 1/α
    times the coefficient. The same holds for proximal maps, such as those of ``elastic_net``.

    Args:
        alpha: α in (0, 1].
    """

    alpha: Annotated[float, Range(0, 1, above=True)] = 0.1

    needs = Needs(sgd=True)
    downloads = ("direction",)
    affine = True
    citation = "xu2021fedcm"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"direction": torch.zeros_like(theta)}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return grad.mul_(self.alpha).add_(ctx.down["direction"], alpha=1 - self.alpha)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        assert info.p is not None
        assert info.mixed is not None
        return {
            "direction": info.mixed / (info.lr * float(info.p @ (info.relative_rates * info.effective_steps)))
        }, update
