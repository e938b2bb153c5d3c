"""The one place where samples become mini-batches: rows, labels as the client calls them, augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.parts import Batch

if TYPE_CHECKING:
    from fedloom.core.plan import Plan


class Augment(Protocol):
    """Random changes of inputs."""

    def __call__(self, x: Tensor, draws: Sequence[tuple[np.random.Generator, int]]) -> Tensor:
        """New inputs [N, ...]; each generator decides for so many of the rows, in order."""
        ...


def single(plan: Plan, rows: np.ndarray, client: int, round: int, step: int, purpose: str = "augment") -> Batch:
    """A client's mini-batch of one local step; ``purpose`` names the stream that decides its augmentation."""
    at = torch.from_numpy(rows)
    x = plan.data.arrays.x[at]
    drawn = noise(plan, client, round, step, len(rows))
    if plan.augment is None:
        return Batch(x, plan.data.labels(at, client), noise=drawn)
    views = (
        plan.augment(x, [(stream(plan, client, round, step, view, purpose), len(rows))])
        for view in range(1 + plan.twin)
    )
    return Batch(next(views), plan.data.labels(at, client), twin=next(views, None), noise=drawn)


def padded(
    plan: Plan, rows: Sequence[np.ndarray], clients: Sequence[int], round: int, step: int, purpose: str = "augment"
) -> dict[str, Any]:
    """The batch of one local step of several clients, by field: inputs [C, B, ...], targets and mask [C, B].

    Rows of weight zero, the client's own first one, fill up smaller batches; every other row is as in ``single``.
    """
    arrays, width = plan.data.arrays, max(map(len, rows))
    at = np.empty((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    for i, (client, r) in enumerate(zip(clients, rows, strict=True)):
        at[i] = plan.data.index[client][0]
        at[i, : len(r)] = r
        mask[i, : len(r)] = True
    flat = torch.from_numpy(at.reshape(-1))
    x, real = arrays.x[flat], torch.from_numpy(mask)
    views = [x]
    if plan.augment is not None:
        chosen = real.reshape(-1).to(x.device)
        filled = bool(mask.all())
        for view in range(1 + plan.twin):
            owned = [(c, r) for c, r in zip(clients, rows, strict=True) if len(r)]
            draws = [(stream(plan, c, round, step, view, purpose), len(r)) for c, r in owned]
            new = plan.augment(x if filled else x[chosen], draws)
            views.append(new if filled else x.clone().index_put_((chosen,), new))
        views = views[1:]
    owners = torch.as_tensor(clients, device=arrays.y.device).repeat_interleave(width)
    found = dict(zip(("x", "twin"), views, strict=False)) | {"y": plan.data.labels(flat, owners)}
    made = {name: value.unflatten(0, at.shape) for name, value in found.items()}
    made = made | {"mask": real.to(x.device, plan.layout.dtype)}
    if not plan.method.hooks["draw"]:
        return made
    drawn = [noise(plan, c, round, step, len(r), width) for c, r in zip(clients, rows, strict=True)]
    stacked = {p: {name: torch.stack([each[p][name] for each in drawn]) for name in t} for p, t in drawn[0].items()}
    return made | {"noise": stacked}


def noise(plan: Plan, client: int, round: int, step: int, rows: int, width: int = 0) -> dict[str, dict[str, Tensor]]:
    """The random numbers of a local step, by the place of the part that asks for them, filled up to ``width`` rows."""
    found: dict[str, dict[str, Tensor]] = {}
    for place, part in plan.method.hooks["draw"]:
        drawn = part.draw(rng.stream(plan.seed, place, round, client, step), rows, plan.facts)
        found[place] = {name: _filled(torch.as_tensor(v), width or rows, plan) for name, v in drawn.items()}
    return found


def _filled(value: Tensor, width: int, plan: Plan) -> Tensor:
    value = value.to(plan.device, plan.layout.dtype) if value.is_floating_point() else value.to(plan.device)
    if len(value) == width:
        return value
    return torch.cat([value, value.new_zeros(width - len(value), *value.shape[1:])])


def stream(
    plan: Plan, client: int, round: int, step: int, view: int = 0, purpose: str = "augment"
) -> np.random.Generator:
    """What decides the augmentation of a mini-batch; a second ``view`` of the same rows has other draws."""
    return rng.stream(plan.seed, purpose, round, client, step, view)
