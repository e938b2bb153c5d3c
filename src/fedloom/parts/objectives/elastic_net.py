"""The elastic net penalty, as a proximal step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import softshrink

from fedloom.base.ranges import NonNegative
from fedloom.core.context import Context
from fedloom.core.parts import Term


@dataclass(frozen=True)
class ElasticNet(Term):
    """l1‖θ‖₁ + (l2/2)‖θ‖², applied as a proximal map after every local step: small parameters become exactly zero.

    ::

        θ ← S(θ - ηg, η l1) / (1 + η l2)        S(a, t) = sign(a) max(|a| - t, 0)

    A subgradient step would leave parameters near zero but not at zero. Momentum and Adam act on the smooth terms only.
    θ are the shared parameters: there is no penalty on those that a client keeps private.
    Zou & Hastie, JRSS B 2005; Parikh & Boyd 2014, §6.5.3. With l1 = l2 = 0 there is no penalty.

    Args:
        l1: weight of the sum of absolute values, ≥ 0.
        l2: weight of half the sum of squares, ≥ 0.
    """

    l1: NonNegative = 1e-4
    l2: NonNegative = 0.0

    citation = "zou2005elastic"

    def prox(self, w: Tensor, lr: float, ctx: Context) -> None:
        w.copy_(softshrink(w, lr * self.l1) / (1 + lr * self.l2))
