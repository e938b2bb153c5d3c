"""Where a local step takes its gradients when a client holds a model of its own beside the shared one.

A client of a *paired* method trains two copies of all parameters: w, which it received, and v, which never leaves it.
A local step is then one or several *views*: the loss is taken at W = (1 - λ)w + λv on the step's mini-batch, and the
chain rule hands its gradient g to both, (1 - λ)g to w and λg to v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.layout import Layout


class View(NamedTuple):
    """One gradient of a local step. Numbers are floats, or scalars [] under vmap.

    Attributes:
        at: λ, one number or one a layer: a list, or a vector [L] under vmap.
        shared: how fast w moves along it, relative to the learning rate; 0 leaves it as it is, momentum included.
        private: likewise v, or the private parameters of a method that splits one model.
        data: whether there is a loss on the data; otherwise g is zero and only what ``pull`` adds counts.
    """

    at: Any = 0.0
    shared: Any = 1.0
    private: Any = 1.0
    data: bool = True


class StepInfo(NamedTuple):
    """When a local step happens.

    Attributes:
        round: t.
        step: the number of the step in this piece of local work, a number or a scalar [].
        draws: uniform random numbers on [0, 1), one a layer, if the part is ``random``: a list, or a vector [L] under
            vmap.
    """

    round: int
    step: Any
    draws: Sequence[float] | Tensor


class SharedPrivate(NamedTuple):
    """What a client of a paired method trains: w [P], v [P] and further numbers in [0, 1], [E]."""

    w: Tensor
    v: Tensor
    extra: Tensor


class RegGrad(NamedTuple):
    """What a paired method's own terms add to the gradients of a view: coefficients, scalars [] under vmap.

    Attributes:
        w: (a, b, c), where a·w + b·v + c·θ^t is added to the gradient (1 - λ)g of w.
        v: (a, b, c), where a·v + b·w + c·θ^t is added to the gradient λg of v.
        extra: the gradient of the further numbers [E]; None if it is zero.
    """

    w: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)
    v: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)
    extra: Tensor | None = None


LayerViews = dict[
    int, tuple[Tensor, tuple[Tensor, ...]]
]  # vectors that live on from step to step, cut into their layers


def moves(speed: float | Tensor) -> bool:
    """Whether a number is other than zero; one that is not known yet, under vmap, counts as such."""
    return isinstance(speed, Tensor) or speed != 0


def _cut(layout: Layout, cuts: LayerViews, vector: Tensor) -> tuple[Tensor, ...]:
    """A vector [P] in pieces, one a layer; cut once, as long as the same tensor comes again."""
    key = vector.data_ptr()
    if key not in cuts:
        cuts[key] = vector, vector.split(layout.layers)
    return cuts[key][1]


def mixed(layout: Layout, pair: SharedPrivate, at: Any, out: Tensor | None, cuts: LayerViews) -> Tensor:
    """(1 - λ)w + λv [P], in ``out`` if there is one, which a λ for each layer as numbers needs."""
    if isinstance(at, list):
        assert out is not None
        pieces = (_cut(layout, cuts, t) for t in (pair.w, pair.v, out))
        for one, w, v, here in zip(at, *pieces, strict=True):
            torch.lerp(w, v, one, out=here)
        return out
    if out is None:
        return torch.lerp(pair.w, pair.v, layout.spread(at) if isinstance(at, Tensor) and at.ndim else at)
    return torch.lerp(pair.w, pair.v, at, out=out)


def times(layout: Layout, grad: Tensor, factor: Any, out: Tensor | None, cuts: LayerViews) -> Tensor:
    """The gradient [P] times one number, or one a layer; in ``out`` if there is one, which may be the gradient."""
    if isinstance(factor, list):
        assert out is not None
        for one, piece, here in zip(factor, _cut(layout, cuts, grad), _cut(layout, cuts, out), strict=True):
            torch.mul(piece, one, out=here)
        return out
    if isinstance(factor, Tensor):
        return (layout.spread(factor) if factor.ndim else factor) * grad
    if factor == 1 and (out is None or out is grad):
        return grad
    return factor * grad if out is None else torch.mul(grad, factor, out=out)


def pulled(grad: Tensor, coefficients: Iterable[float | Tensor], vectors: Iterable[Tensor]) -> Tensor:
    """The gradient with multiples of vectors added to it, in place."""
    for much, vector in zip(coefficients, vectors, strict=True):
        if moves(much):
            tree.axpy_(grad, much, vector)
    return grad
