"""Terms on logits and features: labels, responses, selective responses, hints, and the reused head."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError
from fedloom.core.ranges import Count, NonNegative, Positive
from fedloom.parts.objectives import divergence
from fedloom.parts.objectives.guidance import excess, guided
from fedloom_apps.distill.guide import fit_temperature
from fedloom_apps.distill.method import DistillTerm, NetworkPair
from fedloom_apps.distill.taps import Outputs, Sizes


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


SUPPORTS = ("top_k", "top_k_and_label")


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
    support: str = "top_k"
    truncate: bool = False
    normaliser: NonNegative = 0.0

    selective = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("unknown support", self.support, SUPPORTS)

    def student_temperature(self, teacher: Tensor, student: Tensor) -> float | None:
        return fit_temperature(teacher, student, self.tau) if self.tau_s is None else self.tau_s

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        assert teacher is not None
        at = tau_s if self.tau_s is None else self.tau_s
        top_k = min(20, max(view.shape[-1] // 5, 1)) if self.top_k is None else self.top_k
        labels = y if self.support == "top_k_and_label" else None
        loss = guided(view, teacher.logits, g, self.tau, at, top_k, labels, self.truncate)
        helped = min(top_k, view.shape[-1])
        return loss + self.normaliser * excess(g, helped) if self.normaliser else loss


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

    def kept(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
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

    def kept(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
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
        return self.body(pooled(x, self.size))


def pooled(x: Tensor, size: tuple[int, int]) -> Tensor:
    """A map [B, c, H, W] average-pooled to a size not larger than its own."""
    return x if tuple(x.shape[2:]) == size else F.adaptive_avg_pool2d(x, size)


def regression(student: tuple[int, int, int], teacher: tuple[int, int, int], bottleneck: bool = False) -> MapRegressor:
    """Make layers from one map's shape to another's channels, at the smaller of both sizes."""
    size = (min(student[1], teacher[1]), min(student[2], teacher[2]))
    before, after = student[0], teacher[0]
    if not bottleneck:
        return MapRegressor(nn.Sequential(nn.Conv2d(before, after, 1), nn.BatchNorm2d(after), nn.ReLU()), size)
    middle = max(after // 2, 1)
    body = nn.Sequential()
    for (a, b), kernel in zip(pairwise((before, middle, middle, after)), (1, 3, 1), strict=True):
        body.extend([nn.Conv2d(a, b, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()])
    return MapRegressor(body, size)


def dense(before: int, after: int) -> nn.Sequential:
    """The bottleneck for vectors: three dense layers at half the teacher's width, without a final ReLU."""
    middle = max(after // 2, 1)
    body = nn.Sequential()
    for a, b in ((before, middle), (middle, middle)):
        body.extend([nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()])
    body.append(nn.Linear(middle, after))
    return body


def distance(layers: nn.Module, student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared distances [B] of regressed maps from the teacher's."""
    ours = layers(student)
    return (ours - pooled(teacher, (ours.shape[2], ours.shape[3]))).square().flatten(1).mean(1)
