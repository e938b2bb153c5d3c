"""Proportional fairness as mixing coefficients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.base.ranges import Positive
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs
from fedloom.core.simplex import exponentiated


@dataclass(frozen=True)
class Proportional(Mixing):
    """p_i ∝ n_i/(M - F_i): the gradient of -Σ (n_i/n) log(M - F_i) with respect to the losses.

    The objective ``propfair`` applies the same factor to the clients' local steps instead; use one of the two. M → ∞ is
    FedAvg. Zhang, Malekmohammadi, Chen & Yu, 2022; Hahn 2024, eq. (3.23).

    Args:
        M: M > 0, an upper bound of the losses.
        eps: ε > 0, lower bound of M - F_i.
    """

    M: Positive = 2.0
    eps: Positive = 0.2

    needs = Needs(losses="train")
    citation = "zhang2022propfair"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """One exponentiated step from n_i/n with response -log(M - F) and ζ = 1."""
        assert info.losses is not None
        response = -np.log(np.maximum(self.M - info.losses, self.eps))
        return state, exponentiated(info.samples.astype(np.float64), response)
