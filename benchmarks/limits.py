"""What the machine could do: the speed of a training step's matrix products alone, and of memory, on one core.

``engines.py`` and ``peers`` record them beside what they measure.

A step of plain SGD on one client's mini-batch takes, in each linear or convolutional layer, the products of the forward
pass, of the weights' gradient and, but for the first layer, of the inputs' gradient. They are timed alone, for a block
of ``CLIENTS`` clients one product a client, a convolution as the product of its unfolded images. Of memory a step moves
at least its client's weights, which are read in the forward pass, and read and written when they change: 12 bytes a
parameter in single precision. The bandwidth is that of ``w += g`` on vectors of the block's size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLIENTS = 8
REPEATS = 9


@dataclass(frozen=True)
class Limits:
    """A training step of one client, and one core of the machine.

    Attributes:
        flops: floating point operations of a step's matrix products.
        bytes: of memory that a step moves at least.
        flops_per_second: of these products alone.
        bytes_per_second: of memory.
    """

    flops: float
    bytes: float
    flops_per_second: float
    bytes_per_second: float

    def reached(self, steps_per_second: float, cores: int) -> dict[str, float]:
        """Which part of either limit so many steps a second are, on so many cores."""
        return {
            "of_matmul": round(steps_per_second * self.flops / self.flops_per_second / cores, 3),
            "of_bandwidth": round(steps_per_second * self.bytes / self.bytes_per_second / cores, 3),
        }


def limits(model: nn.Module, inputs: tuple[int, ...], batch: int) -> Limits:
    """The limits of a model's training step with a mini-batch."""
    flops = seconds = 0.0
    for number, (m, k, n) in enumerate(products(model, inputs, batch)):
        x, w, delta = torch.randn(CLIENTS, m, k), torch.randn(CLIENTS, n, k), torch.randn(CLIENTS, m, n)
        pairs = [(x, w.mT), (delta.mT, x), (delta, w)][: 2 if number == 0 else 3]
        for left, right in pairs:
            seconds += timed(lambda left=left, right=right: torch.bmm(left, right)) / CLIENTS
            flops += 2.0 * m * k * n
    size = sum(p.numel() for p in model.parameters())
    weights, grads = torch.zeros(CLIENTS * size), torch.zeros(CLIENTS * size)
    added = timed(lambda: weights.add_(grads))
    return Limits(flops, 12.0 * size, flops / seconds, 12.0 * len(weights) / added)


def products(model: nn.Module, inputs: tuple[int, ...], batch: int) -> list[tuple[int, int, int]]:
    """Rows, inner size and columns of each layer's forward product, first layer first."""
    shapes: list[tuple[int, int, int]] = []

    def note(layer: nn.Module, _: tuple[Tensor, ...], out: Tensor) -> None:
        weight = layer.get_parameter("weight")
        shapes.append((out.numel() // len(weight), weight[0].numel(), len(weight)))

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        model(torch.zeros(batch, *inputs))
    for hook in hooks:
        hook.remove()
    return shapes


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a piece of work, each measured over at least 10 ms."""
    work()
    begin = time.perf_counter()
    work()
    times = max(1, int(0.01 / (time.perf_counter() - begin + 1e-9)))
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(times):
            work()
        seconds.append((time.perf_counter() - begin) / times)
    return statistics.median(seconds)
