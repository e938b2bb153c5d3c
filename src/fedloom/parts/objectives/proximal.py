"""The proximal term of FedProx."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.core.context import Context
from fedloom.core.parts import Term
from fedloom.core.ranges import NonNegative


@dataclass(frozen=True)
class Proximal(Term):
    """(μ/2)‖θ - θ^t‖², with the *squared* norm, which keeps local models close to the received one.

    Its gradient μ(θ - θ^t) is added in closed form. θ are the shared parameters; a client receives no others.
    Li et al., MLSys 2020, eq. (2).

    Args:
        mu: μ ≥ 0, weight of the proximal term; 0 gives FedAvg.
    """

    mu: NonNegative = 0.01

    affine = True
    citation = "li2020fedprox"

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """g + μ(θ - θ^t); the difference is taken first, so that it is exactly zero at θ = θ^t, without rounding."""
        return grad.add_(w - ctx.received, alpha=self.mu)
