"""Larger shares for clients that seldom take part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.core.context import RoundInfo
from fedloom.core.needs import Needs
from fedloom.core.parts import Weighting


@dataclass(frozen=True)
class InverseProbability(Weighting):
    """Shares in proportion to 1/π_i, where client i takes part with probability π_i (Horvitz & Thompson 1952).

    With uniform mixing the update is (1/K) Σ_{i∈S} Δ_i/π_i, with mixing by samples Σ_{i∈S} (n_i/n) Δ_i/π_i, n being the
    samples of all clients; any other mixing has the factors of mixing by samples. On average over the draws of S that
    is the update of all clients, however selections and deadlines favour some of them. The smaller π_i, the larger the
    variance; a client that never takes part stays left out.
    """

    needs = Needs(probabilities=True)

    def factors(self, info: RoundInfo) -> np.ndarray:
        assert info.included is not None
        assert info.sizes is not None
        mass = len(info.cohort) / len(info.sizes) if info.uniform else info.samples.sum() / info.sizes.sum()
        return mass / info.included
