"""Methods with private parameters."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import APFL, Alternating, Ditto, PFedMe, PrivateBody, PrivateHead, Subspace
from fedloom.parts.server import SGD


@methods.register
def fedper() -> Method:
    """The body is shared and averaged, each client keeps its own head; both are trained together.

    Arivazhagan et al. 2019. A client that never took part deploys the shared body with the initial head.
    """
    return Method("fedper", (CrossEntropy(),), personal=PrivateHead())


@methods.register
def lg_fedavg() -> Method:
    """The head is shared and averaged, each client keeps its own body. Liang et al. 2020."""
    return Method("lg_fedavg", (CrossEntropy(),), personal=PrivateBody())


@methods.register
def fedrep(head_fraction: float = 0.9) -> Method:
    """Private head and shared body, trained one after the other: first the head, then the body. Collins et al., 2021.

    Args:
        head_fraction: the share of the round's steps that train the head.
    """
    return Method("fedrep", (CrossEntropy(),), personal=Alternating(head_fraction))


@methods.register
def apfl(alpha: float = 0.25, learn: bool = False) -> Method:
    """w as in FedAvg, and v ← v - ηα∇F_i(αv + (1 - α)w); the mixture is deployed. Deng, Kamani & Mahdavi 2020.

    Args:
        alpha: α in [0, 1]; with 0 it is FedAvg.
        learn: whether each client learns its α.
    """
    return Method("apfl", (CrossEntropy(),), personal=APFL(alpha, learn))


@methods.register
def ditto(lam: float = 0.1) -> Method:
    """w as in FedAvg, and v by F_i(v) + (λ/2)‖v - θ^t‖², which is deployed. Li et al., ICML 2021.

    Args:
        lam: λ.
    """
    return Method("ditto", (CrossEntropy(),), personal=Ditto(lam))


@methods.register
def pfedme(lam: float = 15.0, steps: int = 5, personal_lr: float = 1.0, beta: float = 1.0) -> Method:
    """Moreau envelopes: v ≈ argmin F_i(v) + (λ/2)‖v - w‖², w ← w - ηλ(w - v). T. Dinh, Tran & Nguyen 2020.

    Args:
        lam: λ.
        steps: K, inner steps a mini-batch.
        personal_lr: the learning rate of v relative to the local one.
        beta: β, θ ← (1 - β)θ + β·mean at the server.
    """
    return Method("pfedme", (CrossEntropy(),), personal=PFedMe(lam, steps, personal_lr), server=SGD(beta))


@methods.register
def superfed_mm(mu: float = 0.01, nu: float = 1.0, start_round: int = 0) -> Method:
    """SuPerFed, model mixing: loss at (1 - λ)w + λv, λ ~ U(0, 1), + (μ/2)‖w - θ^t‖² + ν cos²(w, v). Hahn et al., 2022.

    Args:
        mu: μ.
        nu: ν.
        start_round: L, the round from which v takes part.
    """
    return Method("superfed_mm", (CrossEntropy(),), personal=Subspace(False, mu, nu, start_round))


@methods.register
def superfed_lm(mu: float = 0.01, nu: float = 1.0, start_round: int = 0) -> Method:
    """SuPerFed, layer mixing: as ``superfed_mm``, with a λ of its own for each layer. Hahn et al., 2022.

    Args:
        mu: μ.
        nu: ν.
        start_round: L, the round from which v takes part.
    """
    return Method("superfed_lm", (CrossEntropy(),), personal=Subspace(True, mu, nu, start_round))
