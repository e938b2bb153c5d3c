"""AAggFF for silos: mixing coefficients by online Newton steps on bounded responses of all clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Needs
from fedloom.core.simplex import Vector, by_samples, minimise, restrict_to_cohort
from fedloom.parts.mixing import responses


def growth_gradient(p: Vector, r: Vector) -> Vector:
    """g = -r/(1 + ⟨p, r⟩) [K], the gradient of the decision loss -log(1 + ⟨p, r⟩)."""
    return -r / (1 + p @ r)


@dataclass(frozen=True)
class AAggFFS(responses.Responding):
    """p⁺ = argmin_{p∈Δ} Σ_τ ⟨g_τ, p⟩ + (α/2)‖p‖² + (β/2) Σ_τ ⟨g_τ, p - p_τ⟩², g_τ the gradient of -log(1 + ⟨p_τ, r_τ⟩).

    Responses are r_i = C1 + (C2 - C1)·CDF(F_i/F̄) with C1 = 0, C2 = 1/K; L = C2/(1 + C1), α = 4KL, β = 1/(4L); p¹ =
    1/K. The new p is used in the same round. The state is Σ ggᵀ [K, K], two sums over τ [K] and p [K], whatever the
    number of rounds. A client that drops out counts with the mean response, and its weight is redistributed. Hahn 2024,
    algorithm 3.1; Hahn, Kim & Lee, ICML 2024.

    Args:
        c2: C2 > C1, upper bound of the responses; 0 means max(1/K, 2 C1).
    """

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Losses on the samples of ``response``."""
        return Needs(losses=self.response, full_participation=True)

    def constants(self, clients: int) -> tuple[float, float, float]:
        """C2, α and β for K clients."""
        high = self.c2 or max(1 / clients, 2 * self.c1)
        lipschitz = high / (1 + self.c1)
        return high, 4 * clients * lipschitz, 1 / (4 * lipschitz)

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The online Newton step for this round's responses."""
        assert info.losses is not None
        losses = responses.nonnegative("aaggff_s", info.losses)
        k = info.facts.clients
        high, alpha, beta = self.constants(k)
        previous = {name: value.cpu().numpy() for name, value in state.items()}
        first = by_samples(info) if self.prior == "samples" else np.full(k, 1 / k)
        p = previous.get("p", first)
        cohort_responses = responses.respond(losses, self.cdf, self.scale, self.shape, self.c1, high)
        r = np.full(k, cohort_responses.mean())
        r[info.cohort] = cohort_responses
        g = growth_gradient(p, r)
        outer = previous.get("outer", np.zeros((k, k))) + np.outer(g, g)  # Σ gg^T
        total = previous.get("total", np.zeros(k)) + g  # Σ g
        cross = previous.get("cross", np.zeros(k)) + g * (g @ p)  # Σ g⟨g, p_τ⟩
        new = minimise(alpha * np.eye(k) + beta * outer, total - beta * cross - alpha * (first - 1 / k), p)
        statistics = {"outer": outer, "total": total, "cross": cross, "p": new}
        state = {name: torch.from_numpy(value) for name, value in statistics.items()}
        return state, restrict_to_cohort(new, info.cohort)
