"""Adaptation by gradient steps: MAML, which training anticipates, and fine-tuning, which it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, NonNegativeInt
from fedloom.base.tree import Float
from fedloom.core.context import Batch, Forward, Output
from fedloom.core.parts import Adaptation
from fedloom.rounds.subspace import in_transform

Loss = Callable[[Output, Batch], Tensor]
PIECE = 1000  # samples per gradient at evaluation


def descend(
    forward: Forward,
    theta: Float[Tensor, "P"],
    support: Batch,
    loss: Loss,
    lr: float | Tensor,
    steps: int,
    second_order: bool,
) -> Float[Tensor, "P"]:
    """Take ``steps`` steps θ ← θ - η∇L(θ; support) from θ; differentiable in θ, with or without second order.

    Without gradients (at evaluation), the gradient on a large support is accumulated over chunks, so that memory stays
    bounded.
    """
    chunks = [support] if torch.is_grad_enabled() else list(split(support))

    def gradient(at: Tensor, chunk: Batch) -> Tensor:
        return slope_at(lambda theta: loss(forward(theta, chunk.x), chunk), at, second_order)

    for _ in range(steps):
        if len(chunks) == 1:
            slope = gradient(theta, support)
        else:
            terms = [len(chunk.x) / len(support.x) * gradient(theta, chunk) for chunk in chunks]
            slope = torch.stack(terms).sum(0)
        # one pass over the model, forwards and backwards; a rate for each of several experts takes two
        theta = theta - lr * slope if isinstance(lr, Tensor) else torch.add(theta, slope, alpha=-lr)
    return theta


def slope_at(value: Callable[[Tensor], Tensor], theta: Float[Tensor, "P"], second_order: bool) -> Float[Tensor, "P"]:
    """The gradient of a function at θ; with second order differentiable in θ, where gradients are recorded.

    Plain autograd where no transform of ``torch.func`` is active, as one model is trained or adapted: a transform
    records every operation a second time, and takes fused LSTMs apart.
    """
    if in_transform():
        slope = torch.func.grad(value)(theta)
        return slope if second_order else slope.detach()
    differentiable = second_order and theta.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad():
        at = theta if differentiable else theta.detach().requires_grad_()
        (slope,) = torch.autograd.grad(value(at), at, create_graph=differentiable, materialize_grads=True)
    return slope


def split(batch: Batch) -> Iterator[Batch]:
    """The batch in chunks of at most ``PIECE`` rows; a padded batch is not split."""
    if batch.mask is not None:
        yield batch
        return
    for start in range(0, len(batch.x), PIECE):
        rows = slice(start, start + PIECE)
        yield Batch(batch.x[rows], batch.y[rows], twin=None if batch.twin is None else batch.twin[rows])


class Descent(Adaptation):
    """Base class: a client's model takes gradient steps on its samples."""

    lr: NonNegative
    steps: NonNegativeInt
    second_order: bool = False

    @property
    def descents(self) -> int:
        return self.steps

    def fit(self, forward: Forward, theta: Tensor, support: Batch, loss: Loss) -> Tensor:
        return descend(forward, theta, support, loss, self.lr, self.steps, self.second_order)


@dataclass(frozen=True)
class Maml(Descent):
    """T(θ) = θ - η∇L(θ; support), once or several times; a local step descends L(T(θ; support); query).

    With second order the gradient goes through the inner steps: for one step it is (I - η∇²L(θ))∇L(T(θ)). First order
    omits the Hessian. With no steps or η = 0 there is no adaptation. At evaluation a client's model takes the steps on
    all its training samples. Finn et al., ICML 2017; Acar, thesis 2023, ch. 3 and A.1.2; with federated averaging this
    is Per-FedAvg (Fallah et al., NeurIPS 2020).

    Args:
        lr: η ≥ 0; the thesis tries 0.1 and 0.01.
        steps: number of inner steps; the thesis tries 1 and 5; 0 gives FedAvg.
        second_order: whether to differentiate through the inner steps.
        training: False trains without adaptation and adapts at evaluation only.
    """

    lr: NonNegative = 0.1
    steps: NonNegativeInt = 1
    second_order: bool = True
    training: bool = True
    citation = "fallah2020perfedavg"

    @property
    def trains(self) -> bool:
        return self.training


@dataclass(frozen=True)
class FineTune(Descent):
    """Fine-tuning at evaluation: a client's model takes gradient steps on its training samples; training is unchanged.

    Args:
        lr: learning rate of the steps.
        steps: number of steps.
    """

    lr: NonNegative = 0.1
    steps: NonNegativeInt = 5
