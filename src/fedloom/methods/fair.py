"""Methods that choose mixing coefficients for fairness between clients, from the losses of the received model."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.mixing import AFL, QFFL, TERM, AAggFFD, AAggFFS, FedMGDA
from fedloom.parts.objectives import CrossEntropy, PropFair


@methods.register
def afl(step: float = 0.1) -> Method:
    """Agnostic: p ← Proj_Δ(p + γF), towards min_θ max_p Σ p_i F_i. All clients in all rounds. Mohri et al., ICML 2019.

    Args:
        step: γ ≥ 0; with 0 it is FedAvg.
    """
    return Method("afl", (CrossEntropy(),), mixing=AFL(step))


@methods.register
def q_ffl(q: float = 1.0) -> Method:
    """q-FedAvg: p_i ∝ n_i F_i^q, Δ = Σ n_i F_i^q LΔ_i / Σ n_i (qF_i^{q-1}‖LΔ_i‖² + LF_i^q), L = 1/η. Li et al., 2020.

    Args:
        q: q ≥ 0; with 0 it is FedAvg.
    """
    return Method("q_ffl", (CrossEntropy(),), mixing=QFFL(q))


@methods.register
def term(lam: float = 1.0) -> Method:
    """Tilted risk: p_i ∝ n_i exp(λF_i). Li et al., ICLR 2021.

    Args:
        lam: λ; with 0 it is FedAvg.
    """
    return Method("term", (CrossEntropy(),), mixing=TERM(lam))


@methods.register
def propfair(M: float = 2.0, eps: float = 0.2) -> Method:
    """Proportional fairness: local steps on -log(M - ℓ), its tangent where M - ℓ < ε; the mean weighted by samples.

    Zhang et al., 2022, as its authors run it. With cross entropy and the mixing part ``propfair``, the factor 1/(M - F)
    goes into the mixing coefficients instead (Hahn 2024, table 3.2).

    Args:
        M: M.
        eps: ε.
    """
    return Method("propfair", (PropFair(M, eps),))


@methods.register
def fedmgda(eps: float = 0.1, lr: float = 1.0) -> Method:
    """FedMGDA+: θ ← θ - η Σ λ_i Δ_i/‖Δ_i‖, the shortest such mixture with |λ_i - n_i/n| ≤ ε. Hu et al., 2022.

    Args:
        eps: ε ≥ 0, how far coefficients may be from the samples' shares.
        lr: η, the length that a step has at most.
    """
    return Method("fedmgda", (CrossEntropy(),), mixing=FedMGDA(eps, lr))


@methods.register
def aaggff_s(cdf: str = "normal", scale: float = 1.0, shape: float = 0.0) -> Method:
    """AAggFF for silos: p by online Newton steps on CDF(F_i/F̄)/K. All clients in all rounds. Hahn et al., ICML 2024.

    Args:
        cdf: ``weibull``, ``frechet``, ``gumbel``, ``exponential``, ``logistic`` or ``normal``.
        scale: of the distribution.
        shape: of the distribution; 0 for the usual one.
    """
    return Method("aaggff_s", (CrossEntropy(),), mixing=AAggFFS(cdf, scale, shape))


@methods.register
def aaggff_d(cdf: str = "weibull", scale: float = 1.0, shape: float = 0.0) -> Method:
    """AAggFF for devices: p_i ∝ exp(-√(log K) Σ ğ_i / (Ľ√(t+1))), doubly robust gradients ğ. Hahn et al., ICML 2024.

    Args:
        cdf: ``weibull``, ``frechet``, ``gumbel``, ``exponential``, ``logistic`` or ``normal``.
        scale: of the distribution.
        shape: of the distribution; 0 for the usual one.
    """
    return Method("aaggff_d", (CrossEntropy(),), mixing=AAggFFD(cdf, scale, shape))
