"""Gradients of a local step when a client holds a private model beside the shared one.

A client of a *paired* method trains two copies of all parameters: w, which it received, and v, which never leaves it.
A local step is then one or several *views*: the loss is taken at W = (1 - λ)w + λv on the step's mini-batch, and the
chain rule hands its gradient g to both, (1 - λ)g to w and λg to v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.layout import Layout


class View(NamedTuple):
    """One gradient of a local step.

    Attributes:
        at: λ, one number or a list of one a layer.
        shared: how fast w moves along it, relative to the learning rate; 0 leaves it as it is, momentum included.
        private: likewise v, or the private parameters of a method that splits one model.
        data: whether there is a loss on the data; otherwise g is zero and only ``regulariser_grad`` counts.
    """

    at: float | list[float] = 0.0
    shared: float = 1.0
    private: float = 1.0
    data: bool = True


class StepInfo(NamedTuple):
    """When a local step happens.

    Attributes:
        round: t.
        step: the number of the step in this piece of local work.
        draws: uniform random numbers on [0, 1), one a layer, if the part is ``random``.
    """

    round: int
    step: int
    draws: Sequence[float] = ()


class SharedPrivate(NamedTuple):
    """The trained vectors of a paired method: w [P], v [P] and further scalars in [0, 1], [E]."""

    w: Tensor
    v: Tensor
    extra: Tensor


class RegGrad(NamedTuple):
    """Gradients of a paired method's own regularisers, added to those of a view.

    Attributes:
        w: (a, b, c), where a·w + b·v + c·θ^t is added to the gradient (1 - λ)g of w.
        v: (a, b, c), where a·v + b·w + c·θ^t is added to the gradient λg of v.
        extra: the gradient of the further numbers [E]; None if it is zero.
    """

    w: tuple[float, float, float] = (0.0, 0.0, 0.0)
    v: tuple[float, float, float] = (0.0, 0.0, 0.0)
    extra: Tensor | None = None


class LayerViews:
    """Vectors [P] that live on from step to step, each cut into its layers once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._cuts: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def __call__(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The vector's pieces, one a layer."""
        key = vector.data_ptr()
        if key not in self._cuts:
            self._cuts[key] = vector, vector.split(self.layout.layers)
        return self._cuts[key][1]


def mixed(pair: SharedPrivate, at: float | list[float], out: Tensor, layers: LayerViews) -> Tensor:
    """(1 - λ)w + λv, written to ``out`` [P]."""
    if not isinstance(at, list):
        return torch.lerp(pair.w, pair.v, at, out=out)
    for one, w, v, here in zip(at, layers(pair.w), layers(pair.v), layers(out), strict=True):
        torch.lerp(w, v, one, out=here)
    return out


def times(grad: Tensor, factor: float | list[float], out: Tensor, layers: LayerViews) -> Tensor:
    """The gradient [P] times one number, or one a layer, in ``out``, which may be the gradient."""
    if isinstance(factor, list):
        for one, piece, here in zip(factor, layers(grad), layers(out), strict=True):
            torch.mul(piece, one, out=here)
        return out
    return grad if factor == 1 and out is grad else torch.mul(grad, factor, out=out)


def pulled(grad: Tensor, coefficients: Iterable[float], vectors: Iterable[Tensor]) -> Tensor:
    """The gradient with multiples of vectors added to it, in place."""
    for much, vector in zip(coefficients, vectors, strict=True):
        if much:
            grad.add_(vector, alpha=much)
    return grad
