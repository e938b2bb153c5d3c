"""Predictions of one or several models per client: small passes are stacked into one, large ones run in turn.

Each client's models differ in some of their parameters, which a function *fills in*; the others are common to all. If a
client's pass is small, call overhead dominates: models of several clients are stacked, their samples padded to one
length, and ``torch.func.vmap`` runs them together; common parameters are not copied. A large pass is dominated by
arithmetic and gains nothing; on a CPU, stacked weights would even slow it down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedloom.core import meta as adapting
from fedloom.core.context import Batch
from fedloom.core.federation import Split
from fedloom.core.layout import Leaf, call
from fedloom.experiment.loaded import LoadedModel
from fedloom.metrics import Predictions

SMALL = 32  # on a CPU, models are stacked up to this many samples per client; on a GPU always
LIGHT = 256 << 10  # and up to this many bytes of private parameters per model; beyond, stacking costs memory
VECTORS = 256 << 20  # largest size of stacked parameters, in bytes


class Fill(Protocol):
    """Writes a client's own parameters and buffers of the model with the given number."""

    def __call__(self, client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
        """Overwrite ``theta`` [A] and ``buffers`` [B]."""
        ...


def stackable(loaded: LoadedModel) -> bool:
    """Whether models of this architecture can be stacked: no module or term declares ``stackable = False``."""
    terms = loaded.plan.method.objective if not loaded.plan.method.adaptation.is_identity else ()
    return all(getattr(one, "stackable", True) for one in (*loaded.live.module.modules(), *terms))


def pays(loaded: LoadedModel, samples: np.ndarray, own: int) -> np.ndarray:
    """Whether stacking pays, bool [K], given the clients' sample counts [K] and the bytes of their own parameters."""
    light = loaded.live.theta.is_cuda or own <= LIGHT
    return (samples <= (np.inf if loaded.live.theta.is_cuda else SMALL)) & light & stackable(loaded)


def padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Row numbers int64 [C, n], padded with each client's first, and the mask of real ones, bool [C, n].

    >>> at, real = padded([np.array([4]), np.array([7, 8])])
    >>> at.tolist(), real.tolist()
    ([[4, 4], [7, 8]], [[True, False], [True, True]])
    """
    width = max(map(len, rows))
    at = np.stack([np.concatenate([r, np.repeat(r[:1], width - len(r))]) for r in rows])
    real = np.arange(width) < np.array([len(r) for r in rows])[:, None]
    return torch.from_numpy(at), torch.from_numpy(real)


def groups(sizes: Sequence[int], together: Sequence[bool], limit: int, models: int) -> Iterator[slice]:
    """Runs of consecutive clients to evaluate together, up to ``limit`` padded samples and ``models`` models.

    >>> [(s.start, s.stop) for s in groups([2, 3, 9, 2, 2, 2], [True, True, False, True, True, True], 6, 5)]
    [(0, 2), (2, 3), (3, 6)]
    """
    start = 0
    for end in range(1, len(sizes) + 1):
        here = slice(start, end + 1)
        full = end == len(sizes) or not all(together[here]) or (end + 1 - start) > models
        if full or max(sizes[here]) * (end + 1 - start) > limit:
            yield slice(start, end)
            start = end


def through(
    loaded: LoadedModel, split: Split, clients: np.ndarray, fill: Fill, own: tuple[int, int], count: int = 1,
    support: Split | None = None,
) -> list[Predictions]:  # fmt: skip
    """Predictions of every client's models 0 .. count - 1 on its samples of the split.

    Args:
        loaded: the module, holding everything that is common to all models.
        split: the samples.
        clients: the clients, each with at least one sample, int64 [K].
        fill: writes what is a client's own.
        own: the offsets at which a client's own parameters and buffers start.
        count: number of models per client.
        support: adapt each client's model to its samples of this split first (requires ``count=1``).

    Returns:
        The predictions for each model number, over all samples in client order.
    """
    sizes, limit = split.index.sizes[clients], max(1, loaded.settings.batch_size // count)
    if support is not None:
        sizes, limit = sizes + support.index.sizes[clients], min(limit, adapting.PIECE)
    live = loaded.live
    vector = (len(live.theta) - own[0]) * live.theta.element_size()
    together = (pays(loaded, sizes, vector) & (sizes <= limit)).tolist()
    collected = Collected(loaded, count)
    with torch.inference_mode() if support is None else torch.no_grad():
        for group in groups(sizes.tolist(), together, limit, VECTORS // max(1, count * vector)):
            members = [int(client) for client in clients[group]]
            if together[group.start]:
                try:
                    collected.add(*_stacked(loaded, split, members, fill, own, count, support))
                    continue
                except RuntimeError:  # vmap does not support the model; any other error is raised again below
                    together[group.stop :] = [False] * (len(together) - group.stop)
            for client in members:
                for logits, y in _alone(loaded, split, client, fill, own, count, support):
                    collected.add(logits, y)
    return collected.found()


def _alone(
    loaded: LoadedModel, split: Split, client: int, fill: Fill, own: tuple[int, int], count: int, support: Split | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [count, N, ...] and targets [N] of one client's samples, in batches."""
    live, plan = loaded.live, loaded.plan
    rows, place = torch.from_numpy(split.index[client]), (live.theta[own[0] :], live.buffers[own[1] :])
    if count == 1:
        fill(client, 0, *place)
    if support is not None:
        at = torch.from_numpy(support.index[client])
        batch = Batch(support.arrays.x[at].to(live.theta.device), support.labels(at, client).to(live.theta.device))
        predict = adapting.deployed(plan, loaded.net, live.theta, live.buffers, batch)
        yield predict(split.arrays.x[rows].to(live.theta.device))[None], split.labels(rows, client)
        return
    for part in rows.split(loaded.settings.batch_size):
        x, out = split.arrays.x[part].to(live.theta.device), []
        for number in range(count):
            if count > 1:
                fill(client, number, *place)
            out.append(live.module(x))
        yield torch.stack(out), split.labels(part, client)


def _gathered(split: Split, members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [C, n, ...] and targets [C, n] of clients, padded to one length, and the mask bool [C, n] of real ones."""
    at, real = padded([split.index[client] for client in members])
    owners = torch.tensor(members, device=split.arrays.y.device).repeat_interleave(at.shape[1])
    flat = at.reshape(-1)
    return split.arrays.x[flat].unflatten(0, at.shape), split.labels(flat, owners).unflatten(0, at.shape), real


def _stacked(
    loaded: LoadedModel, split: Split, members: list[int], fill: Fill, own: tuple[int, int], count: int,
    support: Split | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits [count, N, ...] and targets [N] of several clients' samples, concatenated, from one pass."""
    live, plan, layout = loaded.live, loaded.plan, loaded.plan.layout
    theta = live.theta.new_empty(len(members), count, len(live.theta) - own[0])
    buffers = live.buffers.new_empty(len(members), count, len(live.buffers) - own[1])
    for row, client in enumerate(members):
        for number in range(count):
            fill(client, number, theta[row, number], buffers[row, number])
    x, y, real = _gathered(split, members)
    same, device = layout.named(live.theta, live.buffers), live.theta.device

    def adapted(theta: Tensor, buffers: Tensor, x: Tensor, sx: Tensor, sy: Tensor, mask: Tensor) -> Tensor:
        whole = torch.cat([live.theta[: own[0]], theta]) if len(theta) else live.theta
        kept = torch.cat([live.buffers[: own[1]], buffers]) if len(buffers) else live.buffers
        return adapting.deployed(plan, loaded.net, whole, kept, Batch(sx, sy, mask))(x)

    def logits(theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        mine = _named(layout.parameters, theta, own[0]) | _named(layout.buffers, buffers, own[1])
        return call(live.module, same | mine, (x,))

    if support is None:
        out = vmap(vmap(logits, in_dims=(0, 0, None)))(theta, buffers, x.to(device))  # [C, count, n, ...]
    else:
        sx, sy, mask = _gathered(support, members)
        batch = sx.to(device), sy.to(device), mask.to(device, theta.dtype)
        out = vmap(adapted)(theta[:, 0], buffers[:, 0], x.to(device), *batch)[:, None]
    return out.movedim(1, 0)[:, real.to(device)], y[real.to(y.device)]


def _named(leaves: Sequence[Leaf], vector: Tensor, start: int) -> dict[str, Tensor]:
    """Views of the trailing leaves in a vector that starts at offset ``start``."""
    found, at = {}, -start
    for leaf in leaves:
        if at >= 0:
            found[leaf.name] = leaf.view(vector[at : at + leaf.size])
        at += leaf.size
    return found


class Collected:
    """Accumulates logits and reduces them to what the metrics need, about one batch at a time."""

    def __init__(self, loaded: LoadedModel, count: int) -> None:
        self.loaded, self.count = loaded, count
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.parts: list[list[Predictions]] = []

    def add(self, logits: Tensor, y: Tensor) -> None:
        """Add logits [count, N, ...] and the targets [N, ...] of the samples."""
        self.waiting.append((logits, y.to(logits.device)))
        if self.count * sum(len(y) for _, y in self.waiting) >= self.loaded.settings.batch_size:
            self._measure()

    def _measure(self) -> None:
        out = torch.cat([logits for logits, _ in self.waiting], 1)
        y = torch.cat([y for _, y in self.waiting])
        many = y.expand(self.count, *y.shape).flatten(0, 1)
        self.parts.append(self.loaded.measurement.predictions(out.flatten(0, 1), many).split(self.count))
        self.waiting.clear()

    def found(self) -> list[Predictions]:
        """The predictions for each model number."""
        if self.waiting:
            self._measure()
        return [Predictions.joined(parts) for parts in zip(*self.parts, strict=True)]
