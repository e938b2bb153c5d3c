"""The methods of Acar, thesis 2023, chapter 6 and A.1.5, each a composition of terms, a guide and a start.

Terms on logits and features: labels, responses, selective responses, hints, and the reused head. SemCKD: attention of
every student feature map over the teacher's feature maps, per sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Bound, Count, NonNegative, NonNegativeInt, Positive, Probability
from fedloom.parts.objectives import divergence
from fedloom.parts.objectives.guidance import excess, guided
from fedloom_apps.distill.method import (
    Distiller,
    DistillTerm,
    Guide,
    NetworkPair,
    Outputs,
    Sizes,
    distillers,
    fit_temperature,
)


@dataclass(frozen=True)
class Labels(DistillTerm):
    """-log s_y(x), cross entropy with the labels."""

    needs_teacher = False

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        return divergence.cross_entropy(view, y)


@dataclass(frozen=True)
class Response(DistillTerm):
    """τ² KL(t^τ‖s^τ), s^τ = softmax(logits/τ). Hinton et al., 2015; Acar, thesis 2023, eq. (6.1).

    Args:
        weight: weight of the term.
        tau: τ > 0, the temperature of both.
    """

    tau: Positive = 4.0

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        assert teacher is not None
        return divergence.kl(teacher.logits, view, self.tau)


@dataclass(frozen=True)
class SelectiveResponse(DistillTerm):
    """-τ τ_s Σ_y t^τ_y log(s^{τ_s}_y + 1[y ∈ top_K(t^τ)] g); where g is large, the student need not follow.

    Acar, thesis 2023, eq. (6.4). With g = 0 and τ_s = τ it equals ``Response`` up to the entropy of t^τ, which does
    not depend on the student.

    Args:
        weight: weight of the term.
        tau: τ > 0, the teacher's temperature.
        tau_s: τ_s > 0, the student's; None fits it to the teacher after the warm start.
        top_k: K, the number of classes to which g is added; None for 20, but at most a fifth of all.
        support: ``top_k``, or ``top_k_and_label`` to add g to the label's class as well.
        truncate: whether the teacher's probabilities are cut to these classes, as in ``guidance.truncated``.
        normaliser: weight of log(1 + K g), the excess mass of s + g, which only the guide's gradient sees.
    """

    tau: Positive = 4.0
    tau_s: Positive | None = None
    top_k: Count | None = None
    support: Literal["top_k", "top_k_and_label"] = "top_k"
    truncate: bool = False
    normaliser: NonNegative = 0.0

    selective = True

    def student_temperature(self, teacher: Tensor, student: Tensor) -> float | None:
        return fit_temperature(teacher, student, self.tau) if self.tau_s is None else self.tau_s

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        assert teacher is not None
        student_tau = tau_s if self.tau_s is None else self.tau_s
        top_k = min(20, max(view.shape[-1] // 5, 1)) if self.top_k is None else self.top_k
        labels = y if self.support == "top_k_and_label" else None
        loss = guided(view, teacher.logits, g, self.tau, student_tau, top_k, labels, self.truncate)
        count = min(top_k, view.shape[-1])
        return loss + self.normaliser * excess(g, count) if self.normaliser else loss


@dataclass(frozen=True)
class Hint(DistillTerm):
    """‖r(f_s) - f_t‖² / dim(f_t) for one intermediate map each, r learned. FitNet: Romero et al., ICLR 2015.

    r is a 1x1 convolution with batch normalisation on maps pooled to the smaller of both sizes. The paper trains with
    the hint first and the responses later; here both are trained jointly, as in Chen et al. (SimKD, 2022).

    Args:
        weight: weight of the term.
        layer: index of the map in both networks; -1 is the last.
    """

    layer: int = -2

    maps = True

    def pick(self, who: str, maps: tuple[tuple[int, int, int], ...]) -> tuple[int, int, int]:
        """The shape of the map at that index."""
        if not -len(maps) <= self.layer < len(maps):
            raise ConfigError(
                f"a hint compares map {self.layer} of both networks, but the {who} has {len(maps)} maps; "
                "choose another layer, or a method on features or logits alone."
            )
        return maps[self.layer]

    def teacher_maps(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        self.pick("teacher", teacher.maps)
        return (self.layer % len(teacher.maps),)

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        return regression(self.pick("student", student.maps), self.pick("teacher", teacher.maps))

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        assert layers is not None
        return distance(layers, pair.student.maps[self.layer], pair.guidance.maps[self.layer])


@dataclass(frozen=True)
class Reuse(DistillTerm):
    """‖Ψ(f_s) - f_t‖² / dim(f_t): learned layers Ψ map to the teacher's features, whose head is reused.

    SimKD: Chen et al., CVPR 2022. The deployed model is head_T(Ψ(f_s(x))); labels are not used. If the features of both
    networks are the spatial means of their last maps, f are these maps, pooled to the smaller of both sizes, and Ψ is a
    bottleneck of three convolutions (1x1, 3x3, 1x1 at half the teacher's width) followed by the mean; otherwise f are
    the features and Ψ is the same bottleneck with dense layers.

    Args:
        weight: weight of the term.
    """

    maps = True
    reuses_head = True

    def teacher_maps(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        """The last map, if features are its mean."""
        return (len(teacher.maps) - 1,) if student.pooled and teacher.pooled else ()

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        if student.pooled and teacher.pooled:
            return regression(student.maps[-1], teacher.maps[-1], bottleneck=True)
        return dense(student.features, teacher.features)

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        assert layers is not None
        if isinstance(layers, MapRegressor):
            return distance(layers, pair.student.maps[-1], pair.guidance.maps[-1])
        return (layers(pair.student.features) - pair.guidance.features).square().flatten(1).mean(1)

    def features(self, outputs: Outputs, layers: nn.Module | None) -> Tensor:
        """Ψ(f_s), the input of the teacher's head, [B, d]."""
        assert layers is not None
        if isinstance(layers, MapRegressor):
            return layers(outputs.maps[-1]).mean((2, 3))
        return layers(outputs.features)


@dataclass(frozen=True)
class SelectiveReuse(Reuse):
    """(1 - g(x)) ‖Ψ(f_s) - f_t‖² / dim(f_t), with the head as in ``Reuse``.

    Acar, thesis 2023, eq. (A.1), whose minus sign is a misprint, and table A.14.
    """

    selective = True

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        return (1 - g) * view


class MapRegressor(nn.Module):
    """Maps the student's feature map to the teacher's channels: pooled to the smaller size, then convolved."""

    def __init__(self, body: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.body = body
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """[B, c_s, H, W] to [B, c_t, h, w]."""
        return self.body(average_pool(x, self.size))


def average_pool(x: Tensor, size: tuple[int, int]) -> Tensor:
    """A map [B, c, H, W] average-pooled to a size not larger than its own."""
    return x if tuple(x.shape[2:]) == size else F.adaptive_avg_pool2d(x, size)


def regression(student: tuple[int, int, int], teacher: tuple[int, int, int], bottleneck: bool = False) -> MapRegressor:
    """Make layers from one map's shape to another's channels, at the smaller of both sizes."""
    size = (min(student[1], teacher[1]), min(student[2], teacher[2]))
    inputs, outputs = student[0], teacher[0]
    if not bottleneck:
        return MapRegressor(nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU()), size)
    middle = max(outputs // 2, 1)
    body = nn.Sequential()
    for (a, b), kernel in zip(pairwise((inputs, middle, middle, outputs)), (1, 3, 1), strict=True):
        body.extend([nn.Conv2d(a, b, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()])
    return MapRegressor(body, size)


def dense(inputs: int, outputs: int) -> nn.Sequential:
    """The bottleneck for vectors: three dense layers at half the teacher's width, without a final ReLU."""
    middle = max(outputs // 2, 1)
    body = nn.Sequential()
    for a, b in ((inputs, middle), (middle, middle)):
        body.extend([nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()])
    body.append(nn.Linear(middle, outputs))
    return body


def distance(layers: nn.Module, student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared distances [B] of regressed maps from the teacher's."""
    maps = layers(student)
    return (maps - average_pool(teacher, (maps.shape[2], maps.shape[3]))).square().flatten(1).mean(1)


class AttentionLayers(nn.Module):
    """Queries from the student's maps, keys from the teacher's, and a projection for each pair of maps.

    An embedding is two dense layers on a row of a map's similarity matrix, whose length is the batch size.
    """

    def __init__(self, student: Sizes, teacher: Sizes, batch_size: int, width: int) -> None:
        super().__init__()
        self.batch_size = batch_size

        def embedding() -> nn.Module:
            return nn.Sequential(nn.Linear(batch_size, width), nn.ReLU(), nn.Linear(width, width))

        self.queries = nn.ModuleList(embedding() for _ in student.maps)
        self.keys = nn.ModuleList(embedding() for _ in teacher.maps)
        self.projections = nn.ModuleList(
            nn.ModuleList(regression(s, t, bottleneck=True) for t in teacher.maps) for s in student.maps
        )

    def weights(self, student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
        """α [B, student's maps, teacher's maps]; each row is a distribution over the teacher's maps."""
        queries = torch.stack([q(self.rows(m)) for q, m in zip(self.queries, student, strict=True)], 1)
        keys = torch.stack([k(self.rows(m)) for k, m in zip(self.keys, teacher, strict=True)], 1)  # [B, T, width]
        queries, keys = F.normalize(queries, dim=-1), F.normalize(keys, dim=-1)
        return (queries @ keys.transpose(1, 2)).softmax(-1)

    def rows(self, maps: Tensor) -> Tensor:
        """Similarities of each sample's map to those of the batch, [B, batch size], rows of unit norm."""
        flat = maps.flatten(1)
        rows = F.normalize(flat @ flat.T, dim=1)
        return F.pad(rows, (0, self.batch_size - len(rows)))  # an epoch's last batch may be smaller

    def forward(self, student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
        """Distances weighted by α, [B]."""
        alpha = self.weights(student, teacher)
        total = alpha.new_zeros(len(alpha))
        for i, (s, projections) in enumerate(zip(student, self.projections, strict=True)):
            for j, (t, projection) in enumerate(zip(teacher, projections, strict=True)):  # type: ignore[arg-type]
                total = total + alpha[:, i, j] * distance(projection, s, t)
        return total / len(student)


@dataclass(frozen=True)
class SemanticAttention(DistillTerm):
    """(1/L) Σ_l Σ_k α_{lk} ‖P_{lk}(f_s^l) - f_t^k‖² / dim(f_t^k) over L maps l of the student and all k of the teacher.

    α_{l·}(x) = softmax_k(q_l(x)·k_k(x)): q and k are unit vectors, embeddings of the sample's row in the similarity
    matrix F Fᵀ of a map F over the mini-batch. P are bottlenecks of three convolutions on maps pooled to the smaller of
    both sizes. SemCKD: Chen et al., AAAI 2021. Deviations: rows of F Fᵀ are normalised, so that their scale does not
    depend on the map's size, and a smaller last batch is padded with zeros.

    Args:
        weight: weight of the term.
        width: width of queries and keys.
    """

    width: Count = 128

    maps = True

    def teacher_maps(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        return tuple(range(len(teacher.maps)))

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        for who, sizes in (("student", student), ("teacher", teacher)):
            if not sizes.maps:
                raise ConfigError(
                    f"SemCKD compares feature maps, but the {who} has none; choose a method on logits, like kd."
                )
        return AttentionLayers(student, teacher, batch_size, self.width)

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        assert layers is not None
        return layers(pair.student.maps, pair.guidance.maps)

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        return view


KAG = "kag2023scaffolding"
SIMKD = "chen2022knowledge"


@distillers.register
def ce(warm: bool = False) -> Distiller:
    """Cross entropy on the labels alone, without a teacher.

    Args:
        warm: whether to start from a student trained in the same way: the control for the effect of a second learning
            rate schedule.
    """
    return Distiller("ce", (Labels(),), warm=warm)


@distillers.register
def kd(alpha: Probability = 0.1, tau: Positive = 4.0, warm: bool = True) -> Distiller:
    """α·cross entropy + (1 - α)·τ² KL(t^τ‖s^τ). Hinton et al., 2015; Acar, thesis 2023, eq. (6.1).

    Args:
        alpha: α in [0, 1], the weight of the labels; the thesis tries 0, .1, .5, .9 and 1.
    """
    terms = (Labels(alpha), Response(1 - alpha, tau))
    return Distiller("kd", terms, warm=warm, citation="hinton2015distilling")


@distillers.register
def disk(
    alpha: Probability = 0.1,
    tau: Positive = 4.0,
    tau_s: Positive | None = None,
    top_k: Count | None = None,
    delta: NonNegative | None = None,
    lam_min: NonNegative | None = None,
    lam_max: NonNegative | None = None,
    lam_period: NonNegativeInt = 50,
    passes: Count = 3,
    guide_passes: Count = 3,
    guide_lr: Positive | None = None,
    warm: bool = True,
    as_coded: bool = False,
    normaliser: NonNegative | None = None,
    support: Literal["top_k", "top_k_and_label"] | None = None,
    truncate: bool | None = None,
    price: Literal["label", "teacher"] | None = None,
    cap: Bound | None = None,
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
        tau: τ, the teacher's temperature.
        tau_s: τ_s, the student's; null fits it to the teacher on the training set (3.5 as coded).
        top_k: K, the number of classes to which g is added; null for 20, but at most a fifth of all.
        delta: δ, the budget; null takes the training error of the warm-started student (.6 as coded).
        lam_min: λ_min; null for .1 (1 as coded).
        lam_max: λ_max; null for 50 (5 as coded).
        guide_lr: the guide's learning rate; null for .003 (.1 as coded). The thesis gives .1 for student and guide.
        as_coded: whether settings that are null follow the authors' code instead of the thesis.
        normaliser: weight of log(1 + K g), the excess mass of s + g, in L_dist; null for 0 (1 as coded).
        support: the classes that may be helped: ``top_k``, or ``top_k_and_label`` (as coded); null for ``top_k``.
        truncate: whether the teacher's probabilities are cut to these classes; null for false (true as coded).
        price: the class whose probability prices help in the budget: the ``label``, or the ``teacher``'s most likely
            class (as coded); null for ``label``.
        cap: the largest price; null for none (5 as coded).
        lr_restarts: whether learning rates restart in each of λ's periods; null for false (true as coded).
    """
    thesis_settings: dict[str, Any] = {"lam_min": 0.1, "lam_max": 50.0, "lr": 0.003}
    code_settings: dict[str, Any] = {
        "lam_min": 1.0, "lam_max": 5.0, "lr": 0.1, "delta": 0.6, "delta_end": 0.4, "delta_decay": 0.9,
        "price": "teacher", "cap": 5.0, "first_passes": 5, "lr_restarts": True,
    }  # fmt: skip
    code_term_settings = {"tau_s": 3.5, "support": "top_k_and_label", "truncate": True, "normaliser": 1.0}

    def without_none(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    guide_settings = without_none(lam_min=lam_min, lam_max=lam_max, lr=guide_lr, delta=delta)
    guide_settings |= without_none(price=price, cap=cap, lr_restarts=lr_restarts)
    defaults = code_settings if as_coded else thesis_settings
    guide = Guide(passes=guide_passes, lam_period=lam_period, **(defaults | guide_settings))
    term_settings = without_none(tau_s=tau_s, support=support, truncate=truncate, normaliser=normaliser)
    term = SelectiveResponse(1 - alpha, tau, top_k=top_k, **((code_term_settings if as_coded else {}) | term_settings))
    return Distiller("disk", (Labels(alpha), term), guide, passes, warm, f"{KAG}\n\nacar2023thesis")


@distillers.register
def fitnet(
    alpha: Probability = 0.5, tau: Positive = 4.0, beta: NonNegative = 50.0, layer: int = -2, warm: bool = False
) -> Distiller:
    """FitNet: α·cross entropy + (1 - α)·τ² KL + β·(mean squared distance of an intermediate map). Romero et al., 2015.

    Args:
        beta: β, the weight of the hint.
        layer: index of the map in both networks, from the end if negative.
    """
    terms = (Labels(alpha), Response(1 - alpha, tau), Hint(beta, layer))
    return Distiller("fitnet", terms, warm=warm, citation="romero2015fitnets")


@distillers.register
def semckd(
    alpha: Probability = 0.5, tau: Positive = 4.0, beta: NonNegative = 200.0, width: Count = 128, warm: bool = False
) -> Distiller:
    """SemCKD: α·cross entropy + (1 - α)·τ² KL + β·(distances of all maps, weighted by attention). Chen et al., 2021.

    The authors' weights 1, 1 and 400 are twice the defaults here.

    Args:
        beta: β, the weight of the maps.
        width: width of queries and keys.
    """
    terms = (Labels(alpha), Response(1 - alpha, tau), SemanticAttention(beta, width))
    return Distiller("semckd", terms, warm=warm, citation="chen2021cross")


@distillers.register
def simkd(beta: Positive = 1.0, warm: bool = False) -> Distiller:
    """SimKD: added layers regress the teacher's features, and the teacher's head is reused. Chen et al., 2022.

    The deployed model is larger than the student by these layers and that head.

    Args:
        beta: the weight of the distance.
    """
    return Distiller("simkd", (Reuse(beta),), warm=warm, citation=SIMKD)


@distillers.register
def simkd_disk(
    beta: Positive = 1.0,
    delta: NonNegative | None = None,
    lam_min: NonNegative = 0.1,
    lam_max: NonNegative = 50.0,
    lam_period: NonNegativeInt = 50,
    passes: Count = 3,
    guide_passes: Count = 3,
    guide_lr: Positive = 0.003,
    warm: bool = True,
) -> Distiller:
    """SimKD with a guide: β (1 - g)·(distance of features), g within DiSK's budget. Acar, thesis 2023, eq. (A.1).

    Args:
        beta: the weight of the distance.
        delta: δ, the budget; null takes the training error of the warm-started student.
        lam_min: λ_min.
        lam_max: λ_max.
        guide_lr: the guide's learning rate; the thesis gives .1 for student and guide.
    """
    guide = Guide(
        passes=guide_passes, lam_min=lam_min, lam_max=lam_max, lam_period=lam_period, delta=delta, lr=guide_lr
    )
    return Distiller("simkd_disk", (SelectiveReuse(beta),), guide, passes, warm, SIMKD + "\n\n" + KAG)
