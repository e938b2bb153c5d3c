"""The geometric median of the updates (RFA)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedloom.base.ranges import NonNegativeInt, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs


@dataclass(frozen=True)
class GeometricMedian(Mixing):
    """Δ ≈ argmin_v Σ α_i ‖v - Δ_i‖ by R smoothed Weiszfeld steps from the mean v = Σ α_i Δ_i.

    A step is v ← Σ β_i Δ_i / Σ β_i with β_i = α_i / max(ν, ‖v - Δ_i‖), and p_i = β_i/Σβ of the last one. R = 0 is the
    mean.

    Breakdown point: 1/2 of the total weight. If hostile clients hold a fraction q of it, the exact median is at most
    2(1 - q)/(1 - 2q) · max ‖Δ_i - Δ̄‖ over honest i from the honest mean Δ̄, whatever they send. R steps approximate
    it: if all honest updates agree and all hostile ones are at a distance D, the result is at D r/(1 + r) from the
    honest ones, r = (q/(1 - q))^{R+1}; very long hostile updates therefore need more steps. All updates of the cohort
    are held in memory. Pillutla, Kakade & Harchaoui, IEEE Transactions on Signal Processing 2022, algorithms 1 and 2.

    Args:
        steps: R ≥ 0.
        nu: ν > 0, lower bound of distances.
        size_weighted: α_i = n_i/n, as in the paper, instead of equal weights.
    """

    steps: NonNegativeInt = 3
    nu: Positive = 1e-6
    size_weighted: bool = True

    needs = Needs(updates=True)
    citation = "pillutla2022rfa"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The weights of the last Weiszfeld step."""
        flat = torch.stack(list(info.updates)).double()
        alpha = info.samples / info.samples.sum() if self.size_weighted else np.full(len(flat), 1 / len(flat))
        p = alpha
        for _ in range(self.steps):
            distances = torch.linalg.vector_norm(flat - torch.from_numpy(p).to(flat) @ flat, dim=1).cpu().numpy()
            beta = alpha / np.maximum(distances, self.nu)
            p = beta / beta.sum()
        return state, p
