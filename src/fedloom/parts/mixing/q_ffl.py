"""q-fair federated learning: coefficients that grow with a power of the loss, and q-FedAvg's step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Halves, Mixing, Needs
from fedloom.core.simplex import exponentiated
from fedloom.parts.mixing import responses

SMALLEST = 1e-10  # lower bound of losses in denominators


@dataclass(frozen=True)
class QFFL(Mixing):
    """p_i ∝ n_i F_i^q with the step of q-FedAvg: Δ = Σ n_i F_i^q LΔ_i / Σ n_i h_i, h_i = qF_i^{q-1}‖LΔ_i‖² + LF_i^q.

    L = 1/η_t. In terms of p, Δ = Σ p_i Δ_i / (1 + qL Σ p_i ‖Δ_i‖²/F_i). q = 0 is FedAvg; the larger q, the more weight
    on the largest losses. Losses below 1e-10 count as 1e-10. Li, Sanjabi, Beirami & Smith, ICLR 2020, algorithm 2, with
    n_i weights as in its objective (and Hahn 2024, eq. (3.18)).

    Args:
        q: q ≥ 0; 0 gives FedAvg.
        response: samples on which the losses F_i are taken: ``train`` or ``validation``, which local work never sees.
        prior: the coefficients before responses: ``samples``, n_i/n, or ``uniform``: algorithm 2 of the paper has no
            n_i, since it draws clients by their samples.
    """

    q: NonNegative = 1.0
    response: responses.Samples = "train"
    prior: responses.Prior = "samples"

    citation = "li2020qffl"

    @property
    def weighs_losses(self) -> bool:
        return self.q > 0

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Losses on the samples of ``response``."""
        return Needs(losses=self.response, updates=True)

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """One exponentiated step from n_i/n with response q log F; p_i/F_i is kept for ``combine``."""
        assert info.losses is not None
        losses = np.maximum(responses.nonnegative("q_ffl", info.losses) if self.q else info.losses, SMALLEST)
        p = exponentiated(responses.of_cohort(self.prior, info), self.q * np.log(losses))
        return {"ratios": torch.from_numpy(p / losses)}, p

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Δ divided by 1 + q Σ (p_i/F_i) L‖Δ_i‖²."""
        squares = torch.stack([client_update.square().sum() for client_update in info.updates]) / info.lr
        squares = squares / torch.from_numpy(info.relative_rates).to(squares)
        curvature = 1 + self.q * (state["ratios"].to(squares) * squares).sum()
        return {}, (1 / curvature) * update
