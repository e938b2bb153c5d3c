"""Where a local step takes its gradients when a client holds a model of its own beside the shared one.

A client of a *paired* method trains two copies of all parameters: w, which it received, and v, which never leaves it.
A local step is then one or several *views*: the loss is taken at W = (1 - λ)w + λv on the step's mini-batch, and the
chain rule hands its gradient g to both, (1 - λ)g to w and λg to v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class View(NamedTuple):
    """One gradient of a local step. Numbers are floats, or scalars [] under vmap.

    Attributes:
        at: λ, one number or one for every parameter [P].
        shared: how fast w moves along it, relative to the learning rate; 0 leaves it as it is, momentum included.
        private: likewise v, or the private parameters of a method that splits one model.
        data: whether there is a loss on the data; otherwise g is zero and only what ``pull`` adds counts.
    """

    at: Any = 0.0
    shared: Any = 1.0
    private: Any = 1.0
    data: bool = True


class Moment(NamedTuple):
    """When a local step happens.

    Attributes:
        round: t.
        step: the number of the step in this piece of local work, a number or a scalar [].
        draws: uniform random numbers on (0, 1), one a layer [L], if the part is ``random``.
        spread: makes one number a parameter [P] out of one a layer [L].
    """

    round: int
    step: Any
    draws: Tensor
    spread: Callable[[Tensor], Tensor]


class Pair(NamedTuple):
    """What a client of a paired method trains, or a gradient of it: w [P], v [P] and further numbers in [0, 1], [E]."""

    w: Tensor
    v: Tensor
    extra: Tensor
