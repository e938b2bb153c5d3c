"""The methods of Acar, thesis 2023, chapter 6 and A.1.5, each a composition of terms, a guide and a start."""

from __future__ import annotations

from typing import Any

from fedloom.core.checks import at_least, positive, probability
from fedloom_apps.distill.attention import SemanticAttention
from fedloom_apps.distill.method import Distiller, Guide, distillers
from fedloom_apps.distill.terms import Hint, Labels, Response, Reuse, SelectiveResponse, SelectiveReuse

ACAR = "acar2023thesis"
KAG = "kag2023scaffolding"
HINTON = "hinton2015distilling"
ROMERO = "romero2015fitnets"
SEMCKD = "chen2021cross"
SIMKD = "chen2022knowledge"


def labels(alpha: float) -> Labels:
    """The term on the labels with weight α, which must lie in [0, 1]."""
    probability("distillation: ", alpha=alpha)
    return Labels(alpha)


@distillers.register
def ce(warm: bool = False) -> Distiller:
    """Cross entropy on the labels alone, without a teacher.

    Args:
        warm: whether to start from a student trained in the same way: the control for the effect of a second learning
            rate schedule.
    """
    return Distiller("ce", (Labels(),), warm=warm)


@distillers.register
def kd(alpha: float = 0.1, tau: float = 4.0, warm: bool = True) -> Distiller:
    """α·cross entropy + (1 - α)·τ² KL(t^τ‖s^τ). Hinton et al., 2015; Acar, thesis 2023, eq. (6.1).

    Args:
        alpha: α in [0, 1], the weight of the labels; the thesis tries 0, .1, .5, .9 and 1.
        tau: τ > 0, the temperature of both networks.
        warm: whether to start from a student trained on the labels, as in the thesis.
    """
    terms = (labels(alpha), Response(1 - alpha, tau))
    return Distiller("kd", terms, warm=warm, citation=HINTON)


@distillers.register
def disk(
    alpha: float = 0.1,
    tau: float = 4.0,
    tau_s: float | None = None,
    top_k: int | None = None,
    delta: float | None = None,
    lam_min: float | None = None,
    lam_max: float | None = None,
    lam_period: int = 50,
    passes: int = 3,
    guide_passes: int = 3,
    guide_lr: float | None = None,
    warm: bool = True,
    as_coded: bool = False,
    normaliser: float | None = None,
    support: str | None = None,
    truncate: bool | None = None,
    price: str | None = None,
    cap: float | None = None,
    lr_restarts: bool | None = None,
) -> Distiller:
    """DiSK: a guide learns which predictions are beyond the student, and excuses them within a budget.

    g ← argmin of (1 - α) L_dist(s, g) + λ_r L_budget(s, g) alternates with
    s ← argmin of α L_CE(s) + (1 - α) L_dist(s, g).
    Acar, thesis 2023, algorithm 7, eq. (6.3) to (6.5); Kag et al., ICLR 2023.

    The authors' code (github.com/anilkagak2/DiSK_Distilling_Scaffolded_Knowledge, ``runner.sh``) differs from these
    equations; with ``as_coded`` its values are the defaults of all settings that are null, the guide makes five passes
    before the first round, and the budget falls from δ to .4 in periods of 20 rounds, each starting at .9 of the one
    before. Not copied: their script's K is 10 (here that of the equation), a round there trains the student first, and
    the guide sees new augmentations in each pass.

    Args:
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0, the teacher's temperature.
        tau_s: τ_s > 0, the student's; null fits it to the teacher on the training set (3.5 as coded).
        top_k: K, the number of classes to which g is added; null for 20, but at most a fifth of all.
        delta: δ, the budget; null takes the training error of the warm-started student (.6 as coded).
        lam_min: λ_min; null for .1 (1 as coded).
        lam_max: λ_max; null for 50 (5 as coded).
        lam_period: λ_T in rounds; 0 for a quarter of all rounds, at least four. With fewer rounds there is one period.
        passes: the student's passes in a round.
        guide_passes: the guide's passes in a round.
        guide_lr: the guide's learning rate; null for .003 (.1 as coded). The thesis gives .1 for student and guide.
        warm: whether to start from a student trained on the labels, as in the thesis.
        as_coded: whether settings that are null follow the authors' code instead of the thesis.
        normaliser: weight of log(1 + K g), the excess mass of s + g, in L_dist; null for 0 (1 as coded).
        support: the classes that may be helped: ``top_k``, or ``top_k_and_label`` (as coded); null for ``top_k``.
        truncate: whether the teacher's probabilities are cut to these classes; null for false (true as coded).
        price: the class whose probability prices help in the budget: the ``label``, or the ``teacher``'s most likely
            class (as coded); null for ``label``.
        cap: the largest price; null for none (5 as coded).
        lr_restarts: whether learning rates restart in each of λ's periods; null for false (true as coded).
    """
    published: dict[str, Any] = {"lam_min": 0.1, "lam_max": 50.0, "lr": 0.003}
    coded: dict[str, Any] = {
        "lam_min": 1.0, "lam_max": 5.0, "lr": 0.1, "delta": 0.6, "delta_end": 0.4, "delta_decay": 0.9,
        "price": "teacher", "cap": 5.0, "first_passes": 5, "lr_restarts": True,
    }  # fmt: skip
    coded_term = {"tau_s": 3.5, "support": "top_k_and_label", "truncate": True, "normaliser": 1.0}

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    chosen = given(lam_min=lam_min, lam_max=lam_max, lr=guide_lr, delta=delta)
    chosen |= given(price=price, cap=cap, lr_restarts=lr_restarts)
    guide = Guide(passes=guide_passes, lam_period=lam_period, **((coded if as_coded else published) | chosen))
    chosen = given(tau_s=tau_s, support=support, truncate=truncate, normaliser=normaliser)
    term = SelectiveResponse(1 - alpha, tau, top_k=top_k, **((coded_term if as_coded else {}) | chosen))
    return Distiller("disk", (labels(alpha), term), guide, passes, warm, KAG + "\n\n" + ACAR)


@distillers.register
def fitnet(alpha: float = 0.5, tau: float = 4.0, beta: float = 50.0, layer: int = -2, warm: bool = False) -> Distiller:
    """FitNet: α·cross entropy + (1 - α)·τ² KL + β·(mean squared distance of an intermediate map). Romero et al., 2015.

    Args:
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0.
        beta: β, the weight of the hint.
        layer: index of the map in both networks, from the end if negative.
        warm: whether to start from a student trained on the labels.
    """
    at_least(0, "fitnet: ", beta=beta)
    terms = (labels(alpha), Response(1 - alpha, tau), Hint(beta, layer))
    return Distiller("fitnet", terms, warm=warm, citation=ROMERO)


@distillers.register
def semckd(
    alpha: float = 0.5, tau: float = 4.0, beta: float = 200.0, width: int = 128, warm: bool = False
) -> Distiller:
    """SemCKD: α·cross entropy + (1 - α)·τ² KL + β·(distances of all maps, weighted by attention). Chen et al., 2021.

    The authors' weights 1, 1 and 400 are twice the defaults here.

    Args:
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0.
        beta: β, the weight of the maps.
        width: width of queries and keys.
        warm: whether to start from a student trained on the labels.
    """
    at_least(0, "semckd: ", beta=beta)
    terms = (labels(alpha), Response(1 - alpha, tau), SemanticAttention(beta, width))
    return Distiller("semckd", terms, warm=warm, citation=SEMCKD)


@distillers.register
def simkd(beta: float = 1.0, warm: bool = False) -> Distiller:
    """SimKD: added layers regress the teacher's features, and the teacher's head is reused. Chen et al., 2022.

    The deployed model is larger than the student by these layers and that head.

    Args:
        beta: the weight of the distance.
        warm: whether to start from a student trained on the labels.
    """
    positive("simkd: ", beta=beta)
    return Distiller("simkd", (Reuse(beta),), warm=warm, citation=SIMKD)


@distillers.register
def simkd_disk(
    beta: float = 1.0,
    delta: float | None = None,
    lam_min: float = 0.1,
    lam_max: float = 50.0,
    lam_period: int = 50,
    passes: int = 3,
    guide_passes: int = 3,
    guide_lr: float = 0.003,
    warm: bool = True,
) -> Distiller:
    """SimKD with a guide: β (1 - g)·(distance of features), g within DiSK's budget. Acar, thesis 2023, eq. (A.1).

    Args:
        beta: the weight of the distance.
        delta: δ, the budget; null takes the training error of the warm-started student.
        lam_min: λ_min.
        lam_max: λ_max.
        lam_period: λ_T in rounds; 0 for a quarter of all rounds, at least four. With fewer rounds there is one period.
        passes: the student's passes in a round.
        guide_passes: the guide's passes in a round.
        guide_lr: the guide's learning rate; the thesis gives .1 for student and guide.
        warm: whether to start from a student trained on the labels.
    """
    positive("simkd_disk: ", beta=beta)
    guide = Guide(
        passes=guide_passes, lam_min=lam_min, lam_max=lam_max, lam_period=lam_period, delta=delta, lr=guide_lr
    )
    return Distiller("simkd_disk", (SelectiveReuse(beta),), guide, passes, warm, SIMKD + "\n\n" + KAG)
