"""FedAvg with another server optimiser on Δ = Σ p_i (θ^t - θ_i)."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.server import SGD, Adagrad, Adam, Extrapolated, Yogi


@methods.register
def fedavgm(lr: float = 1.0, momentum: float = 0.9) -> Method:
    """Server momentum: m ← βm + Δ, θ ← θ - ηm. Hsu et al. 2019. With β = 0 and η = 1 it is FedAvg.

    Args:
        lr: server learning rate η.
        momentum: β.
    """
    return Method("fedavgm", (CrossEntropy(),), server=SGD(lr, momentum))


@methods.register
def fedadam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Method:
    """Adam at the server: v ← β₂v + (1-β₂)Δ², θ ← θ - η m/(√v + τ). Reddi et al., ICLR 2021."""
    return Method("fedadam", (CrossEntropy(),), server=Adam(lr, beta1, beta2, tau))


@methods.register
def fedyogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Method:
    """Yogi at the server: v ← v - (1-β₂)Δ² sign(v - Δ²), θ ← θ - η m/(√v + τ). Reddi et al., ICLR 2021."""
    return Method("fedyogi", (CrossEntropy(),), server=Yogi(lr, beta1, beta2, tau))


@methods.register
def fedadagrad(lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3) -> Method:
    """Adagrad at the server: v ← v + Δ², θ ← θ - η m/(√v + τ). Reddi et al., ICLR 2021 (β₁ = 0 in its experiments)."""
    return Method("fedadagrad", (CrossEntropy(),), server=Adagrad(lr, beta1, tau))


@methods.register
def fedexp(eps: float = 1e-3) -> Method:
    """Extrapolation: θ ← θ - ηΔ, η = max{1, Σ‖Δ_i‖² / (2|S|(‖Δ‖² + ε))}, unweighted mean.

    Jhunjhunwala et al., ICLR 2023.

    Args:
        eps: ε ≥ 0.
    """
    return Method("fedexp", (CrossEntropy(),), mixing=Uniform(), server=Extrapolated(eps))
