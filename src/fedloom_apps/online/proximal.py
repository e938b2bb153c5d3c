"""MOML and its variants: a quadratic regulariser of fixed size summarises the past tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.core.ranges import Count, NonNegativeInt, Positive, Probability
from fedloom.core.tree import Tree
from fedloom_apps.online.learners import OnlineLearner, learners

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
