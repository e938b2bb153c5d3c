"""Adaptation by gradient steps: MAML, which training anticipates, and fine-tuning, which it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Batch, Forward, Output
from fedloom.core.errors import ConfigError
from fedloom.core.parts import Adaptation
from fedloom.core.slots import adaptations

Loss = Callable[[Output, Batch], Tensor]
PIECE = 1000  # samples of one gradient at evaluation


def descended(
    forward: Forward, theta: Tensor, support: Batch, loss: Loss, lr: float, steps: int, second_order: bool
) -> Tensor:
    """Θ after so many steps θ ← θ - η∇L(θ; support), differentiable in θ [P] through the steps or past them.

    Where nobody differentiates through them (evaluation), a large support's gradient is the weighted mean of those of
    its pieces, so that memory does not grow with it.
    """
    pieces = [support] if torch.is_grad_enabled() else list(cut(support))

    def value(at: Tensor, piece: Batch) -> Tensor:
        return loss(forward(at, piece.x), piece)

    for _ in range(steps):
        shares = [len(piece.x) / len(support.x) * torch.func.grad(value)(theta, piece) for piece in pieces]
        slope = shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)
        theta = theta - lr * (slope if second_order else slope.detach())
    return theta


def cut(batch: Batch) -> Iterator[Batch]:
    """Its rows in pieces of at most ``PIECE``; a batch with padding stays whole."""
    if batch.mask is not None:
        yield batch
        return
    for at in range(0, len(batch.x), PIECE):
        rows = slice(at, at + PIECE)
        yield Batch(batch.x[rows], batch.y[rows], twin=None if batch.twin is None else batch.twin[rows])


def _check(name: str, lr: float | Tensor, steps: int) -> None:
    if isinstance(lr, Tensor):  # one number an expert, where several are trained at once
        return
    if not 0 <= lr < float("inf") or steps < 0:
        raise ConfigError(f"adaptation {name!r}: lr must be at least 0 and finite, and steps at least 0.")


@adaptations.register
@dataclass(frozen=True)
class Maml(Adaptation):
    """T(θ) = θ - η∇L(θ; support), once or several times; a local step descends L(T(θ; support); query).

    With second order the gradient goes through the inner steps: for one step it is (I - η∇²L(θ))∇L(T(θ)). First order
    leaves the Hessian out. With no steps or η = 0 nothing adapts. At evaluation a client's model takes its steps on
    all of its training samples. Finn et al., ICML 2017; Acar, thesis 2023, ch. 3 and A.1.2; with federated averaging
    this is Per-FedAvg (Fallah et al., NeurIPS 2020).

    Args:
        lr: η; the thesis searches .1 and .01.
        steps: inner steps; the thesis searches 1 and 5, with 0 it is FedAvg.
        second_order: whether the gradient goes through the inner steps.
        training: False trains without adaptation and adapts at evaluation only.
    """

    lr: float = 0.1
    steps: int = 1
    second_order: bool = True
    training: bool = True

    citation = """@inproceedings{fallah2020perfedavg,
  title={Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach},
  author={Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman}, booktitle={NeurIPS}, year={2020}}"""

    def __post_init__(self) -> None:
        _check("maml", self.lr, self.steps)

    @property
    def trains(self) -> bool:
        return self.training

    def adapt(
        self, forward: Forward, theta: Tensor, support: Batch, loss: Loss
    ) -> tuple[Callable[[Tensor], Output], Tensor | None]:
        """The model after the inner steps."""
        fitted = descended(forward, theta, support, loss, self.lr, self.steps, self.second_order)
        return lambda x: forward(fitted, x), None


@adaptations.register(name="finetune")
@dataclass(frozen=True)
class FineTune(Adaptation):
    """At evaluation a client's model takes gradient steps on all of its training samples; training knows nothing of it.

    Args:
        lr: the steps' learning rate.
        steps: how many.
    """

    lr: float = 0.1
    steps: int = 5

    def __post_init__(self) -> None:
        _check("finetune", self.lr, self.steps)

    def adapt(
        self, forward: Forward, theta: Tensor, support: Batch, loss: Loss
    ) -> tuple[Callable[[Tensor], Output], Tensor | None]:
        """The model after the steps."""
        fitted = descended(forward, theta, support, loss, self.lr, self.steps, second_order=False)
        return lambda x: forward(fitted, x), None
