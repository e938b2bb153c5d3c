"""Aggregation of clipped updates: around zero (norm bounding) or around the last aggregate (centred clipping)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Count, Range
from fedloom.base.tree import Float, Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.parts import Halves, Mixing, Needs


def factors(updates: Float[Tensor, "n P"], centre: Float[Tensor, "P"], radius: float) -> Float[Tensor, "n"]:
    """min(1, C/‖Δ_i - v‖) for updates Δ_i, a centre v and a radius C.

    >>> factors(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.zeros(2), 2.0)
    tensor([0.4000, 1.0000])
    """
    distances = torch.linalg.vector_norm(updates - centre, dim=1)
    return radius / distances.clamp(min=radius)


@dataclass(frozen=True)
class NormBounding(Mixing):
    """Δ = Σ (n_i/n) min(1, C/‖Δ_i‖) Δ_i: every update is clipped to length C.

    Breakdown point: none; every hostile client moves the result, but by at most (n_i/n) C. C = ∞ is the mean weighted
    by samples. The recorded p_i is proportional to (n_i/n) min(1, C/‖Δ_i‖). All updates of the cohort are held in
    memory. Sun, Kairouz, Suresh & McMahan 2019, section 4, without their noise, which is an uplink here.

    Args:
        radius: C > 0.
    """

    radius: Annotated[float, Range(0, above=True, infinite=True)] = 1.0

    needs = Needs(updates=True)
    citation = "sun2019backdoor"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The clipped weights normalised to sum to 1; their sum is kept for ``combine``."""
        if self.radius == float("inf"):
            return {"sum": torch.tensor(1.0)}, info.samples / info.samples.sum()
        flat = torch.stack(list(info.updates)).double()
        clipping = factors(flat, torch.zeros_like(flat[0]), self.radius).cpu().numpy()
        raw = info.samples / info.samples.sum() * clipping
        return {"sum": torch.tensor(raw.sum(), dtype=torch.float64)}, raw / raw.sum()

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The mean of the clipped updates."""
        return {}, state["sum"].to(update) * update


@dataclass(frozen=True)
class CentredClipping(Mixing):
    """v ← v + (1/n) Σ min(1, τ/‖Δ_i - v‖) (Δ_i - v), L times from the last round's Δ; the new Δ is v.

    Breakdown point: none within a round: f hostile clients of n can always move Δ, but by at most Lτf/n from the result
    that they would give by sending v. The first round starts from 0. τ = ∞ with L = 1 is the unweighted mean. All
    clients have equal weight; the recorded p_i is proportional to min(1, τ/‖Δ_i - v‖) in the last step. All updates of
    the cohort are held in memory. Karimireddy, He & Jaggi, ICML 2021, algorithm 2. In the paper clients upload
    momentum, which its bound over many rounds requires; here they upload updates.

    Args:
        radius: τ > 0.
        steps: L ≥ 1.
    """

    radius: Annotated[float, Range(0, above=True, infinite=True)] = 1.0
    steps: Count = 1

    needs = Needs(updates=True)
    citation = "karimireddy2021history"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """v = 0 [P]."""
        return {"centre": torch.zeros_like(theta)}

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The clipping factors normalised to sum to 1; the new centre is kept for ``combine``."""
        flat = torch.stack(list(info.updates)).double()
        if self.radius == float("inf"):
            return {"centre": flat.mean(0).to(state["centre"])}, np.full(len(flat), 1 / len(flat))
        centre, clipping = state["centre"].double(), flat.new_ones(len(flat))
        for _ in range(self.steps):
            clipping = factors(flat, centre, self.radius)
            centre = centre + clipping @ (flat - centre) / len(flat)
        return {"centre": centre.to(state["centre"])}, (clipping / clipping.sum()).cpu().numpy()

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The new centre v."""
        return state, state["centre"]
