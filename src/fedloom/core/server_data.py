"""Data at the server: unlabelled inputs of the target distribution, and forward passes on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.tree import Bool, Float, Shaped
from fedloom.core.layout import Layout, call

CHUNK = 500  # inputs per forward pass, which bounds the views held in memory


class Augment(Protocol):
    """Random augmentation of inputs."""

    def __call__(self, x: Tensor, draws: Sequence[tuple[np.random.Generator, int]]) -> Tensor:
        """Augmented inputs [N, ...]; each pair (generator, n) augments the next n rows."""
        ...


@dataclass(frozen=True)
class ServerData:
    """Unlabelled inputs and the federation's model, for parts that learn at the server, or send inputs.

    There are no labels here, so what a part does at the server cannot depend on them.

    Args:
        network: the architecture; its own parameter values are never read.
        layout: positions of its parameters in θ.
        theta0: the initial parameters, from which private ones are taken.
        buffers0: the initial buffers, likewise.
        inputs: samples from the target distribution.
        seed: seed of views and orders.
        change: the augmentation that makes a view; None for methods that need no views.
    """

    network: nn.Module
    layout: Layout
    theta0: Float[Tensor, "model"]
    buffers0: Float[Tensor, "model_buffers"]
    inputs: Shaped[Tensor, "M ..."]
    seed: int = 0
    change: Augment | None = None

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the architecture, in evaluation mode."""
        return copy.deepcopy(self.network).to(self.inputs.device).eval()

    def logits(
        self, shared: Float[Tensor, "P"], buffers: Float[Tensor, "buffers"], x: Shaped[Tensor, "N ..."]
    ) -> Float[Tensor, "N C"]:
        """Logits of the model with these shared parameters and buffers, differentiable in ``shared``."""
        theta = torch.cat([shared, self.theta0[self.layout.shared_size :].to(shared.device)])
        all_buffers = torch.cat([buffers, self.buffers0[self.layout.shared_buffers :].to(shared.device)])
        tensors: Mapping[str, Tensor] = self.layout.views(theta, all_buffers)
        return call(self.model, tensors, (x,))

    def views(self, x: Tensor, round: int, *counters: int) -> tuple[Tensor, Tensor]:
        """Two random views of inputs [N, ...]; a function of the seed, the round and the counters alone."""
        if self.change is None:
            raise ConfigError("views of the server's inputs need a part with needs = Needs(target='views').")
        streams = (rng.stream(self.seed, "target view", round, view, *counters) for view in (0, 1))
        first, second = (self.change(x, [(stream, len(x))]) for stream in streams)
        return first, second

    def batches(self, round: int, size: int) -> Iterator[tuple[int, Tensor]]:
        """Mini-batches of the inputs without end: the number of the pass, and rows, int64 [≤ size], in random order."""
        for number in count():
            order = rng.stream(self.seed, "target order", round, number).permutation(len(self.inputs))
            yield from ((number, rows) for rows in torch.from_numpy(order).split(size))


@torch.no_grad()
def logits_of(
    data: ServerData,
    models: Sequence[Float[Tensor, "P"]] | Float[Tensor, "K P"],
    buffers: Sequence[Float[Tensor, "buffers"]] | Float[Tensor, "K buffers"],
    x: Shaped[Tensor, "N ..."],
) -> Float[Tensor, "N K C"]:
    """Logits of K models on inputs, in evaluation mode."""
    pairs = list(zip(models, buffers, strict=True))
    parts = [torch.stack([data.logits(*pair, part) for pair in pairs], 1) for part in x.split(CHUNK)]
    return torch.cat(parts)


@torch.no_grad()
def view_logits(
    data: ServerData,
    models: Sequence[Float[Tensor, "P"]] | Float[Tensor, "K P"],
    buffers: Sequence[Float[Tensor, "buffers"]] | Float[Tensor, "K buffers"],
    *counters: int,
) -> tuple[Float[Tensor, "M K C"], Float[Tensor, "M K C"]]:
    """Logits of K models on two random views of all the server's inputs.

    The views depend on the seed and the counters alone, the first of which is the round; all models see the same ones.
    """

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        for number, x in enumerate(data.inputs.split(CHUNK)):
            views = data.views(x, *counters, number)
            yield logits_of(data, models, buffers, views[0]), logits_of(data, models, buffers, views[1])

    first, second = zip(*chunks(), strict=True)
    return torch.cat(first), torch.cat(second)


def usable(*logits: Float[Tensor, "N K C"]) -> Bool[Tensor, "K"]:
    """Mask of the models whose logits are finite on all inputs.

    >>> usable(torch.tensor([[[0.0, 1.0], [0.0, float("inf")]]]))
    tensor([ True, False])
    """
    return torch.stack([z.isfinite().all(-1).all(0) for z in logits]).all(0)
