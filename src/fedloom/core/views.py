"""Gradients of a local step when a client holds a private model beside the shared one.

A client of a *paired* method trains two copies of all parameters: w, which it received, and v, which never leaves it. A
local step consists of one or several *views*: the loss is evaluated at W = (1 - λ)w + λv on the step's mini-batch, and
by the chain rule its gradient g contributes (1 - λ)g to w and λg to v. Batch statistics of passes in which v alone
moves are the client's own (``rounds.client``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedloom.base.tree import Float
from fedloom.core.layout import Layout


class View(NamedTuple):
    """One gradient of a local step.

    Attributes:
        at: λ, a number or a list with one per layer [L].
        shared: step size of w relative to the learning rate; 0 freezes it, momentum included. Where a client has one
            model that it shares as a whole, also a list with one per layer [L], some of which move.
        private: likewise for v, or for the private parameters of a method that splits one model.
        data: whether there is a loss on the data; otherwise g is zero and only ``regulariser_grad`` contributes, which
            is neither clipped nor weight-decayed. With such a view all steps are θ ← θ - ηg, whatever the momentum or
            optimiser of local training.
    """

    at: float | list[float] = 0.0
    shared: float | list[float] = 1.0
    private: float = 1.0
    data: bool = True


FULL_VIEW = View()  # all parameters move along one gradient


class StepInfo(NamedTuple):
    """The position of a local step in the run.

    Attributes:
        round: t.
        step: index of the step in this round's local work.
        draws: uniform random numbers in [0, 1), one per layer [L].
    """

    round: int
    step: int
    draws: Sequence[float] = ()


class Pair(Protocol):
    """What a paired method may know of its models in a view, however they are represented."""

    @property
    def extra(self) -> Tensor:
        """Further trained scalars in [0, 1], [E]."""
        ...

    def products(self) -> tuple[float, float, float]:
        """⟨w, w⟩, ⟨v, v⟩ and ⟨w, v⟩."""
        ...

    def slope(self) -> Float[Tensor, ""]:
        """⟨g, v - w⟩, the derivative of the loss with respect to λ; g is the gradient at W."""
        ...


class SharedPrivate(NamedTuple):
    """A ``Pair`` as vectors: w, v, further scalars, and the gradient g at W."""

    w: Float[Tensor, "P"]
    v: Float[Tensor, "P"]
    extra: Float[Tensor, "E"]
    grad: Float[Tensor, "P"] | None = None

    def products(self) -> tuple[float, float, float]:
        """⟨w, w⟩, ⟨v, v⟩ and ⟨w, v⟩, as Python floats, so that sums with them need no copies."""
        w, v = self.w, self.v  # mv, because dot is slow on unaligned vectors
        ww, vv, wv = torch.stack([torch.dot(w, w), torch.dot(v, v), torch.mv(w[None], v)[0]]).tolist()
        return ww, vv, wv

    def slope(self) -> Float[Tensor, ""]:
        """⟨g, v - w⟩."""
        assert self.grad is not None
        return torch.dot(self.grad, self.v - self.w)


class RegGrad(NamedTuple):
    """Gradients of a paired method's own regularisers, added to those of a view.

    Attributes:
        w: (a, b, c): a·w + b·v + c·θ^t is added to the gradient (1 - λ)g of w.
        v: (a, b, c): a·v + b·w + c·θ^t is added to the gradient λg of v.
        extra: the gradient of the extra scalars; None if it is zero.
    """

    w: tuple[float, float, float] = (0.0, 0.0, 0.0)
    v: tuple[float, float, float] = (0.0, 0.0, 0.0)
    extra: Float[Tensor, "E"] | None = None


class LayerViews:
    """Per-layer views of vectors that persist from step to step, computed once per vector."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._cuts: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def __call__(self, vector: Float[Tensor, "P"]) -> tuple[Tensor, ...]:
        """The vector's views, one per layer."""
        key = vector.data_ptr()
        if key not in self._cuts:
            self._cuts[key] = vector, vector.split(self.layout.layers)
        return self._cuts[key][1]


def mixed(
    pair: SharedPrivate, at: float | list[float], out: Float[Tensor, "P"], layers: LayerViews
) -> Float[Tensor, "P"]:
    """Write (1 - λ)w + λv to ``out``."""
    if not isinstance(at, list):
        return torch.lerp(pair.w, pair.v, at, out=out)
    for lam, w, v, here in zip(at, layers(pair.w), layers(pair.v), layers(out), strict=True):
        torch.lerp(w, v, lam, out=here)
    return out


def times(
    grad: Float[Tensor, "P"], factor: float | list[float], out: Float[Tensor, "P"], layers: LayerViews
) -> Float[Tensor, "P"]:
    """Write the gradient times a number, or one per layer, to ``out``, which may be the gradient itself."""
    if isinstance(factor, list):
        for scale, piece, here in zip(factor, layers(grad), layers(out), strict=True):
            torch.mul(piece, scale, out=here)
        return out
    return grad if factor == 1 and out is grad else torch.mul(grad, factor, out=out)


def pulled(grad: Float[Tensor, "P"], coefficients: Iterable[float], vectors: Iterable[Tensor]) -> Float[Tensor, "P"]:
    """Add multiples of vectors to the gradient, in place.

    The pair a·x - a·y is added as a(x - y), so that nothing is added where x = y.
    """
    terms = [(much, vector) for much, vector in zip(coefficients, vectors, strict=True) if much]
    if len(terms) == 2 and terms[0][0] == -terms[1][0]:
        return grad.add_(terms[0][1] - terms[1][1], alpha=terms[0][0])
    for much, vector in terms:
        grad.add_(vector, alpha=much)
    return grad
