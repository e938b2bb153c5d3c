"""Online learners: frozen dataclasses of settings with pure hooks over explicit state.

MOML and its variants: a quadratic regulariser of fixed size summarises the past tasks. Hedge: a mixture of experts,
weighted by their cumulative losses.

The hooks in the order in which they are called for the t-th task, once its prediction has been recorded (before it, if
the learner ``learns_first``)::

    begin(w, state)                 the model from which the K steps start
    tasks(stored, t)                the tasks whose mean loss is minimised: the new one and some of those stored
    regulariser_grad(w, state)      ∇R^t(w), added to the gradient in each of the K steps
    end(w, state)                   the new state, given w^{t+1}
    keep(stored, t, draw)           the tasks whose data stay stored for the next task

The state is a dict of vectors [P] beside the model w [P]. Settings named in ``vmapped_fields`` may be tensors, so that
experts that differ only in them are trained in one vmapped computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Count, Fraction, NonNegativeInt, Positive, Probability, Range, check_ranges
from fedloom.base.registry import Ranged, Registry
from fedloom.base.tree import Tree


@dataclass(frozen=True)
class OnlineLearner(Ranged):
    """Base class; its defaults train on the new task alone, store nothing and use no regulariser.

    Attributes:
        trains: whether the model is trained at all.
        adapts: whether the losses are f∘U, those of the adapted model, rather than f; with an adaptation that does not
            train, like ``finetune``, they are f.
        learns_first: whether a task is predicted by the model after training on its training samples.
        vmapped_fields: numeric settings in which the experts of one group may differ.
        citation: BibTeX of the paper.
    """

    trains: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    learns_first: ClassVar[bool] = False
    vmapped_fields: ClassVar[tuple[str, ...]] = ()
    citation: ClassVar[str] = ""

    def tasks_per_step(self) -> int:
        """The number of tasks drawn per step from ``tasks``; 0 takes all."""
        return 0

    def init(self, w: Tensor) -> Tree:
        """The state before the first task."""
        return {}

    def begin(self, w: Tensor, state: Tree) -> Tensor:
        """The model from which the K steps start, [P]."""
        return w

    def tasks(self, stored: Sequence[int], t: int) -> Sequence[int]:
        """The numbers of the tasks whose mean loss is minimised at task ``t``, given those stored."""
        return (t,)

    def regulariser_grad(self, w: Tensor, state: Tree) -> Tensor | float:
        """The gradient of the regulariser R^t at w, [P]."""
        return 0.0

    def end(self, w: Tensor, state: Tree) -> Tree:
        """The state after the K steps."""
        return state

    def keep(self, stored: Sequence[int], t: int, draw: np.random.Generator) -> Sequence[int]:
        """The numbers of the tasks whose data stay stored, out of ``stored`` and ``t``."""
        return ()


learners = Registry[OnlineLearner]("learner")
"""All learners by name."""


FTML = "finn2019online"
OGD = "zinkevich2003online"


@learners.register
@dataclass(frozen=True)
class Mogd(OnlineLearner):
    """Meta OGD: w^{t+1} is w^t after K gradient steps on f^t∘U^t; no other state is kept.

    Online gradient descent on the meta-losses; K = 1 is Zinkevich's algorithm. Acar, thesis 2023, 5.3 and A.1.4, where
    more than one step performs better.
    """

    citation = OGD


class StoresAll(OnlineLearner):
    """Base class of learners that store the data of all tasks and train on them."""

    def tasks(self, stored: Sequence[int], t: int) -> Sequence[int]:
        return (*stored, t)

    def keep(self, stored: Sequence[int], t: int, draw: np.random.Generator) -> Sequence[int]:
        return (*stored, t)


@learners.register
@dataclass(frozen=True)
class Ftml(StoresAll):
    """Follow the meta leader: K gradient steps on (1/t) Σ_{s≤t} f^s∘U^s; all tasks are stored.

    Finn et al., ICML 2019; Acar, thesis 2023, 5.3. The thesis does not specify how a step on that mean is taken; as in
    Finn et al. it draws tasks uniformly from all those seen. Memory grows with every task.

    Args:
        draws: tasks per step, drawn without replacement; 0 takes all.
    """

    draws: NonNegativeInt = 1

    citation = FTML

    def tasks_per_step(self) -> int:
        return self.draws


@learners.register
@dataclass(frozen=True)
class Toe(StoresAll):
    """Train on everything: K gradient steps from w¹ on the pooled samples of all tasks seen, with one model for all.

    The pool includes the new task's training samples, and the task is predicted with the result, adapted to these
    samples like the models of all learners. It minimises f rather than f∘U, so it learns no initialisation. A
    mini-batch is drawn uniformly from all samples. Finn et al., ICML 2019; Acar, thesis 2023, 5.3.
    """

    adapts = False
    learns_first = True
    citation = FTML

    def init(self, w: Tensor) -> Tree:
        return {"first": w}

    def begin(self, w: Tensor, state: Tree) -> Tensor:
        return state["first"]


@learners.register(name="toe_continued")
@dataclass(frozen=True)
class ToeContinued(StoresAll):
    """TOE, continued: the K steps start from the model of the last task, which also predicts the new one.

    Unlike ``Toe`` it makes K steps more with every task, and predicts a task before it has seen its samples.
    """

    adapts = False
    citation = FTML


@learners.register
@dataclass(frozen=True)
class Fs(OnlineLearner):
    """From scratch: each task adapts the random initial model, which is never trained. Acar, thesis 2023, 5.3."""

    trains = False
    citation = FTML


MOML = "acar2021moml"


@learners.register
@dataclass(frozen=True)
class Moml(OnlineLearner):
    """K steps on f^t∘U^t + R^t, R^t(w) = -⟨∇, w⟩ + (α/2)‖w - ω‖²; ∇ ← ∇ - α(w⁺ - ω), ω ← ½(ω + w⁺ - ∇/α).

    ∇ stands for ∇f^{t-1}∘U^{t-1}(w^t): the linear term cancels the gradient of the latest task, and the quadratic term
    attracts w to ω, which summarises all tasks. ω + ∇/2α performs gradient descent with step 1/2α along the tasks. No
    task data are stored. Acar, thesis 2023, algorithm 6; ∇ in the linear form of A.1.4, without a pass over the data.

    Args:
        alpha: α; the thesis searches 1, 5, 10 (S-MNIST), 1, .1, .01 (CIFAR-100) and .1, .01, .001 (miniImageNet).
    """

    alpha: Positive = 5.0

    vmapped_fields = ("alpha",)
    citation = MOML

    def init(self, w: Tensor) -> Tree:
        """∇ = 0 and ω = w. The thesis starts w and ω at 0; a network starts at its random initialisation."""
        return {"nabla": torch.zeros_like(w), "omega": w.clone()}

    def regulariser_grad(self, w: Tensor, state: Tree) -> Tensor:
        """∇R^t(w) = -∇ + α(w - ω)."""
        return self.alpha * (w - state["omega"]) - state["nabla"]

    def end(self, w: Tensor, state: Tree) -> Tree:
        """∇ ← ∇ - α(w⁺ - ω), the gradient at w⁺ if w⁺ is stationary (eq. 5.10); ω ← ½(ω + w⁺ - ∇/α) (eq. 5.8)."""
        nabla = state["nabla"] - self.alpha * (w - state["omega"])
        return {"nabla": nabla, "omega": (state["omega"] + w - nabla / self.alpha) / 2}


@learners.register(name="b_moml")
@dataclass(frozen=True)
class BufferedMoml(Moml):
    """MOML on L_B, the mean of the losses of B tasks: the new one and those in a buffer of B - 1 earlier ones.

    With ``accept=1`` the buffer holds the latest tasks (B = 1 is MOML, called B = 0 in the thesis' tables); below 1, a
    new task enters with that probability and replaces the oldest. ∇ follows the recursion of MOML, so it stands for
    ∇L_B at w⁺; the thesis's mean of the B latest gradients, each at its own model, would require storing all of them.
    Acar, thesis 2023, 5.2, which leaves the probability open.

    Args:
        buffer: B ≥ 1.
        accept: p, the probability with which a task enters the buffer: 1 for the latest tasks, below 1 for random ones.
        draws: tasks per step, drawn from the B without replacement; 0 takes all.
        nabla: whether there is a linear term; without it ∇ = 0, as in ``moml_nabla0``.
    """

    buffer: Count = 5
    accept: Probability = 1.0
    draws: NonNegativeInt = 0
    nabla: bool = True

    def tasks_per_step(self) -> int:
        return self.draws

    def end(self, w: Tensor, state: Tree) -> Tree:
        """As MOML; with ∇ = 0, ω ← ½(ω + w⁺)."""
        if self.nabla:
            return super().end(w, state)
        return {"nabla": state["nabla"], "omega": (state["omega"] + w) / 2}

    def tasks(self, stored: Sequence[int], t: int) -> Sequence[int]:
        """The buffered tasks and the new one."""
        return (*stored, t)

    def keep(self, stored: Sequence[int], t: int, draw: np.random.Generator) -> Sequence[int]:
        """A queue: first in, first out."""
        if draw.random() >= self.accept:
            return stored
        return (*stored, t)[-self.buffer + 1 :] if self.buffer > 1 else ()


@learners.register(name="moml_nabla0")
@dataclass(frozen=True)
class PlainMoml(Moml):
    """MOML without its linear term, ∇ = 0: R^t(w) = (α/2)‖w - ω‖², ω ← ½(ω + w⁺). Acar, thesis 2023, algorithm 11."""

    def init(self, w: Tensor) -> Tree:
        return {"omega": w.clone()}

    def regulariser_grad(self, w: Tensor, state: Tree) -> Tensor:
        return self.alpha * (w - state["omega"])

    def end(self, w: Tensor, state: Tree) -> Tree:
        """The mean of ω and w⁺."""
        return {"omega": (state["omega"] + w) / 2}


@dataclass(frozen=True)
class Hedge:
    """p_i^{t+1} ∝ p_i^t γ^{ℓ_i^t} from uniform p^1: an expert's weight falls exponentially with its loss.

    The loss of the mixture is Σ p_i ℓ_i. For losses in [0, 1] its sum over tasks is at most
    (L_best log(1/γ) + log G) / (1 - γ), where L_best is the sum of the best of G experts. Freund and Schapire, 1997;
    Acar, thesis 2023, algorithm 10, with γ = .1.

    The state is the experts' cumulative loss [G]; a loss that is not finite counts as infinite, so that this expert's
    weight stays 0.

    >>> hedge = Hedge()
    >>> total = hedge.update(hedge.init(2), torch.tensor([0.0, 1.0]))
    >>> hedge.p(total)
    tensor([0.9091, 0.0909], dtype=torch.float64)

    Args:
        gamma: γ, in (0, 1); near 1 all weights stay equal.
        retire: an expert whose weight falls below this threshold is dropped: it is no longer trained or evaluated. 0
            drops none. The reported mixture changes by no more than this times the number of experts, unless one of
            the dropped experts would have recovered.

    Raises:
        ConfigError: if γ is not strictly between 0 and 1, or ``retire`` is outside [0, .001).
    """

    gamma: Fraction = 0.1
    retire: Annotated[float, Range(0, 1e-3, below=True)] = 0.0

    citation = "freund1997decision"

    def __post_init__(self) -> None:
        check_ranges(self, "hedge.")

    def init(self, experts: int) -> Tensor:
        """The initial cumulative losses, zeros, float64 [G]."""
        return torch.zeros(experts, dtype=torch.float64)

    def p(self, total: Tensor) -> Tensor:
        """The weights p [G] given cumulative losses ``total`` [G]; uniform if all of them are infinite."""
        if bool(torch.isinf(total).all()):
            return torch.full_like(total, 1 / len(total))
        return torch.softmax(log(self.gamma) * total, 0)

    def update(self, total: Tensor, losses: Tensor) -> Tensor:
        """The cumulative losses [G] after another task."""
        losses = losses.to(total)
        total = total + torch.where(torch.isfinite(losses), losses, float("inf"))
        return torch.where(self.p(total) < self.retire, float("inf"), total)

    def active(self, total: Tensor) -> list[int]:
        """The experts with finite cumulative loss; all of them if there is none.

        >>> Hedge().active(torch.tensor([1.0, float("inf")]))
        [0]
        """
        active = torch.isfinite(total).nonzero().flatten().tolist()
        return active or list(range(len(total)))

    def bound(self, best: float, experts: int) -> float:
        """The upper bound of the mixture's cumulative loss if the best expert's is ``best``; for losses in [0, 1].

        >>> round(Hedge().bound(10.0, 24), 2)
        29.12
        """
        return (best * log(1 / self.gamma) + log(experts)) / (1 - self.gamma)


def weighted_sum(p: Tensor, values: Tensor) -> float:
    """Σ p_i v_i over the experts with p_i > 0; the others may have no value."""
    has_weight = p > 0
    return float((p[has_weight] * values.to(p)[has_weight]).sum())
