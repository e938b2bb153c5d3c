"""Terms on predictions and features: labels, the teacher's answers, selective ones, hints, the teacher's own head."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.parts.objectives import divergence
from fedloom.parts.objectives.guidance import guided
from fedloom.tasks.distill.method import DistillTerm, NetworkPair
from fedloom.tasks.distill.taps import Outputs, Sizes


def temperature(name: str, tau: float | None) -> None:
    """Refuse a temperature that is not positive and finite."""
    if tau is not None and not 0 < tau < float("inf"):
        raise ConfigError(f"distillation needs a finite temperature {name} > 0, not {tau:g}.")


@dataclass(frozen=True)
class Labels(DistillTerm):
    """-log s_y(x), the cross entropy of the labels."""

    needs_teacher = False

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        """The student's logits."""
        return pair.student.logits

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """See ``DistillTerm.guided``."""
        return divergence.cross_entropy(view, y)


@dataclass(frozen=True)
class Response(DistillTerm):
    """τ² KL(t^τ‖s^τ), s^τ = softmax(logits/τ). Hinton et al., 2015; Acar, thesis 2023, eq. (6.1).

    Args:
        weight: of the term.
        tau: τ > 0, the temperature of both.
    """

    tau: float = 4.0

    def __post_init__(self) -> None:
        temperature("tau", self.tau)

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        """The student's logits."""
        return pair.student.logits

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """See ``DistillTerm.guided``."""
        assert teacher is not None
        return divergence.kl(teacher.logits, view, self.tau)


@dataclass(frozen=True)
class SelectiveResponse(DistillTerm):
    """-τ τ_s Σ_y t^τ_y log(s^{τ_s}_y + 1[y ∈ top_K(t^τ)] g): where g is large, the student may miss the teacher.

    Acar, thesis 2023, eq. (6.4). With g = 0 and τ_s = τ it is ``Response`` but for the entropy of t^τ, which does not
    depend on the student.

    Args:
        weight: of the term.
        tau: τ > 0, the teacher's temperature.
        tau_s: τ_s > 0, the student's; None fits it to the teacher after the warm start.
        top_k: K, the classes that may be helped; None for 20, but at most a fifth of them.
    """

    tau: float = 4.0
    tau_s: float | None = None
    top_k: int | None = None

    selective = True

    def __post_init__(self) -> None:
        temperature("tau", self.tau)
        temperature("tau_s", self.tau_s)
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"selective distillation helps at least 1 class, top_k=1, not {self.top_k}.")

    @property
    def fits(self) -> float | None:
        """See ``DistillTerm.fits``."""
        return self.tau if self.tau_s is None else None

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        """The student's logits."""
        return pair.student.logits

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """See ``DistillTerm.guided``."""
        assert teacher is not None
        at = tau_s if self.tau_s is None else self.tau_s
        top_k = min(20, max(view.shape[-1] // 5, 1)) if self.top_k is None else self.top_k
        return guided(view, teacher.logits, g, self.tau, at, top_k)


@dataclass(frozen=True)
class Hint(DistillTerm):
    """‖r(f_s) - f_t‖² / dim(f_t) of one middle map each, r a learned regression. FitNet: Romero et al., ICLR 2015.

    r is a 1x1 convolution with batch normalisation on maps brought to the smaller of both sizes by averaging. The paper
    trains the hint first and then the answers; here both are trained at once, as Chen et al. (SimKD, 2022) do.

    Args:
        weight: of the term.
        layer: which of the maps, counted in both networks; -1 is the last.
    """

    layer: int = -2

    maps = True

    def pick(self, who: str, maps: tuple[tuple[int, int, int], ...]) -> tuple[int, int, int]:
        """The shape of the map of that number.

        Raises:
            ConfigError: if the network has no such map.
        """
        if not -len(maps) <= self.layer < len(maps):
            raise ConfigError(
                f"a hint looks at map {self.layer} of both networks, but the {who} has {len(maps)} maps; "
                "choose another layer, or a method on features or answers alone."
            )
        return maps[self.layer]

    def kept(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        """The one."""
        self.pick("teacher", teacher.maps)
        return (self.layer % len(teacher.maps),)

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        """The regression r."""
        return regression(self.pick("student", student.maps), self.pick("teacher", teacher.maps))

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        """Distances [B]."""
        assert layers is not None
        return distance(layers, pair.student.maps[self.layer], pair.taught.maps[self.layer])

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """See ``DistillTerm.guided``."""
        return view


@dataclass(frozen=True)
class Reuse(DistillTerm):
    """‖Ψ(f_s) - f_t‖² / dim(f_t): learned layers Ψ bring the student to the teacher's features, and its head is reused.

    SimKD: Chen et al., CVPR 2022. Deployed is head_T(Ψ(f_s(x))); there is no term of the labels. Where both networks'
    features are the mean of their last map, f are these maps, brought to the smaller of both sizes, and Ψ is their
    bottleneck of three convolutions (1x1, 3x3, 1x1 at half the teacher's width), the mean following it; otherwise f are
    the features and Ψ the same bottleneck with dense layers.

    ``selective`` ones weigh a sample by 1 - g(x). Acar, thesis 2023, eq. (A.1), whose minus sign is a misprint.

    Args:
        weight: of the term.
    """

    maps = True
    reuses_head = True

    def kept(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        """The last one, where features are its mean."""
        return (len(teacher.maps) - 1,) if student.pooled and teacher.pooled else ()

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        """Ψ."""
        if student.pooled and teacher.pooled:
            return regression(student.maps[-1], teacher.maps[-1], bottleneck=True)
        return dense(student.features, teacher.features)

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        """Distances [B]."""
        assert layers is not None
        if isinstance(layers, Between):
            return distance(layers, pair.student.maps[-1], pair.taught.maps[-1])
        return (layers(pair.student.features) - pair.taught.features).square().flatten(1).mean(1)

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """See ``DistillTerm.guided``."""
        return view

    def features(self, said: Outputs, layers: nn.Module | None) -> Tensor:
        """What the teacher's head is given, [B, d]."""
        assert layers is not None
        if isinstance(layers, Between):
            return layers(said.maps[-1]).mean((2, 3))
        return layers(said.features)


@dataclass(frozen=True)
class SelectiveReuse(Reuse):
    """(1 - g(x)) ‖Ψ(f_s) - f_t‖² / dim(f_t), the head as in ``Reuse``. Acar, thesis 2023, eq. (A.1), table A.14."""

    selective = True

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """See ``DistillTerm.guided``."""
        return (1 - g) * view


class Between(nn.Module):
    """From the student's map to the shape of the teacher's: averaged to the smaller size, then convolved."""

    def __init__(self, body: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.body = body
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """[B, c_s, H, W] to [B, c_t, h, w]."""
        return self.body(shrunk(x, self.size))


def shrunk(x: Tensor, size: tuple[int, int]) -> Tensor:
    """A map averaged to a size, which is not larger than its own; the map itself if it has that size."""
    return x if tuple(x.shape[2:]) == size else F.adaptive_avg_pool2d(x, size)


def regression(student: tuple[int, int, int], teacher: tuple[int, int, int], bottleneck: bool = False) -> Between:
    """Learned layers from one map's shape to another's channels, at the smaller of both sizes."""
    size = (min(student[1], teacher[1]), min(student[2], teacher[2]))
    before, after = student[0], teacher[0]
    if not bottleneck:
        return Between(nn.Sequential(nn.Conv2d(before, after, 1), nn.BatchNorm2d(after), nn.ReLU()), size)
    middle = max(after // 2, 1)
    body = nn.Sequential()
    for (a, b), kernel in zip(pairwise((before, middle, middle, after)), (1, 3, 1), strict=True):
        body.extend([nn.Conv2d(a, b, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()])
    return Between(body, size)


def dense(before: int, after: int) -> nn.Sequential:
    """The bottleneck on vectors: three dense layers at half the teacher's width; the last one may be negative."""
    middle = max(after // 2, 1)
    body = nn.Sequential()
    for a, b in ((before, middle), (middle, middle)):
        body.extend([nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()])
    body.append(nn.Linear(middle, after))
    return body


def distance(layers: nn.Module, student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared distances [B] of regressed maps from the teacher's."""
    came = layers(student)
    return (came - shrunk(teacher, (came.shape[2], came.shape[3]))).square().flatten(1).mean(1)
