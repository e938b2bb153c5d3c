"""Online learners: frozen dataclasses of settings with pure hooks over explicit state.

The hooks in the order in which they are called for the t-th task, once its prediction has been recorded (before it, if
the learner ``learns_first``)::

    begin(w, state)                 the model from which the K steps start
    tasks(held, t)                  the tasks whose mean loss is minimised: the new one and some of those stored
    regulariser_grad(w, state)      ∇R^t(w), added to the gradient in each of the K steps
    end(w, state)                   the new state, given w^{t+1}
    keep(held, t, draw)             the tasks whose data stay stored for the next task

The state is a dict of vectors [P] beside the model w [P]. Settings named in ``vmapped_fields`` may be tensors, so that
experts that differ only in them are trained in one vmapped computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedloom.core.ranges import NonNegativeInt
from fedloom.core.registry import Ranged, Registry
from fedloom.core.tree import Tree


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
