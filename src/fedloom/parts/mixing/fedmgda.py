"""FedMGDA+: a combination of normalised updates that is a common descent direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Halves, Mixing, Needs
from fedloom.core.simplex import min_norm_box_qp


@dataclass(frozen=True)
class FedMGDA(Mixing):
    """θ ← θ - η Σ λ_i Δ_i/‖Δ_i‖ with λ = argmin ‖Σ λ_i Δ_i/‖Δ_i‖‖² over the simplex, |λ_i - n_i/n| ≤ ε.

    With ε = 1 the direction is the minimum-norm point of the convex hull of the normalised updates, along which no
    client's loss increases to first order; with ε = 0 it is their mean weighted by samples. The step length is at most
    η, whatever the local learning rate. The recorded coefficients are p_i ∝ λ_i/‖Δ_i‖, those of the unnormalised
    updates. Zero updates get no weight. All updates of the cohort are held in memory. Hu, Shaloudegi, Zhang & Yu, 2022.

    Args:
        eps: ε ≥ 0, largest deviation of the coefficients from the sample shares.
        lr: η > 0, the largest step length.
    """

    eps: NonNegative = 0.1
    lr: Positive = 1.0

    needs = Needs(updates=True)
    citation = "hu2022fedmgda"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """λ_i/‖Δ_i‖ normalised to sum to 1; the sum is kept for ``combine``."""
        flat = torch.stack(list(info.updates)).double()
        norms = torch.linalg.vector_norm(flat, dim=1)
        unit = flat / torch.where(norms > 0, norms, 1)[:, None]
        gram, length = (unit @ unit.T).cpu().numpy(), norms.cpu().numpy()
        static = info.samples / info.samples.sum()
        low, high = np.maximum(static - self.eps, 0), np.minimum(static + self.eps, 1)
        mixture = min_norm_box_qp(gram, static, low, high)
        raw = np.divide(mixture, length, out=np.zeros_like(mixture), where=length > 0)
        total = raw.sum()
        if total == 0:  # all updates are zero
            return {"length": torch.tensor(1.0, dtype=torch.float64)}, static
        return {"length": torch.tensor(total, dtype=torch.float64)}, raw / total

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """η Σ λ_i Δ_i/‖Δ_i‖."""
        return {}, self.lr * state["length"].to(update) * update
