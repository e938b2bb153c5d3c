"""Gradient tracking: SCAFFOLD's sibling for graphs without a server."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, RoundInfo
from fedloom.core.parts import Drift, Halves, Needs


@dataclass(frozen=True)
class GradientTracking(Drift):
    """Local steps go along g + c_r, where c_r corrects a model's gradient towards the mean over all models.

    After local work that moved the model r by Δ_r, and after B has mixed z as it mixes the models::

        z_r = Δ_r / (a η_t)                     c_r ← c_r - z_r + Σ_s B_rs z_s

    a is the number of local steps, as in SCAFFOLD with momentum ‖a‖₁. Where B is doubly stochastic Σ_r c_r stays 0, so
    that fixed points are those of the mean objective, which decentralised SGD with a constant step misses. c takes the
    part of SCAFFOLD's c - c_i; neighbours replace the server, and z doubles what they send each other. With one model c
    stays 0. Liu, Lin, Koloskova & Stich 2024 (K-GT), algorithm 1, with c⁰ = 0.
    """

    needs = Needs(sgd=True)
    downloads = ("rest", "z")
    mixed = ("z",)
    affine = True
    citation = "liu2024kgt"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """c = 0, as the sum of what B does not mix and z, which it does."""
        return {"rest": torch.zeros_like(theta), "z": torch.zeros_like(theta)}

    def begin(self, ctx: Context) -> Tree:
        """c, constant over the local steps."""
        return {"c": ctx.down["rest"] + ctx.down["z"]}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """g + c."""
        return grad.add_(ctx.local["c"])

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """c - z and z."""
        assert info.p is not None
        z = update / (float(info.p @ info.effective_steps) * info.lr)
        return {"rest": state["rest"] + state["z"] - z, "z": z}, update
