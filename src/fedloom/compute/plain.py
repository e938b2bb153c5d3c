"""Plain rounds: SGD on the cross entropy, with every correction that is affine in the gradient and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import is_ours
from fedloom.base.tree import Float
from fedloom.compute.cohort import BatchSchedule, Change, StepRule
from fedloom.core.context import Context
from fedloom.core.parts import Part, Reduce
from fedloom.core.views import StepInfo, View
from fedloom.rounds.plan import ClientPlan


def has_plain_rounds(plan: ClientPlan) -> bool:
    """Whether a client's round is SGD or Adam on the cross entropy with affine corrections, as in ``cohort.train``.

    Gradients may be clipped, inputs augmented, and rates change from step to step.
    """
    return _is_affine(plan) and not plan.has_views


def has_separate_rounds(plan: ClientPlan) -> bool:
    """Whether a client's two models have plain rounds each."""
    return plan.is_paired and separate_pull(plan, 0, 1) is not None and descends(plan)


def separate_pull(plan: ClientPlan, round: int, steps: int) -> float | None:
    """μ if w is trained as if there were no v, and v on F_i(v) + (μ/2)‖v - θ^t‖²; else None.

    A part that reads more than the step's number, such as its context or the models, does not train them so.
    """
    personal, unread, pulls = plan.method.personal, cast(Any, None), set[float]()
    for number in range(steps):
        try:
            views = personal.views(StepInfo(round, number), unread, unread)
            first, second = (personal.regulariser_grad(view, unread, unread) for view in views)
        except (AttributeError, IndexError, TypeError, ValueError):
            return None
        pull = second.v[0]
        is_separate = views == (View(private=0.0), View(1.0, shared=0.0)) and not any(first.w)
        if not is_separate or second.v != (pull, 0.0, -pull) or second.extra is not None:
            return None
        pulls.add(pull)
    return pulls.pop() if len(pulls) == 1 else None


def has_dropout(plan: ClientPlan) -> bool:
    """Whether layers of the model draw random masks."""
    return any(isinstance(layer, nn.Dropout) and layer.p for layer in plan.model.modules())


def descends(plan: ClientPlan) -> bool:
    """Whether steps are SGD on the cross entropy of the samples themselves with affine corrections, without a clip."""
    local = plan.local
    return _is_affine(plan) and plan.is_even and not local.nesterov and local.clip is None and plan.augment is None


def _is_affine(plan: ClientPlan) -> bool:
    """Whether gradients are those of the cross entropy with affine corrections, the same at all clients."""
    method, hooks, local = plan.method, plan.method.hooks, plan.local
    changed = hooks["start"] or hooks["point"] or hooks["on_step"] or hooks["probe"] or hooks["prox"]
    changed = changed or plan.is_meta or plan.has_twin or plan.exit_weights or method.keep_momentum
    optimiser = not plan.has_common_settings or local.rates or local.dp_clip is not None or plan.teacher is not None
    affine = all(part.affine for _, part in hooks["grad"]) and not (hooks["grad"] and plan.has_private)
    return method.is_cross_entropy and affine and not (changed or optimiser)


def needs_only_sums(plan: ClientPlan) -> bool:
    """Whether no part needs a client's own update; an evaluation may, without changing any bit of the sum."""
    method, hooks = plan.method, plan.method.hooks
    needs_updates = hooks["send"] or plan.private_size or plan.forges or method.needs("updates") or plan.layout.buffers
    ends = hooks["end"] or hooks["init_client"] or method.uploading
    return not needs_updates and (not ends or is_linear(plan))


def is_linear(plan: ClientPlan) -> bool:
    """Whether clients keep states, and these, what is uploaded and the corrections are linear in what clients read."""
    hooks, uploading = plan.method.hooks, plan.method.uploading
    hooks_are_linear = all(part.linear for hook in ("init_client", "begin", "grad", "end") for _, part in hooks[hook])
    are_summed = not any(part.update_statistics or Reduce.ALL in part.uploads.values() for _, part in uploading)
    return bool(hooks["init_client"]) and hooks_are_linear and are_summed


Correction = tuple[tuple[float, float], Callable[[Tensor], None]]
"""A client's a·g + b·w + k: a and b, and a function that writes k [P]."""


def corrections(plan: ClientPlan, contexts: Iterable[dict[str, Context]]) -> Iterator[Correction]:
    """The corrections of clients, by calling the hooks with what each client has."""
    parts, zero = plan.method.hooks["grad"], plan.theta0.new_zeros(()).expand_as(plan.theta0)

    def write(by_place: dict[str, Context], row: Tensor) -> None:
        constant = row.zero_()
        for place, part in parts:
            constant = part.grad(constant, zero, by_place[place])
        if constant is not row:
            row.copy_(constant)

    return ((_numbers(parts, by_place), partial(write, by_place)) for by_place in contexts)


def affine_rule(
    plan: ClientPlan, lr: float, steps: Sequence[int], client_corrections: Iterable[Correction],
    rows: Callable[[], Tensor], alike: bool = True,
) -> StepRule | None:  # fmt: skip
    """The update rule of a block's clients with all their corrections; None if its coefficients differ between them.

    Args:
        plan: the client plan.
        lr: the learning rate η of the round.
        steps: the clients' numbers of steps.
        client_corrections: their corrections, each of which is used before the next is requested.
        rows: returns memory for the constants of the corrections, [C, P].
        alike: whether they have received the same model.
    """
    local, parts = plan.local, plan.method.hooks["grad"]
    usual = StepRule(
        lr, local.weight_decay, local.momentum, clip=local.clip, nesterov=local.nesterov,
        betas=None if local.optimiser == "sgd" else (local.beta1, local.beta2),
        decoupled=local.optimiser == "adamw", speeds=_speeds(plan, steps),
    )  # fmt: skip
    if not parts:
        return usual
    has_client_constants = plan.method.hooks["begin"] or plan.method.hooks["init_client"]
    is_library = all(is_ours(type(part).__module__) for _, part in parts)
    # a user's part may read what else differs between clients
    is_common = is_library and alike and not has_client_constants
    constants, numbers = rows()[: 1 if is_common else len(steps)], set[tuple[float, float]]()
    for client, (coefficients, write) in enumerate(client_corrections):
        numbers.add(coefficients)
        if len(numbers) > 1:
            return None
        if client < len(constants):
            write(constants[client])
    ((slope, pull),) = numbers
    if not slope:
        return None
    if local.clip is not None or usual.betas is not None:
        return replace(usual, constant=constants.expand(len(steps), -1), slope=slope, pull=pull)
    constant = (constants if slope == 1 else constants.div_(slope)).expand(len(steps), -1)
    return replace(usual, lr=lr * slope, weight_decay=(local.weight_decay + pull) / slope, constant=constant)


def _speeds(plan: ClientPlan, steps: Sequence[int]) -> Float[Tensor, "steps C"] | None:
    """The factors on the rate in the steps of clients that take so many; 1 once they are done. None if all are 1."""
    client_speeds = [plan.local.speeds(count) for count in steps]
    if client_speeds[0] is None:
        return None
    result = torch.ones(max(steps), len(steps), dtype=torch.float64)
    for column, speeds in zip(result.T, client_speeds, strict=True):
        assert speeds is not None
        column[: len(speeds)] = torch.tensor(speeds, dtype=torch.float64)
    return result


def augmentation(plan: ClientPlan, round: int, clients: Sequence[int], schedule: BatchSchedule) -> Change | None:
    """How the mini-batches of a schedule are augmented, with the draws of ``minibatch``; None if they are not.

    The library's augmentations treat every image by itself, so that the mini-batches of all clients pass them at once.
    A user's may combine those of a mini-batch, and get one client's at a time.

    Args:
        plan: the client plan.
        round: the round.
        clients: the clients in the schedule's order.
        schedule: their mini-batches.
    """
    change = plan.augment
    if change is None:
        return None
    steps: Sequence[object] = getattr(change, "steps", (change,))
    is_library = all(is_ours(type(transform).__module__) for transform in steps)

    def augment(x: Tensor, numbers: range) -> Tensor:
        draws = [
            (rng.stream(plan.seed, "augment", round, client, step, 0), size)
            for step in numbers
            for client, size in zip(clients, schedule.sizes[step], strict=False)
        ]
        if is_library:
            return change(x, draws)
        parts = x.split([size for _, size in draws])
        return torch.cat([change(part, [draw]) for part, draw in zip(parts, draws, strict=True)])

    return augment


def _numbers(parts: Sequence[tuple[str, Part]], by_place: dict[str, Context]) -> tuple[float, float]:
    """The coefficients a and b of the affine correction a·g + b·w + k, found by evaluating it with scalars for g and w.

    Other vectors are zero; what is left of k is the value at g = w = 0. All of it happens on the CPU, since the host
    would wait for a GPU several times per client.
    """

    def scalar(value: Tensor) -> Tensor:
        return value.new_zeros(1, dtype=torch.float64, device="cpu")

    def scalars(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: scalar(value) if value.ndim else value.cpu() for name, value in tree.items()}

    contexts = {
        place: by_place[place]._replace(
            received=scalar(by_place[place].received), down=scalars(by_place[place].down),
            state=scalars(by_place[place].state), local=scalars(by_place[place].local),
        )
        for place, _ in parts
    }  # fmt: skip

    def correction(g: float, w: float) -> float:
        like = contexts[parts[0][0]].received
        grad, weight = like + g, like + w
        for place, part in parts:
            grad = part.grad(grad, weight, contexts[place])
        return float(grad[0])

    rest = correction(0, 0)
    return correction(1, 0) - rest, correction(0, 1) - rest
