"""A first-order correction of stale updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Drift, Halves, Needs


@dataclass(frozen=True)
class DelayCompensation(Drift):
    """Δ_i + (λ/(a_i η_i)) Δ_i ⊙ Δ_i ⊙ (θ^t - θ^s): what the update would be at θ^t, to first order.

    DC-ASGD takes λ g ⊙ g for the Hessian, with which a gradient at θ^s becomes g + λ g ⊙ g ⊙ (θ^t - θ^s). Here
    g = Δ_i/(a_i η_i) is the mean gradient of a client's local steps, with their number a_i (‖a‖₁ with momentum) and
    rate η_i. Without staleness it does nothing. Zheng et al., ICML 2017, equation (10), with constant λ.

    Args:
        lam: λ.
    """

    lam: NonNegative = 0.04

    needs = Needs(sgd=True, updates=True)
    citation = "zheng2017dcasgd"

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Δ + Σ p_i λ/(a_i η_i) Δ_i ⊙ Δ_i ⊙ (θ^t - θ^{s_i})."""
        assert info.p is not None
        total = torch.zeros_like(update)
        lengths = info.lr * info.relative_rates * info.effective_steps
        versions = [info.t] * len(info.cohort) if info.versions is None else info.versions.tolist()
        rows = zip(info.updates, info.p.tolist(), lengths.tolist(), versions, strict=True)
        for client_update, p, length, version in rows:
            if version in info.models_received:
                drift = info.received - info.models_received[version]
                total += (p * self.lam / length) * client_update.square() * drift
        return state, update + total
