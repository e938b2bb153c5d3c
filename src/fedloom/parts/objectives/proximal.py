"""Terms that keep local models near the received one: the proximal term of FedProx, and the cosine of pFedGraph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.ranges import NonNegative
from fedloom.core.context import Context
from fedloom.core.parts import Term


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


@dataclass(frozen=True)
class CosinePull(Term):
    """λ(1 - cos(θ, θ^t)), which keeps local models in the direction of the received one, whatever their length.

    Its gradient λ(cos(θ, θ^t) θ/‖θ‖ - θ^t/‖θ^t‖)/‖θ‖ is added in closed form; a model of zeros has no direction and is
    not pulled. θ are the shared parameters. This is the local term of pFedGraph, in which each client receives a
    mixture of its own (Ye et al., ICML 2023). The authors' code leaves it out of the first round and adds the cosine
    where this subtracts it; of its two variants one has this cosine, the other Σ_j B_ij w_j/‖w_j‖ in the place of
    θ^t/‖θ^t‖.

    Args:
        lam: λ ≥ 0.
    """

    lam: NonNegative = 0.01

    citation = "ye2023pfedgraph"

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """g + λ(cos(θ, θ^t) θ/‖θ‖ - θ^t/‖θ^t‖)/‖θ‖."""
        norm, received_norm = float(w.norm()), float(ctx.received.norm())
        if not (norm and received_norm):
            return grad
        cosine = float(w @ ctx.received) / (norm * received_norm)
        grad = grad.add_(w, alpha=self.lam * cosine / norm**2)
        return grad.sub_(ctx.received, alpha=self.lam / (norm * received_norm))
