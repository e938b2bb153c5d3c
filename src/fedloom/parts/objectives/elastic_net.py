"""The elastic net penalty, as a proximal step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import softshrink

from fedloom.core.checks import at_least
from fedloom.core.context import Context
from fedloom.core.parts import Needs, Term
from fedloom.core.slots import objectives


@objectives.register(name="elastic_net")
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

    Raises:
        ConfigError: if a weight is negative or not finite.
    """

    l1: float = 1e-4
    l2: float = 0.0

    needs = Needs(shared=True)
    citation = "zou2005elastic"

    def __post_init__(self) -> None:
        at_least(0, "objective 'elastic_net': ", l1=self.l1, l2=self.l2)

    def prox(self, w: Tensor, lr: float, ctx: Context) -> None:
        w.copy_(softshrink(w, lr * self.l1) / (1 + lr * self.l2))
