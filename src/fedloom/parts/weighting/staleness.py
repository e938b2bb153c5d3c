"""Smaller shares for stale work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from fedloom.base.ranges import NonNegative, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Halves, Weighting


@dataclass(frozen=True)
class Staleness(Weighting):
    """A factor that falls with the number s = t - s_i of server steps since a client received the model.

    ``polynomial`` is (1 + s)^-a, of which a = 1/2 is FedBuff's; ``hinge`` is 1 up to s = b and 1/(a(s - b) + 1) beyond;
    ``constant`` is 1. Xie et al. 2019 (FedAsync), §5.2; Nguyen et al., AISTATS 2022 (FedBuff), §5.

    >>> info = RoundInfo.of_cohort([0, 1, 2], [1, 1, 1], clients=3)
    >>> from dataclasses import replace
    >>> Staleness().factors(replace(info, t=9, versions=np.array([9, 8, 1]))).round(3)
    array([1.   , 0.707, 0.333])

    Args:
        rule: ``polynomial``, ``hinge`` or ``constant``.
        a: the exponent, or the slope of ``hinge``.
        b: the staleness up to which ``hinge`` is 1.
        models: mix models instead of updates, as FedAsync does: θ ← (1 - αw)θ + αw θ_i, α being the server's rate.
    """

    rule: Literal["polynomial", "hinge", "constant"] = "polynomial"
    a: Positive = 0.5
    b: NonNegative = 4.0
    models: bool = False

    citation = "nguyen2022fedbuff"

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Σ p_i (Δ_i + θ^t - θ^{s_i}) with ``models``: the difference of θ^t and the mean of the clients' models."""
        return state, update + info.lag() if self.models else update

    def factors(self, info: RoundInfo) -> np.ndarray:
        s = info.staleness.astype(np.float64)
        if self.rule == "polynomial":
            return (1 + s) ** -self.a
        return np.ones(len(s)) if self.rule == "constant" else 1 / (self.a * np.maximum(s - self.b, 0) + 1)
