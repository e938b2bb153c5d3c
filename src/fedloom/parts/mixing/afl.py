"""Agnostic federated learning: projected gradient ascent on the mixing coefficients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedloom.base.ranges import NonNegative
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs
from fedloom.core.simplex import by_samples, project, restrict_to_cohort
from fedloom.parts.mixing import responses


@dataclass(frozen=True)
class AFL(Mixing):
    """p ← Proj_Δ(p + γF), the ascent half of min_θ max_p Σ p_i F_i(θ); requires full participation.

    p starts at n_i/n, so that γ = 0 is FedAvg, and the new p is used in the same round, unless ``simultaneous``. A
    client that drops out counts with F_i = 0, and its weight in the round is redistributed. Mohri, Sivek & Suresh, ICML
    2019.

    Args:
        step: γ ≥ 0; 0 gives FedAvg.
        response: samples on which the losses F_i are taken: ``train`` or ``validation``, which local work never sees.
        prior: the first p: ``samples``, n_i/n, or ``uniform``.
        simultaneous: mix models with the p from before the ascent step.
    """

    step: NonNegative = 0.1
    response: responses.Samples = "train"
    prior: responses.Prior = "samples"
    simultaneous: bool = False

    citation = "mohri2019afl"

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Losses on the samples of ``response``."""
        return Needs(losses=self.response, full_participation=True)

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The projected ascent step, restricted to the clients present."""
        assert info.losses is not None
        first = by_samples(info) if self.prior == "samples" else np.full(info.facts.clients, 1 / info.facts.clients)
        old = state["p"].cpu().numpy() if state else first
        new = old.copy()
        new[info.cohort] += self.step * info.losses
        new = project(new)
        return {"p": torch.from_numpy(new)}, restrict_to_cohort(old if self.simultaneous else new, info.cohort)
