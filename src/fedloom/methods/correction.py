"""Methods against client drift, by what clients minimise, how they step, or how models are put together."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.drift import FedDCDrift, FedDynDrift, FedNovaDrift, FedSplitDrift, Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy, Decorrelation, Proximal


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
def feddyn(alpha: float = 0.01, size_weighted: bool = True) -> Method:
    """Local argmin of F_i(θ) - ⟨h_i, θ⟩ + (α/2)‖θ - θ^t‖², then θ ← mean_S θ_i - h/α.

    Acar et al., ICLR 2021; thesis §2.2, algorithm 1.

    Args:
        alpha: α > 0, the strength of the dynamic regulariser.
        size_weighted: whether the goal weights clients by samples (α_i = α·n̄/n_i, as published) or equally.
    """
    return Method("feddyn", (CrossEntropy(),), drift=FedDynDrift(alpha, size_weighted), mixing=Uniform())


@methods.register
def fednova() -> Method:
    """Normalised averaging: Δ = (Σ p_i τ_i) Σ p_i Δ_i/τ_i with τ_i the number of local steps, p_i = n_i/n.

    Wang et al., NeurIPS 2020. With equal τ_i it is FedAvg.
    """
    return Method("fednova", (CrossEntropy(),), drift=FedNovaDrift())


@methods.register
def fedsplit(s: float = 10.0, active: bool = False) -> Method:
    """Operator splitting: u_i ≈ prox of sF_i at 2x - z_i, z_i ← z_i + 2(u_i - x), x ← mean z_i, by local SGD.

    Pathak & Wainwright, NeurIPS 2020; for partial participation Acar, thesis 2023, §A.1.1.

    Args:
        s: s > 0, the step of the proximal operator.
        active: whether x is the mean of the cohort's z_i (FedSplit Act) or of all clients' (FedSplit All).
    """
    return Method("fedsplit", (CrossEntropy(),), drift=FedSplitDrift(s, active), mixing=Uniform())


@methods.register
def feddc(alpha: float = 0.01, gradient: bool = True, average_over_all: bool = False) -> Method:
    """Local argmin of F_i(θ) + (α/2)‖h_i + θ - θ^t‖² + (1/(ηk))⟨θ, g_i - g⟩, h_i ← h_i + θ_i - θ^t, mean of θ_i + h_i.

    Gao et al., CVPR 2022. Twice FedAvg's communication.

    Args:
        alpha: α ≥ 0, the weight of the drift's penalty.
        gradient: whether the objective has the term with the last local and global updates g_i and g.
        average_over_all: whether the mean of h_i is over all clients rather than the cohort.
    """
    return Method(
        "feddc",
        (CrossEntropy(),),
        drift=FedDCDrift(alpha, gradient, average_over_all=average_over_all),
        mixing=Uniform(),
    )


@methods.register
def feddecorr(beta: float = 0.1) -> Method:
    """Local SGD on F_i(θ) + (β/d²)‖K‖_F², K the correlations of a batch's features; mean weighted by samples.

    Shi et al., ICLR 2023. With β = 0 it is FedAvg.

    Args:
        beta: β ≥ 0.
    """
    return Method("feddecorr", (CrossEntropy(), Decorrelation(beta)))
