"""Tilted empirical risk minimisation: coefficients that grow exponentially with the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedloom.base.ranges import Range
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs
from fedloom.core.simplex import exponentiated
from fedloom.parts.mixing import responses


@dataclass(frozen=True)
class TERM(Mixing):
    """p_i ∝ n_i exp(λF_i): the gradient of (1/λ) log Σ (n_i/n) exp(λF_i). λ = 0 is FedAvg, λ → ∞ the worst client only.

    Li, Beirami, Sanjabi & Smith, ICLR 2021.

    Args:
        lam: λ, finite; negative values favour small losses, 0 gives FedAvg.
        response: samples on which the losses F_i are taken: ``train`` or ``validation``, which local work never sees.
        prior: the coefficients before responses: ``samples``, n_i/n, or ``uniform``, which omits n_i.
    """

    lam: Annotated[float, Range()] = 1.0
    response: responses.Samples = "train"
    prior: responses.Prior = "samples"

    citation = "li2021term"

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Losses on the samples of ``response``."""
        return Needs(losses=self.response)

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """One exponentiated step from n_i/n with response F and ζ = 1/λ."""
        assert info.losses is not None
        extreme = info.losses.max() if self.lam > 0 else info.losses.min()
        with np.errstate(over="ignore"):
            response = self.lam * (info.losses - extreme)
        return state, exponentiated(responses.of_cohort(self.prior, info), response)
