"""Methods of distillation: the terms of the student's loss, and optionally a guide that is trained with it.

A network's outputs for distillation: logits, features, and feature maps at each spatial size. The guide's network, and
the fit of the student's temperature to the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.base.checks import all_hold
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Bound, Count, NonNegative, NonNegativeInt, Positive, Range, check_ranges
from fedloom.base.registry import Ranged, Registry
from fedloom.parts.objectives.guidance import period, periodic_budget


class Outputs(NamedTuple):
    """Outputs on B samples: logits [B, C], features [B, d], and maps [B, c, H, W] in the order of computation.

    ``maps`` is empty where they are not needed.
    """

    logits: Tensor
    features: Tensor
    maps: tuple[Tensor, ...] = ()


class Sizes(NamedTuple):
    """Sizes of a network's outputs: numbers of classes and features, and shapes of the maps.

    ``pooled`` tells whether the features are the spatial mean of the last map.
    """

    classes: int
    features: int
    maps: tuple[tuple[int, int, int], ...]
    pooled: bool


class FeatureTap:
    """Records the outputs of a network that has ``features(x)`` and ``head``, by forward hooks.

    A *map* is the last four-dimensional output at each spatial size of more than one position, in the order of
    computation; in a residual network, the output of each stage.

    >>> from fedloom.models import models
    >>> taps = FeatureTap(models.make("resnet10_xxs", classes=10, inputs=(1, 16, 16)), maps=True)
    >>> [tuple(m.shape) for m in taps(torch.zeros(3, 1, 16, 16)).maps]
    [(3, 8, 16, 16), (3, 8, 8, 8), (3, 16, 4, 4), (3, 16, 2, 2)]
    >>> taps.sizes((1, 16, 16)).pooled
    True
    """

    def __init__(self, model: nn.Module, maps: bool = False) -> None:
        if not callable(getattr(model, "features", None)) or not isinstance(getattr(model, "head", None), nn.Module):
            raise ConfigError(
                f"distillation needs a network's features and head, but {type(model).__name__} has none; give it "
                "features(x) and head, with forward(x) == head(features(x))."
            )
        self.model: Any = model
        self.wants_maps = maps
        self.maps_by_size: dict[tuple[int, int], Tensor] = {}
        self.hooks = [m.register_forward_hook(self._record) for m in model.modules()] if maps else []

    def _record(self, module: nn.Module, inputs: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim == 4 and out.shape[2] * out.shape[3] > 1:
            self.maps_by_size[out.shape[2], out.shape[3]] = out

    def __call__(self, x: Tensor, operands: torch.dtype | None = None) -> Outputs:
        """The outputs on inputs [B, ...], in the dtype of the parameters.

        ``operands`` is the dtype to which layers round the factors of their products; None keeps them.
        """
        if operands is None:
            return self._outputs(x)
        dtype = next(iter(self.model.parameters())).dtype
        with torch.autocast(x.device.type, operands, cache_enabled=False):
            logits, features, maps = self._outputs(x)
        return Outputs(logits.to(dtype), features.to(dtype), tuple(feature_map.to(dtype) for feature_map in maps))

    def _outputs(self, x: Tensor) -> Outputs:
        self.maps_by_size.clear()
        features = self.model.features(x)
        maps = tuple(self.maps_by_size.values())
        self.maps_by_size.clear()
        return Outputs(self.model.head(features), features, maps)

    def sizes(self, inputs: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Sizes:
        """The sizes of the outputs, from a forward pass on two random inputs; batch statistics are not changed."""
        tap = FeatureTap(self.model, maps=True) if not self.wants_maps else self
        training = self.model.training
        parameter = next(iter(self.model.parameters()))
        draw = torch.Generator().manual_seed(0)
        tokens = any(isinstance(module, nn.Embedding) for module in self.model.modules())
        x = torch.zeros(2, *inputs, dtype=torch.int64) if tokens else torch.rand(2, *inputs, generator=draw).to(dtype)
        self.model.eval()
        with torch.no_grad():
            outputs = tap(x.to(parameter.device))
        self.model.train(training)
        if tap is not self:
            tap.close()
        last = outputs.maps[-1].mean((2, 3)) if outputs.maps else None
        pooled = last is not None and last.shape == outputs.features.shape and torch.allclose(last, outputs.features)
        shapes = tuple((m.shape[1], m.shape[2], m.shape[3]) for m in outputs.maps)
        return Sizes(outputs.logits.shape[-1], outputs.features.shape[-1], shapes, pooled)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


class GuideNet(nn.Module):
    """g(x) in [0, 1] from the teacher's features and logits: two hidden layers with batch normalisation and ReLU.

    Acar, thesis 2023, A.1.5. It receives neither the student's outputs nor the input, and is not used at inference.
    """

    def __init__(self, features: int, classes: int, hidden: Sequence[int] = (64, 128)) -> None:
        super().__init__()
        inputs = features + classes
        self.body = nn.Sequential()
        for width in hidden:
            self.body.extend([nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()])
            inputs = width
        self.head = nn.Linear(inputs, 1)

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """g [B] of the teacher's features [B, d] and logits [B, C]."""
        return self.head(self.body(torch.cat([features.flatten(1), logits], 1))).squeeze(1).sigmoid()


TEMPERATURE_RANGE = (0.05, 50.0)
"""The smallest and the largest temperature that is fitted."""


def fit_temperature(teacher_logits: Tensor, student_logits: Tensor, tau: float) -> float:
    """τ_s = argmin_{τ'} Σ_i KL(t^τ(x_i)‖s^{τ'}(x_i)), the temperature at which the student is closest to the teacher.

    As a function of 1/τ' the sum is convex (log-sum-exps plus a linear term), so a bounded search over log τ' finds its
    only minimum; outside ``TEMPERATURE_RANGE``, the nearer end is returned. Acar, thesis 2023, §6.3, below eq. (6.4).

    Args:
        teacher_logits: [N, C].
        student_logits: [N, C].
        tau: τ > 0, the teacher's temperature.

    >>> logits = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])
    >>> round(fit_temperature(logits, 2 * logits, tau=4.0), 3)  # twice the logits, twice the temperature
    8.0
    """
    from scipy.optimize import minimize_scalar  # slow to import, and needed once a run

    t = (teacher_logits.detach().double() / tau).softmax(-1)
    s = student_logits.detach().double()

    def cross_entropy(log_tau: float) -> float:
        return -float((t * (s / exp(log_tau)).log_softmax(-1)).sum(-1).mean())

    low, high = map(log, TEMPERATURE_RANGE)
    minimum = minimize_scalar(cross_entropy, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    return exp(float(minimum.x))


class NetworkPair(NamedTuple):
    """The outputs of both networks on the same batch, and the labels y [B]."""

    student: Outputs
    teacher: Outputs | None
    y: Tensor

    @property
    def guidance(self) -> Outputs:
        """The teacher's outputs; for terms that need a teacher."""
        assert self.teacher is not None
        return self.teacher


@dataclass(frozen=True)
class DistillTerm(Ranged):
    """One weighted term of the student's loss, ``guided(view(...), ...)``.

    The two halves are separate because the guide is trained while the student is fixed: the student's contribution (the
    ``view``) is computed once a round, and the guide is then trained on it alone. By default the view is the student's
    logits, and ``guided`` returns it unchanged.

    Attributes:
        maps: whether the term uses the student's feature maps.
        needs_teacher: whether the term uses the teacher.
        selective: whether the term depends on the guide.
        reuses_head: whether the deployed student consists of this term's layers and the teacher's head.
    """

    weight: float = 1.0

    maps: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True
    selective: ClassVar[bool] = False
    reuses_head: ClassVar[bool] = False

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        """Make layers that are trained with the student."""
        return None

    def teacher_maps(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        """The numbers of the teacher's feature maps that the term uses; only these are cached."""
        return ()

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        """The student's contribution [B, ...], differentiable in the student and in the layers."""
        return pair.student.logits

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """The unweighted losses [B] of a view [B, ...], given the guide g [B]."""
        return view

    def loss(self, pair: NetworkPair, layers: nn.Module | None, g: Tensor | None = None, tau_s: float = 1.0) -> Tensor:
        """The weighted losses [B]; without a guide, g is zero."""
        if g is None:
            g = pair.student.logits.new_zeros(len(pair.y))
        return self.weight * self.guided(self.view(pair, layers), pair.teacher, pair.y, g, tau_s)

    def student_temperature(self, teacher: Tensor, student: Tensor) -> float | None:
        """τ_s, as given or fitted to logits [N, C] of both after the warm start; None for terms without one."""
        return None

    def features(self, outputs: Outputs, layers: nn.Module | None) -> Tensor:
        """The input of the teacher's head [B, d] in the deployed student, for terms that reuse it."""
        return outputs.features


@dataclass(frozen=True)
class Guide:
    """Settings of a guide g(x) in [0, 1], which is large where the student need not follow the teacher.

    Args:
        hidden: widths of the two hidden layers.
        passes: passes over the data in each round, before the student's.
        lam_min: λ_min, the smallest multiplier of the budget.
        lam_max: λ_max, the largest.
        lam_period: λ_T in rounds; 0 for a quarter of all rounds, at least four. With fewer rounds there is one period.
        delta: δ, the budget; None for the training error of the warm-started student.
        lr: the guide's learning rate at the start.
        delta_end: the value to which the budget moves in each period, see ``guidance.periodic_budget``; None for none.
        delta_period: rounds of such a period.
        delta_decay: factor of δ from one period to the next; periods that begin below ``delta_end`` rise to it.
        price: the class whose probability prices help: ``label``, eq. (6.3), or ``teacher``, its most likely one.
        cap: the largest price; None has none.
        first_passes: passes of the guide alone, before the first round.
        lr_restarts: whether both learning rates restart, and fall to 0, in each of λ's periods.
    """

    hidden: tuple[int, int] = (64, 128)
    passes: Count = 3
    lam_min: NonNegative = 0.1
    lam_max: NonNegative = 50.0
    lam_period: NonNegativeInt = 50
    delta: NonNegative | None = None
    lr: Positive = 0.003
    delta_end: NonNegative | None = None
    delta_period: Count = 20
    delta_decay: Annotated[float, Range(0, 1, above=True)] = 1.0
    price: Literal["label", "teacher"] = "label"
    cap: Bound | None = None
    first_passes: NonNegativeInt = 0
    lr_restarts: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, "the guide: ")
        conditions = {
            "hidden must be two numbers of at least 1": len(self.hidden) == 2 and min(self.hidden) >= 1,
            "lam_min must not exceed lam_max": self.lam_min <= self.lam_max,
        }
        all_hold("the guide: ", conditions)

    def period_of(self, rounds: int) -> int:
        """λ_T in a run of ``rounds`` rounds.

        >>> Guide(lam_period=0).period_of(40), Guide().period_of(40)
        (10, 50)
        """
        return self.lam_period or max(rounds // 4, 4)

    def phase(self, r: int, rounds: int) -> tuple[int, int]:
        """The rounds [begin, end) around round ``r`` in which the learning rates fall to 0 once."""
        return period(r, rounds, self.period_of(rounds)) if self.lr_restarts else (0, rounds)

    def budget_of(self, r: int, delta: float) -> float:
        """The budget of round ``r`` of a run that begins with the budget ``delta``."""
        if self.delta_end is None:
            return delta
        return periodic_budget(r, delta, self.delta_end, self.delta_period, self.delta_decay)


@dataclass(frozen=True)
class Distiller:
    """A method of distillation: a composition of terms, a guide and a start.

    Args:
        name: name of the method.
        terms: the terms of the student's loss, which is their sum.
        guide: settings of the guide, for methods with a selective term.
        passes: the student's passes over the data in one round.
        warm: whether the student is first trained with cross entropy on the labels.
        citation: BibTeX.

    Raises:
        ConfigError: for no terms, a guide without a selective term or the reverse, or two terms that reuse the head.
    """

    name: str
    terms: tuple[DistillTerm, ...]
    guide: Guide | None = None
    passes: Count = 1
    warm: bool = True
    citation: str = ""

    def __post_init__(self) -> None:
        check_ranges(self, f"{self.name}: ")
        if not self.terms:
            raise ConfigError(f"method {self.name!r} has no terms, so the student would not be trained.")
        if self.guide is not None and not self.selective:
            raise ConfigError(f"method {self.name!r} has a guide, but no selective term.")
        if self.guide is None and self.selective:
            raise ConfigError(f"method {self.name!r} has a selective term, but no guide; give it guide=Guide().")
        if sum(term.reuses_head for term in self.terms) > 1:
            raise ConfigError(f"method {self.name!r} has two terms that reuse the teacher's head.")

    @property
    def selective(self) -> list[tuple[int, DistillTerm]]:
        """The selective terms with their numbers."""
        return [(number, term) for number, term in enumerate(self.terms) if term.selective]

    @property
    def reuse(self) -> int | None:
        """The number of the term that reuses the teacher's head, if there is one."""
        return next((number for number, term in enumerate(self.terms) if term.reuses_head), None)

    @property
    def needs_teacher(self) -> bool:
        """Whether the method needs a teacher."""
        return self.guide is not None or any(term.needs_teacher for term in self.terms)

    @property
    def maps(self) -> bool:
        """Whether a term uses the student's feature maps."""
        return any(term.maps for term in self.terms)


distillers = Registry[Distiller](
    "method of distillation",
    shared={
        "alpha": "α in [0, 1], the weight of the labels.",
        "tau": "τ, the temperature of both networks.",
        "lam_period": "λ_T in rounds; 0 for a quarter of all, at least four. With fewer rounds there is one period.",
        "passes": "the student's passes in a round.",
        "guide_passes": "the guide's passes in a round.",
        "warm": "whether to start from a student trained on the labels.",
    },
)
"""All methods by name."""
