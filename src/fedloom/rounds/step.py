"""One local step: corrections, clipping, weight decay, momentum or Adam, θ ← θ - ηg, and the parts' proximal maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from fedloom.base.tree import Float
from fedloom.core.context import Context
from fedloom.core.hook_results import like
from fedloom.core.local import Local, clip_factor
from fedloom.core.views import FULL_VIEW, LayerViews, SharedPrivate, View, pulled, times
from fedloom.rounds.plan import ClientPlan

Piece = tuple[slice, Tensor, float, float]  # the values that move, their gradient, speed and weight decay


@dataclass
class TrainState:
    """The vectors under training.

    Attributes:
        theta: all trained values, shared parameters first, then private ones.
        shared: number of shared parameters.
        memory: optimiser state: the momentum buffer [len(theta)], or Adam's first and second moments [2 len(theta)].
        steps: number of Adam's steps so far, by the first place of the values that took them.
    """

    theta: Tensor
    shared: int
    memory: Tensor | None
    steps: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: ClientPlan, theta: Tensor, contexts: Mapping[str, Context]) -> TrainState:
        """The state at the start of a round, with a fresh optimiser, or with the momentum that a part has kept."""
        memory = theta.new_zeros(plan.memory * len(theta)) if plan.memory else None
        for place in plan.method.keep_momentum:
            assert memory is not None
            memory[: plan.layout.shared_size] = contexts[place].local["momentum"]
        return cls(theta, plan.layout.shared_size, memory)


def descend(
    plan: ClientPlan,
    trained: TrainState,
    grad: Float[Tensor, "trained"],
    lr: float,
    contexts: Mapping[str, Context],
    view: View = FULL_VIEW,
) -> None:
    """One step along the gradient of the loss, which may be overwritten."""
    _descend(plan, trained, grad[: trained.shared], grad[trained.shared :], lr, contexts, view)


def paired_gradients(
    plan: ClientPlan, trained: TrainState, pair: SharedPrivate, grad: Float[Tensor, "P"], lr: float,
    contexts: Mapping[str, Context], view: View, scratch: Float[Tensor, "P"], layers: LayerViews,
) -> None:  # fmt: skip
    """One step of w and v along the gradient at W = (1 - λ)w + λv; ``scratch`` may be overwritten."""
    personal = plan.method.personal
    received, decay = contexts["personal"].received, (0.0, 0.0)
    reg = personal.regulariser_grad(view, pair._replace(grad=grad), contexts["personal"])
    joint = bool(view.shared and view.private)
    if joint and plan.decay_commutes:  # a multiple of the model itself is free as weight decay
        decay = reg.w[0], reg.v[0]
        reg = reg._replace(w=(0.0, *reg.w[1:]), v=(0.0, *reg.v[1:]))
    shared = private = grad[:0]  # for a model that does not move
    if view.private:
        out = scratch if joint else grad  # the mixed model is no longer needed
        private = pulled(times(grad, view.at, out, layers), reg.v, (pair.v, pair.w, received))
    if view.shared:
        rest = [1 - at for at in view.at] if isinstance(view.at, list) else 1 - view.at
        shared = pulled(times(grad, rest, grad, layers), reg.w, (pair.w, pair.v, received))
    _descend(plan, trained, shared, private, lr, contexts, view, decay)
    if reg.extra is not None:
        pair.extra.copy_((pair.extra - lr * view.private * reg.extra).clamp(0, 1))


def _descend(
    plan: ClientPlan, trained: TrainState, shared: Tensor, private: Tensor, lr: float,
    contexts: Mapping[str, Context], view: View, decay: tuple[float, float] = (0.0, 0.0),
) -> None:  # fmt: skip
    """``descend`` with separate gradients for shared and private parameters; ``decay`` is added to their weight decay.

    The gradient of a half that does not move is not read.
    """
    w = trained.theta[: trained.shared]
    if view.shared:
        for place, part in plan.method.hooks["grad"]:
            shared = like(part.grad(shared, w, contexts[place]), w, f"{type(part).__name__}.grad")
    pieces: list[Piece] = [
        *((where, shared[where], speed, decay[0]) for where, speed in _speeds(plan, trained, view)),
        (slice(trained.shared, trained.shared + len(private)), private, view.private, decay[1]),
    ]
    pieces = [piece for piece in pieces if piece[2] and len(piece[1])]
    if plan.rates:
        pieces = list(_by_group(plan, trained, pieces))
    clip, usual = (plan.local.clip, plan.local.weight_decay) if view.data else (None, 0.0)
    factor = None if clip is None else clip_factor(_norm(pieces), clip)
    for where, grad, speed, more in pieces:
        _move(plan.local, trained, grad if factor is None else grad * factor, lr * speed, where, usual + more)
    speeds = [*_speeds(plan, trained, view)] if view.shared and plan.method.hooks["prox"] else []
    fixed_values = [(where, w[where].clone()) for where, speed in speeds if not speed]
    for place, part in plan.method.hooks["prox"] if speeds else ():
        part.prox(w, lr * max(speed for _, speed in speeds), contexts[place])
    for where, values in fixed_values:
        w[where] = values


def _speeds(plan: ClientPlan, trained: TrainState, view: View) -> Iterator[tuple[slice, float]]:
    """Where shared parameters have a step size of their own, relative to the learning rate."""
    if not isinstance(view.shared, list):
        yield slice(0, trained.shared), view.shared
        return
    start = 0
    for speed, layers in groupby(zip(view.shared, plan.layout.layers, strict=True), key=itemgetter(0)):
        size = sum(size for _, size in layers)
        yield slice(start, start := start + size), speed


def _by_group(plan: ClientPlan, trained: TrainState, pieces: list[Piece]) -> Iterator[Piece]:
    """The pieces, cut where the parameters' factors on the rate change; a second model is laid out as the first."""
    for where, grad, speed, decay in pieces:
        first = trained.shared if plan.is_paired and where.start else 0
        for start, stop, factor in plan.rates:
            low, high = max(start + first, where.start), min(stop + first, where.stop)
            if low < high:
                yield slice(low, high), grad[low - where.start : high - where.start], speed * factor, decay


def _norm(pieces: list[Piece]) -> Float[Tensor, ""]:
    """The Euclidean norm over all that moves."""
    if len(pieces) == 1:
        return torch.linalg.vector_norm(pieces[0][1])
    return torch.stack([grad.square().sum() for _, grad, _, _ in pieces]).sum().sqrt()


def _move(local: Local, trained: TrainState, grad: Tensor, lr: float, where: slice, decay: float) -> None:
    """Weight decay, momentum or Adam, and the step for a slice of the trained values; plain SGD without memory."""
    if trained.memory is not None and local.optimiser != "sgd":
        _adam(local, trained, grad, lr, where, decay)
        return
    buffers = [] if trained.memory is None else [trained.memory[where]]
    momentum = local.momentum if buffers else 0.0
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]  # one pass over memory instead of three
        [trained.theta[where]], [grad], buffers, weight_decay=decay, momentum=momentum,
        lr=lr, dampening=0.0, nesterov=local.nesterov and momentum > 0, maximize=False, is_first_step=False,
    )  # fmt: skip


def _adam(local: Local, trained: TrainState, grad: Tensor, lr: float, where: slice, decay: float) -> None:
    """A step of Adam; n counts those of this slice alone: what does not move has no moments to correct."""
    assert trained.memory is not None
    n = trained.steps[where.start] = trained.steps.get(where.start, 0) + 1
    moments = tuple(moment[where] for moment in trained.memory.split(len(trained.theta)))
    adam(trained.theta[where], grad, moments, n, lr, (local.beta1, local.beta2), decay, local.optimiser == "adamw")


def adam(
    theta: Float[Tensor, "n"], grad: Float[Tensor, "n"], moments: Sequence[Float[Tensor, "n"]], n: int, lr: float,
    betas: tuple[float, float], decay: float, decoupled: bool,
) -> None:  # fmt: skip
    """m ← β₁m + (1-β₁)g, s ← β₂s + (1-β₂)g², θ ← θ - η m̂ / (√ŝ + 1e-8), with m̂ = m/(1-β₁ⁿ), ŝ = s/(1-β₂ⁿ).

    All of it in one pass over memory, as PyTorch's fused optimisers do it.

    Args:
        theta: θ, which moves.
        grad: g.
        moments: m and s, which are updated.
        n: the number of this step, from 1.
        lr: η.
        betas: β₁ and β₂.
        decay: weight decay, which is added to g as decay·θ.
        decoupled: whether it is taken from θ itself instead, θ ← (1 - η·decay)θ, as in AdamW.
    """
    step = torch._fused_adamw_ if decoupled else torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage]
    first, second = moments
    step(
        [theta], [grad], [first], [second], [], [torch.tensor(float(n), device=theta.device)], lr=lr, beta1=betas[0],
        beta2=betas[1], weight_decay=decay, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
