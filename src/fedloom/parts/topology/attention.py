"""Every client has a model at the server, which is drawn to similar ones: FedAMP's attentive messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Meeting
from fedloom.core.links import Links, central
from fedloom.parts.topology.graphs import OwnModel

COLUMNS = 1 << 16  # parameters of all models that are compared at a time


@dataclass(frozen=True)
class Attention(OwnModel):
    """Client i receives u_i = Σ_j ξ_ij w_j, a mean of all clients' models w_j that weighs similar ones more.

    ::

        ξ_ij = α e^(-‖w_i - w_j‖²/σ) / σ      for j ≠ i,       ξ_ii = 1 - Σ_{j≠i} ξ_ij

    among the clients of the round. Where Σ_{j≠i} ξ_ij > 1, which the paper excludes by a small α, it is scaled to 1. In
    FedAMP clients start from their own w_i (``personal=own_start``) and are pulled to u_i by the term ``proximal`` with
    μ = λ/α. With σ → ∞ every client keeps its own model. Huang et al., AAAI 2021, eqs. (3)-(7).

    Args:
        alpha: α ≥ 0; 0 is local training.
        sigma: σ > 0, the squared distance at which attention fades.
    """

    alpha: NonNegative = 1.0
    sigma: Positive = 1.0

    home = "server"
    mean = "unused"
    citation = "huang2021fedamp"

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
        weights = self.alpha / self.sigma * np.exp(-squared_distances(meeting.theta, meeting.active) / self.sigma)
        np.fill_diagonal(weights, 0.0)
        weights /= np.maximum(weights.sum(1, keepdims=True), 1.0)
        np.fill_diagonal(weights, np.maximum(1 - weights.sum(1), 0.0))
        return state, Links.dense(meeting.active, weights)


def squared_distances(theta: Callable[[int], Tensor], models: np.ndarray) -> np.ndarray:
    """‖θ_r - θ_s‖² of models, float64 [n, n], by inner products of their differences from a central one.

    Where numbers overflow, the distance is infinite.
    """
    centre = central(models, theta)
    gram = products(lambda n, at: theta(n)[at].double() - theta(centre)[at].double(), models, len(theta(centre)))
    square = gram.diagonal()
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.maximum(square[:, None] + square[None] - 2 * gram, 0), nan=np.inf, posinf=np.inf)


def products(part: Callable[[int, slice], Tensor], models: np.ndarray, size: int) -> np.ndarray:
    """⟨x_r, x_s⟩ of a vector x of each model, float64 [n, n]; ``part`` returns entries of one of them, float64."""
    gram = torch.zeros(len(models), len(models), dtype=torch.float64)
    for start in range(0, size, COLUMNS):
        x = torch.stack([part(number, slice(start, start + COLUMNS)) for number in models.tolist()])
        gram += (x @ x.T).cpu()
    return gram.numpy()
