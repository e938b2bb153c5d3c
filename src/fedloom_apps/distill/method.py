"""Methods of distillation: the terms of the student's loss, and optionally a guide that is trained with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor, nn

from fedloom.core.checks import all_hold, one_of
from fedloom.core.errors import ConfigError
from fedloom.core.ranges import Bound, Count, NonNegative, NonNegativeInt, Positive, Range, within
from fedloom.core.registry import Ranged, Registry
from fedloom.parts.objectives.guidance import falling, period
from fedloom_apps.distill.taps import Outputs, Sizes


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

    def kept(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
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


PRICES = ("label", "teacher")


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
        delta_end: the budget moves from δ to this in each period, as ``guidance.falling`` says; None keeps it constant.
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
    price: str = "label"
    cap: Bound | None = None
    first_passes: NonNegativeInt = 0
    lr_restarts: bool = False

    def __post_init__(self) -> None:
        within(self, "the guide: ")
        conditions = {
            "hidden must be two numbers of at least 1": len(self.hidden) == 2 and min(self.hidden) >= 1,
            "lam_min must not exceed lam_max": self.lam_min <= self.lam_max,
        }
        all_hold("the guide: ", conditions)
        one_of("the guide: unknown price", self.price, PRICES)

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
        return falling(r, delta, self.delta_end, self.delta_period, self.delta_decay)


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
        ConfigError: for no terms, a guide without a selective term, or two terms that reuse the head.
    """

    name: str
    terms: tuple[DistillTerm, ...]
    guide: Guide | None = None
    passes: int = 1
    warm: bool = True
    citation: str = ""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError(f"method {self.name!r} has no terms, so the student would not be trained.")
        if self.guide is not None and not self.selective:
            raise ConfigError(f"method {self.name!r} has a guide, but no selective term.")
        if self.passes < 1:
            raise ConfigError(f"method {self.name!r} needs at least 1 pass per round, not {self.passes}.")
        if sum(term.reuses_head for term in self.terms) > 1:
            raise ConfigError(f"method {self.name!r} has two terms that reuse the teacher's head.")

    @property
    def selective(self) -> tuple[int, ...]:
        """The numbers of the selective terms."""
        return tuple(number for number, term in enumerate(self.terms) if term.selective)

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


distillers = Registry[Distiller]("method of distillation")
"""All methods by name."""
