"""What a method of distillation is: terms that the student descends, and perhaps a guide that learns beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.registry import Registry
from fedloom.tasks.distill.taps import Outputs, Sizes


class NetworkPair(NamedTuple):
    """Both networks' words on the same batch, and the labels y [B]."""

    student: Outputs
    teacher: Outputs | None
    y: Tensor

    @property
    def taught(self) -> Outputs:
        """The teacher's words, which a term without a teacher does not ask for."""
        assert self.teacher is not None
        return self.teacher


@dataclass(frozen=True)
class DistillTerm(ABC):
    """One term of the student's loss, weighted; the loss is ``guided(view(…), …)``.

    The two halves are apart because a guide is trained while the student stands still: what the student contributes
    (the ``view``) is computed once a round, and the guide then learns from it alone.

    Attributes:
        maps: whether it reads the student's maps.
        needs_teacher: whether it reads the teacher at all.
        selective: whether a guide changes it.
        reuses_head: whether the student is deployed with this term's layers and the teacher's head.
    """

    weight: float = 1.0

    maps: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True
    selective: ClassVar[bool] = False
    reuses_head: ClassVar[bool] = False

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        """Layers that are trained beside the student."""
        return None

    def kept(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        """The numbers of the teacher's maps that it reads; the others are not kept."""
        return ()

    @abstractmethod
    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        """What the student contributes, [B, ...]; differentiable in the student and in the layers."""

    @abstractmethod
    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        """Losses [B] for the student's contribution, given the guide g [B]; the weight is not in them."""

    def loss(self, pair: NetworkPair, layers: nn.Module | None, g: Tensor | None = None, tau_s: float = 1.0) -> Tensor:
        """The weighted losses [B]; without a guide, g is zero."""
        if g is None:
            g = pair.student.logits.new_zeros(len(pair.y))
        return self.weight * self.guided(self.view(pair, layers), pair.teacher, pair.y, g, tau_s)

    @property
    def fits(self) -> float | None:
        """The teacher's temperature to which the student's is fitted at the beginning, if it is."""
        return None

    def features(self, said: Outputs, layers: nn.Module | None) -> Tensor:
        """What the teacher's head is given: the student's features, or what the term's layers make of them."""
        return said.features


@dataclass(frozen=True)
class Guide:
    """How a guide learns: g(x) in [0, 1] says on which inputs the student is not held to what it cannot follow.

    Args:
        hidden: units of the two hidden layers.
        passes: over the data, in each round, before the student's.
        lam_min: λ_min, the multiplier of the budget.
        lam_max: λ_max.
        lam_period: λ_T in rounds; 0 for a quarter of all rounds, at least four. With fewer rounds there is one period.
        delta: δ, the budget; None for the share of training samples on which the warm-started student errs.
        lr: the guide's learning rate at the start.

    Raises:
        ConfigError: for values outside their range.
    """

    hidden: tuple[int, int] = (64, 128)
    passes: int = 3
    lam_min: float = 0.1
    lam_max: float = 50.0
    lam_period: int = 50
    delta: float | None = None
    lr: float = 0.003

    def __post_init__(self) -> None:
        checks = {
            "hidden must be two numbers of at least 1": len(self.hidden) == 2 and min(self.hidden) >= 1,
            "passes must be at least 1": self.passes >= 1,
            "0 <= lam_min <= lam_max must hold": 0 <= self.lam_min <= self.lam_max < float("inf"),
            "lam_period must be at least 0": self.lam_period >= 0,
            "delta must be at least 0": self.delta is None or self.delta >= 0,
            "lr must be positive and finite": 0 < self.lr < float("inf"),
        }
        for sentence, holds in checks.items():
            if not holds:
                raise ConfigError(f"the guide: {sentence}.")

    def period_of(self, rounds: int) -> int:
        """λ_T in a run of so many rounds.

        >>> Guide(lam_period=0).period_of(40), Guide().period_of(40)
        (10, 50)
        """
        return self.lam_period or max(rounds // 4, 4)


@dataclass(frozen=True)
class Distiller:
    """A method: what the student minimises, what learns beside it, and from where it starts.

    Args:
        name: what it is called.
        terms: of the student's loss, summed.
        guide: learns beside the student, if some term is selective.
        passes: the student's passes over the data in one round.
        warm: whether the student is first trained on the labels alone.
        citation: BibTeX.

    Raises:
        ConfigError: for a guide that nothing listens to, or a selective term without one that learns.
    """

    name: str
    terms: tuple[DistillTerm, ...]
    guide: Guide | None = None
    passes: int = 1
    warm: bool = True
    citation: str = ""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError(f"method {self.name!r} has no terms: the student would learn nothing.")
        if self.guide is not None and not self.selective:
            raise ConfigError(f"method {self.name!r} has a guide, but no term listens to it.")
        if self.passes < 1:
            raise ConfigError(f"method {self.name!r} needs at least 1 pass a round, not {self.passes}.")
        if sum(term.reuses_head for term in self.terms) > 1:
            raise ConfigError(f"method {self.name!r} has two terms that would deploy the teacher's head.")

    @property
    def selective(self) -> tuple[int, ...]:
        """The numbers of the terms that a guide changes."""
        return tuple(number for number, term in enumerate(self.terms) if term.selective)

    @property
    def reuse(self) -> int | None:
        """The number of the term whose layers and head are deployed."""
        return next((number for number, term in enumerate(self.terms) if term.reuses_head), None)

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher is needed."""
        return self.guide is not None or any(term.needs_teacher for term in self.terms)

    @property
    def maps(self) -> bool:
        """Whether the student's maps are read."""
        return any(term.maps for term in self.terms)


distillers = Registry[Distiller]("method of distillation")
"""Every method by name."""
