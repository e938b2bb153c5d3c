"""MOML and its kin: past tasks live on in a quadratic regulariser of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tree
from fedloom.tasks.online.learners import OnlineLearner, counted, learners, positive

MOML = """@inproceedings{acar2021moml, title={Memory Efficient Online Meta Learning},
  author={Acar, Durmus Alp Emre and Zhu, Ruizhao and Saligrama, Venkatesh}, booktitle={ICML}, year={2021}}"""


def start(w: Tensor) -> Tree:
    """∇ = 0 and ω = w. The thesis starts w, ω at 0; a network starts from its random initialisation instead."""
    return {"nabla": torch.zeros_like(w), "omega": w.clone()}


def slope(alpha: float | Tensor, w: Tensor, state: Tree) -> Tensor:
    """∇R^t(w) = -∇ + α(w - ω)."""
    return alpha * (w - state["omega"]) - state["nabla"]


def follow(alpha: float | Tensor, w: Tensor, state: Tree) -> Tree:
    """∇ ← ∇ - α(w⁺ - ω), the gradient at w⁺ if w⁺ is stationary (eq. 5.10); then ω ← ½(ω + w⁺ - ∇/α) (eq. 5.8)."""
    nabla = state["nabla"] - alpha * (w - state["omega"])
    return {"nabla": nabla, "omega": (state["omega"] + w - nabla / alpha) / 2}


@learners.register
@dataclass(frozen=True)
class Moml(OnlineLearner):
    """K steps on f^t∘U^t + R^t, R^t(w) = -⟨∇, w⟩ + (α/2)‖w - ω‖²; ∇ ← ∇ - α(w⁺ - ω), ω ← ½(ω + w⁺ - ∇/α).

    ∇ stands for ∇f^{t-1}∘U^{t-1}(w^t): it takes the pull of the newest task out, and ω, in which all tasks are summed
    up, draws towards what is good for all. ω + ∇/2α is a descent with step 1/2α along the tasks' gradients. No task's
    data are kept. Acar, thesis 2023, algorithm 6; ∇ in the linear form of A.1.4, which needs no pass over the data.

    Args:
        alpha: α; the thesis searches 1, 5, 10 (S-MNIST), 1, .1, .01 (CIFAR-100) and .1, .01, .001 (miniImageNet).
    """

    alpha: float = 5.0

    vmapped_fields = ("alpha",)
    citation = MOML

    def __post_init__(self) -> None:
        positive("moml", alpha=self.alpha)

    def init(self, w: Tensor) -> Tree:
        """∇ and ω."""
        return start(w)

    def pull(self, w: Tensor, state: Tree) -> Tensor:
        """∇R^t(w)."""
        return slope(self.alpha, w, state)

    def end(self, w: Tensor, state: Tree) -> Tree:
        """The recursions of ∇ and ω."""
        return follow(self.alpha, w, state)


@learners.register(name="b_moml")
@dataclass(frozen=True)
class BufferedMoml(OnlineLearner):
    """MOML on L_B, the mean of the losses of B tasks: the new one and those in a buffer of B - 1 earlier ones.

    With ``accept`` 1 the buffer holds the latest (B = 1 is MOML, which tables call B = 0); below, a new task enters it
    with that probability, and then the oldest in it goes. ∇ follows the recursion of MOML, so it stands for ∇L_B at
    w⁺; the thesis' mean of the B latest gradients, each at its own model, would need them one by one. Acar, thesis
    2023, 5.2, which leaves the probability open.

    Args:
        alpha: α.
        buffer: B.
        accept: p, the probability with which a task enters the buffer.
        draws: tasks per step, drawn from the B without replacement; 0 takes all.
    """

    alpha: float = 5.0
    buffer: int = 5
    accept: float = 1.0
    draws: int = 0

    vmapped_fields = ("alpha",)
    citation = MOML

    def __post_init__(self) -> None:
        positive("b_moml", alpha=self.alpha, buffer=self.buffer)
        counted("b_moml", draws=self.draws)
        if not 0 <= self.accept <= 1:
            raise ConfigError(f"learner 'b_moml': accept must lie in [0, 1], not {self.accept:g}.")

    def drawn(self) -> int:
        """As set."""
        return self.draws

    def init(self, w: Tensor) -> Tree:
        """∇ and ω."""
        return start(w)

    def tasks(self, held: Sequence[int], t: int) -> Sequence[int]:
        """The buffer, and the new task."""
        return (*held, t)

    def pull(self, w: Tensor, state: Tree) -> Tensor:
        """∇R^t(w)."""
        return slope(self.alpha, w, state)

    def end(self, w: Tensor, state: Tree) -> Tree:
        """The recursions of ∇ and ω."""
        return follow(self.alpha, w, state)

    def keep(self, held: Sequence[int], t: int, draw: np.random.Generator) -> Sequence[int]:
        """A queue: first in, first out."""
        if draw.random() >= self.accept:
            return held
        return (*held, t)[-self.buffer + 1 :] if self.buffer > 1 else ()


@learners.register(name="moml_nabla0")
@dataclass(frozen=True)
class PlainMoml(OnlineLearner):
    """MOML without its linear term, ∇ = 0: R^t(w) = (α/2)‖w - ω‖², ω ← ½(ω + w⁺). Acar, thesis 2023, algorithm 11.

    Args:
        alpha: α.
    """

    alpha: float = 5.0

    vmapped_fields = ("alpha",)
    citation = MOML

    def __post_init__(self) -> None:
        positive("moml_nabla0", alpha=self.alpha)

    def init(self, w: Tensor) -> Tree:
        """Ω."""
        return {"omega": w.clone()}

    def pull(self, w: Tensor, state: Tree) -> Tensor:
        """∇R^t(w)."""
        return self.alpha * (w - state["omega"])

    def end(self, w: Tensor, state: Tree) -> Tree:
        """The mean of ω and w⁺."""
        return {"omega": (state["omega"] + w) / 2}
