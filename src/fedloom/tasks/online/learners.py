"""What a learner is: a frozen record of its settings with pure hooks over explicit state.

The life of a learner during the t-th task, after its prediction has been recorded::

    tasks(held, t)          which tasks' losses are descended: the new one, and some of those it has kept
    pull(w, state)          ∇R^t(w), added to the gradient in each of the K steps
    end(w, state)           the new state, from w^{t+1}
    keep(held, t, draw)     whose data are still there when the next task comes

State is a tree of vectors [P] beside the model w [P]. Settings named in ``vmapped_fields`` may be tensors: that is how
experts that differ in them are trained at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.registry import Registry
from fedloom.core.tree import Tree


@dataclass(frozen=True)
class OnlineLearner:
    """Base of all learners: every hook with the meaning of "the new task alone, nothing kept, no regulariser"."""

    trains: ClassVar[bool] = True  # whether the model moves at all
    adapts: ClassVar[bool] = True  # whether the losses are f∘U, of the adapted model, or f
    vmapped_fields: ClassVar[tuple[str, ...]] = ()
    citation: ClassVar[str] = ""

    def drawn(self) -> int:
        """How many of the tasks that count a step draws; 0 takes all."""
        return 0

    def init(self, w: Tensor) -> Tree:
        """The state before the first task."""
        return {}

    def tasks(self, held: Sequence[int], t: int) -> Sequence[int]:
        """The tasks whose mean loss is descended."""
        return (t,)

    def pull(self, w: Tensor, state: Tree) -> Tensor | float:
        """The gradient of the regulariser R^t."""
        return 0.0

    def end(self, w: Tensor, state: Tree) -> Tree:
        """The state after the K steps."""
        return state

    def keep(self, held: Sequence[int], t: int, draw: np.random.Generator) -> Sequence[int]:
        """The tasks whose data are kept, out of those held and the new one."""
        return ()


learners = Registry[OnlineLearner]("learner")
"""Every learner by name."""


def positive(name: str, **settings: float | Tensor) -> None:
    """Refuse settings that are not above 0 and finite; tensors, one number an expert, were checked as numbers."""
    for setting, value in settings.items():
        if not isinstance(value, Tensor) and not 0 < value < float("inf"):
            raise ConfigError(f"learner {name!r}: {setting} must be positive and finite, not {value:g}.")


def counted(name: str, **settings: int) -> None:
    """Refuse counts below 0."""
    for setting, value in settings.items():
        if value < 0:
            raise ConfigError(f"learner {name!r}: {setting} must be at least 0, not {value}.")


FTML = """@inproceedings{finn2019online, title={Online Meta-Learning},
  author={Finn, Chelsea and Rajeswaran, Aravind and Kakade, Sham and Levine, Sergey}, booktitle={ICML}, year={2019}}"""
OGD = """@inproceedings{zinkevich2003online,
  title={Online Convex Programming and Generalized Infinitesimal Gradient Ascent},
  author={Zinkevich, Martin}, booktitle={ICML}, year={2003}}"""


@learners.register
@dataclass(frozen=True)
class Mogd(OnlineLearner):
    """Meta OGD: w^{t+1} is w^t after K gradient steps on f^t∘U^t, and nothing else is remembered.

    Online gradient descent on the meta losses; with K = 1 it is Zinkevich's. Acar, thesis 2023, 5.3 and A.1.4, where
    more than one step is better.
    """

    citation = OGD


@learners.register
@dataclass(frozen=True)
class Ftml(OnlineLearner):
    """Follow the meta leader: K gradient steps on (1/t) Σ_{s≤t} f^s∘U^s, for which all tasks are kept.

    Finn et al., ICML 2019; Acar, thesis 2023, 5.3. The thesis does not say how a step is taken on that mean; as in
    Finn et al. it draws tasks uniformly from all those seen. Memory grows with every task.

    Args:
        draws: tasks per step, drawn without replacement; 0 takes all.
    """

    draws: int = 1

    citation = FTML

    def __post_init__(self) -> None:
        counted("ftml", draws=self.draws)

    def drawn(self) -> int:
        """As set."""
        return self.draws

    def tasks(self, held: Sequence[int], t: int) -> Sequence[int]:
        """All."""
        return (*held, t)

    def keep(self, held: Sequence[int], t: int, draw: np.random.Generator) -> Sequence[int]:
        """All."""
        return (*held, t)


@learners.register
@dataclass(frozen=True)
class Toe(OnlineLearner):
    """Train on everything: K gradient steps on the pooled samples of all tasks seen, with one model for all.

    It learns no initialisation, f instead of f∘U; the model is adapted before it is used, like all the others'. A
    mini-batch is drawn uniformly from all samples. Finn et al., ICML 2019; Acar, thesis 2023, 5.3.
    """

    adapts = False
    citation = FTML

    def tasks(self, held: Sequence[int], t: int) -> Sequence[int]:
        """All."""
        return (*held, t)

    def keep(self, held: Sequence[int], t: int, draw: np.random.Generator) -> Sequence[int]:
        """All."""
        return (*held, t)


@learners.register
@dataclass(frozen=True)
class Fs(OnlineLearner):
    """From scratch: each task adapts the random initial model, which never moves. Acar, thesis 2023, 5.3."""

    trains = False
    citation = FTML
