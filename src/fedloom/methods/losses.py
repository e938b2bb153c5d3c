"""Methods with a stronger local loss: a contrastive term, a teacher (followed or selectively so), augmentations.

Each of them runs with any drift correction, mixing and server optimiser; with FedDyn's, for example::

    fedloom run method=distill method.drift=dynamic method.drift.alpha=0.1 method.mixing=uniform teacher=runs/...
"""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.objectives import Contrastive, CrossEntropy, Distillation, Robustness, Selective

ACAR = """@phdthesis{acar2023thesis, title={Learning with Constraints on Processing and Supervision},
  author={Acar, Durmus Alp Emre}, school={Boston University}, year={2023}}"""


@methods.register
def moon(mu: float = 0.1, tau: float = 0.5) -> Method:
    """MOON: cross entropy - μ log[e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})] on features z.

    Li, He & Song, CVPR 2021. Keeps every client's last model; with μ = 0 it is FedAvg.

    Args:
        mu: μ ≥ 0; its authors take 1 to 10.
        tau: τ > 0, the temperature.
    """
    return Method("moon", (CrossEntropy(), Contrastive(mu, tau)))


@methods.register
def distill(alpha: float = 0.1, tau: float = 3.5) -> Method:
    """Clients minimise α·cross entropy + (1 - α)·τ² KL(teacher‖model) at temperature τ.

    Acar, thesis 2023, §7.2, eq. (7.3). Needs ``teacher=``, the run of a trained model; with α = 1 it is FedAvg.

    Args:
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0.
    """
    return Method("distill", (Distillation(alpha, tau),), citation=ACAR)


@methods.register
def disk(
    alpha: float = 0.1,
    tau: float = 3.5,
    top_k: int = 2,
    delta: float = 0.1,
    lam_min: float = 0.1,
    lam_max: float = 50.0,
    lam_period: int = 50,
    guide_lr: float = 0.02,
) -> Method:
    """Selective distillation in a federation: as distillation, where the model is helped as far as a guide allows.

    Our composition of what Acar, thesis 2023, names as the next step in §7.2: DiSK (ch. 6) as the clients' objective,
    with a guide of C + 1 numbers that is federated like the model. Needs ``teacher=``, the run of a trained model; with
    K = 0 it is distillation.

    Args:
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0, the temperature of both.
        top_k: K ≥ 0, how many of the teacher's classes may be helped.
        delta: δ ≥ 0, the budget of help.
        lam_min: λ_min ≥ 0, the budget's least multiplier.
        lam_max: λ_max ≥ λ_min.
        lam_period: λ_T ≥ 1, rounds from one to the other.
        guide_lr: the guide's learning rate.
    """
    term = Selective(alpha, tau, None, top_k, delta, lam_min, lam_max, lam_period, guide_lr)
    return Method("disk", (term,), citation=ACAR)


@methods.register
def robust(alpha: float = 0.5, tau: float = 3.5) -> Method:
    """Clients minimise α·cross entropy + (1 - α)·τ² KL between the predictions for two augmentations of a sample.

    Acar, thesis 2023, §7.2, eq. (7.2). Needs ``augment=``; with α = 1 it is FedAvg.

    Args:
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0.
    """
    return Method("robust", (Robustness(alpha, tau),), citation=ACAR)


@methods.register
def distill_robust(alpha: float = 0.1, tau: float = 3.5) -> Method:
    """The sum: α·cross entropy + (1 - α)·τ² KL(teacher‖model) + (1 - α)·τ² KL between two augmentations.

    Acar, thesis 2023, §7.2, eq. (7.4). Needs ``teacher=`` and ``augment=``; with α = 1 it is FedAvg.

    Args:
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0.
    """
    terms = (Distillation(alpha, tau), Robustness(alpha, tau, labels=False))
    return Method("distill_robust", terms, citation=ACAR)
