"""Pooling: maxima and means over windows; samples are independent, so all clients' images form one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedloom.compute.cohort.layers import CohortLayer, Lookup, Unsupported, clients, cohort_layer, images

aten = torch.ops.aten


def _sizes(value: Any, dimensions: int) -> list[int]:
    """A window setting as one number for each of its two sides; a signal is an image of height one."""
    sides = [value] * dimensions if isinstance(value, int) else list(value)
    return sides if dimensions == 2 else [0, *sides]


@cohort_layer(nn.MaxPool1d, nn.MaxPool2d)
def _max_pool(module: nn.MaxPool1d | nn.MaxPool2d, lookup: Lookup) -> CohortLayer:
    if module.return_indices:
        raise Unsupported("a maximum pool that returns indices")
    dimensions = 1 if isinstance(module, nn.MaxPool1d) else 2
    window, stride, padding, dilation = (
        _sizes(v, dimensions) for v in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    if dimensions == 1:
        window[0] = stride[0] = dilation[0] = 1
    return MaxPool(window, stride, padding, dilation, module.ceil_mode, signal=dimensions == 1)


class MaxPool(CohortLayer):
    """The maximum over windows of images [c, B, (channels,) height, width], or signals [c, B, (channels,) length]."""

    def __init__(
        self, window: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool, signal: bool
    ) -> None:
        self.settings, self.signal = (window, stride, padding, dilation, ceil), signal
        reach = [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]
        self.selects = all(size <= step for size, step in zip(reach, stride or window, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        self.x = images(x[..., None, :] if self.signal else x)
        y, self.at = aten.max_pool2d_with_indices(self.x, *self.settings)
        y = clients(y, len(x))
        return y.squeeze(-2) if self.signal else y

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        delta = images(grad[..., None, :] if self.signal else grad)
        back = clients(aten.max_pool2d_with_indices_backward(delta, self.x, *self.settings, self.at), len(grad))
        return (back.squeeze(-2) if self.signal else back,)


@cohort_layer(nn.AvgPool2d)
def _average_pool(module: nn.AvgPool2d, lookup: Lookup) -> CohortLayer:
    window, stride, padding = (_sizes(v, 2) for v in (module.kernel_size, module.stride, module.padding))
    return AveragePool(window, stride, padding, module.ceil_mode, module.count_include_pad, module.divisor_override)


class AveragePool(CohortLayer):
    """The mean over windows of images [c, B, channels, height, width]."""

    def __init__(self, *settings: Any) -> None:
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        self.x = images(x)
        return clients(aten.avg_pool2d(self.x, *self.settings), len(x))

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (clients(aten.avg_pool2d_backward(images(grad), self.x, *self.settings), len(grad)),)


@cohort_layer(nn.AdaptiveAvgPool2d)
def _adaptive_average_pool(module: nn.AdaptiveAvgPool2d, lookup: Lookup) -> CohortLayer:
    sides = _sizes(module.output_size, 2)
    if None in sides:
        raise Unsupported("an adaptive pool that keeps a side")
    return AdaptiveAveragePool(sides)


class AdaptiveAveragePool(CohortLayer):
    """The mean over as many windows as the output has positions.

    On a GPU the mean over all positions is computed as such, because the gradient of windows is not deterministic.
    """

    def __init__(self, sides: list[int]) -> None:
        self.sides = sides

    def forward(self, x: Tensor) -> Tensor:
        self.x = images(x)
        self.is_global = not x.is_cpu and self.sides == [1, 1]
        if self.is_global:
            return x.mean((-2, -1), keepdim=True)
        return clients(aten._adaptive_avg_pool2d(self.x, self.sides), len(x))

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        if self.is_global:
            return (clients((grad.flatten(0, 1) / self.x[0, 0].numel()).expand_as(self.x), len(grad)),)
        return (clients(aten._adaptive_avg_pool2d_backward(images(grad), self.x), len(grad)),)
