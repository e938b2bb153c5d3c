"""Methods against client drift: a proximal term, control variates, dynamic regularisation, normalised averaging."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.drift import Dynamic, Normalized, Scaffold
from fedloom.methods.registry import methods
from fedloom.mixing import Uniform
from fedloom.objectives import CrossEntropy, Proximal


@methods.register
def fedprox(mu: float = 0.01) -> Method:
    """Local SGD on F_i(θ) + (μ/2)‖θ - θ^t‖², then the mean weighted by samples.

    Li et al., MLSys 2020. With μ = 0 it is FedAvg.

    Args:
        mu: μ ≥ 0, the strength of the (squared) proximal term.
    """
    return Method("fedprox", (CrossEntropy(), Proximal(mu)))


@methods.register
def scaffold() -> Method:
    """Steps along g - c_i + c with control variates c_i, c; unweighted mean. Twice FedAvg's communication.

    Karimireddy et al., ICML 2020. Its first round is FedAvg's with uniform mixing.
    """
    return Method("scaffold", (CrossEntropy(),), drift=Scaffold(), mixing=Uniform())


@methods.register
def feddyn(alpha: float = 0.01, by_size: bool = True) -> Method:
    """Local argmin of F_i(θ) - ⟨h_i, θ⟩ + (α/2)‖θ - θ^t‖², then θ ← mean_S θ_i - h/α.

    Acar et al., ICLR 2021; thesis §2.2, algorithm 1.

    Args:
        alpha: α > 0, the strength of the dynamic regulariser.
        by_size: whether the goal weights clients by samples (α_i = α·n̄/n_i, as published) or equally.
    """
    return Method("feddyn", (CrossEntropy(),), drift=Dynamic(alpha, by_size), mixing=Uniform())


@methods.register
def fednova() -> Method:
    """Normalised averaging: Δ = (Σ p_i τ_i) Σ p_i Δ_i/τ_i with τ_i the number of local steps, p_i = n_i/n.

    Wang et al., NeurIPS 2020. With equal τ_i it is FedAvg.
    """
    return Method("fednova", (CrossEntropy(),), drift=Normalized())
