"""What the models of a cohort say of the server's inputs: run forward in batches, without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedloom.core.bench import Bench

CHUNK = 500  # inputs per forward pass: no more views than these are held at once


@torch.no_grad()
def logits_of(bench: Bench, models: Sequence[Tensor] | Tensor, buffers: Sequence[Tensor] | Tensor, x: Tensor) -> Tensor:
    """Logits [N, K, C] of K models on inputs [N, ...]; models [K, P], one after the other, in evaluation mode."""
    pairs = list(zip(models, buffers, strict=True))
    parts = [torch.stack([bench.logits(*pair, part) for pair in pairs], 1) for part in x.split(CHUNK)]
    return torch.cat(parts)


@torch.no_grad()
def view_logits(
    bench: Bench, models: Sequence[Tensor] | Tensor, buffers: Sequence[Tensor] | Tensor, *counters: int
) -> tuple[Tensor, Tensor]:
    """Logits [M, K, C] of K models on two random views of all the bench's inputs.

    The views depend on the seed and the counters, of which the first is the round; all models see the same ones.
    """

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        for number, x in enumerate(bench.inputs.split(CHUNK)):
            views = bench.views(x, *counters, number)
            yield logits_of(bench, models, buffers, views[0]), logits_of(bench, models, buffers, views[1])

    first, second = zip(*chunks(), strict=True)
    return torch.cat(first), torch.cat(second)


def usable(*logits: Tensor) -> Tensor:
    """Which models' logits [N, K, C] are finite on all inputs, bool [K].

    >>> usable(torch.tensor([[[0.0, 1.0], [0.0, float("inf")]]]))
    tensor([ True, False])
    """
    return torch.stack([z.isfinite().all(-1).all(0) for z in logits]).all(0)
