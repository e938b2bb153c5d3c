"""AAggFF for devices: mixing coefficients of all clients from the responses of a cohort, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import Literal

import numpy as np
import torch

from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.parts.mixing import responses


@dataclass(frozen=True)
class AAggFFD(responses.Responding):
    """p⁺_i ∝ exp(-√(log K) Σ_τ ğ_τi / (Ľ√(t+1))), restricted to the cohort: p̃_i = p⁺_i / Σ_{j∈S} p⁺_j.

    ğ is the linearised gradient of -log(1 + ⟨p, r⟩) at r0 = r̄·1, evaluated at the doubly robust estimate of all
    clients' responses. Entries that were not sampled all have the same value, and a common shift does not change p; so
    only the sampled ones are updated, by -(r_i - r̄)/(C(1 + r̄)), and a round costs O(|S|) plus one state vector [K].
    C1 = 0, C2 = C = |S|/K, Ľ = C2/(1 + C1) + 2(C2 - C1)/(C(1 + C1)) = C + 2. Hahn 2024, algorithm 3.2, eq. (3.12);
    Hahn, Kim & Lee, ICML 2024.

    Args:
        c2: C2 > C1, upper bound of the responses; 0 means max(C, 2 C1).
        step: ``published``, or ``visits``: min(1, √(log K / visits)) times the gradients relative to C2/C, where
            visits is how often a client was sampled on average.
    """

    cdf: responses.Name = "weibull"
    step: Literal["published", "visits"] = "published"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """One step of follow-the-regularised-leader on this round's responses, restricted to the cohort."""
        assert info.losses is not None
        losses = responses.nonnegative("aaggff_d", info.losses)
        k, members = info.facts.clients, info.cohort
        share = len(members) / k
        high = self.c2 or max(share, 2 * self.c1)
        r = responses.respond(losses, self.cdf, self.scale, self.shape, self.c1, high)
        mean = r.mean()
        total = state["total"].cpu().numpy().copy() if state else np.zeros(k)
        rounds = int(state["rounds"]) + 1 if state else 1
        total[members] -= (r - mean) / (share * (1 + mean))
        bound = high / (1 + self.c1) + 2 * (high - self.c1) / (share * (1 + self.c1))
        if self.step == "visits":
            score = -min(1.0, sqrt(log(k) / (rounds * share))) * total[members] * share / high
        else:
            score = -sqrt(log(k)) * total[members] / (bound * sqrt(rounds + 1))
        p = np.exp(score - score.max()) * (info.samples if self.prior == "samples" else 1)
        return {"total": torch.from_numpy(total), "rounds": torch.tensor(rounds)}, p / p.sum()
