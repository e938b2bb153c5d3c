"""Layers without parameters that act elementwise or change shapes: activations, sums, dropout, flattening."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.compute.cohort.layers import CohortLayer, Lookup, Unsupported, cohort_layer
from fedloom.core.dropout import masks

aten = torch.ops.aten


class ReLU(CohortLayer):
    """max(x, 0)."""

    keeps_output = selects = True

    def forward(self, x: Tensor) -> Tensor:
        self.y = torch.relu_(x) if self.in_place else torch.relu(x)
        return self.y

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (aten.threshold_backward(grad, self.y, 0),)


class Tanh(CohortLayer):
    """tanh(x), whose derivative is 1 - y²."""

    keeps_output = True

    def forward(self, x: Tensor) -> Tensor:
        self.y = torch.tanh_(x) if self.in_place else torch.tanh(x)
        return self.y

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (aten.tanh_backward(grad, self.y),)


class Sigmoid(CohortLayer):
    """σ(x) = 1 / (1 + exp(-x)), whose derivative is y (1 - y)."""

    keeps_output = True

    def forward(self, x: Tensor) -> Tensor:
        self.y = torch.sigmoid_(x) if self.in_place else torch.sigmoid(x)
        return self.y

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (aten.sigmoid_backward(grad, self.y),)


class SiLU(CohortLayer):
    """x σ(x), also called swish."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return nn.functional.silu(x)

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (aten.silu_backward(grad, self.x),)


class GELU(CohortLayer):
    """x Φ(x), where Φ is the standard normal distribution function or its tanh approximation."""

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return nn.functional.gelu(x, approximate=self.approximate)

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (aten.gelu_backward(grad, self.x, approximate=self.approximate),)


class LeakyReLU(CohortLayer):
    """x if x > 0, else slope · x."""

    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return nn.functional.leaky_relu(x, self.slope)

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (aten.leaky_relu_backward(grad, self.x, self.slope, False),)


class Identity(CohortLayer):
    """The input, unchanged."""

    keeps_output = selects = True

    def forward(self, x: Tensor) -> Tensor:
        return x

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (grad,)


class Add(CohortLayer):
    """The sum of two values, as in a residual connection; axes of length one are repeated."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.ndim != y.ndim:
            raise Unsupported("the model's forward pass adds values with different numbers of axes")
        self.shapes = x.shape, y.shape
        return x + y

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (grad if grad.shape == shape else grad.sum_to_size(shape) for shape in self.shapes)
        return one, other


class Divide(CohortLayer):
    """A value divided by a constant."""

    def __init__(self, divisor: float) -> None:
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        return x / self.divisor

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (grad / self.divisor,)


class Flatten(CohortLayer):
    """Flatten axes ``start`` to ``end`` of a sample's value; they count from 1, axis 0 being that of the rows."""

    keeps_output = selects = True

    def __init__(self, start: int = 1, end: int = -1) -> None:
        if start < 1:
            raise Unsupported(f"flattening from axis {start} on, which mixes samples")
        self.start, self.end = start + 1, end if end < 0 else end + 1

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.last = x.shape, x.ndim == 5 and x.stride(2) == 1
        return x.flatten(self.start, self.end)

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        back = grad.reshape(self.shape)
        if self.last:  # keep images channels-last
            back = back.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        return (back,)


class Pad(CohortLayer):
    """A constant before and after the last axis."""

    def __init__(self, padding: tuple[int, int], value: float) -> None:
        self.padding, self.value = padding, value

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, self.padding, value=self.value)

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        before, after = self.padding
        return (grad.narrow(-1, before, grad.shape[-1] - before - after),)


class Mean(CohortLayer):
    """The mean over one axis of a sample's value, counted from 1 as in ``Flatten``."""

    def __init__(self, axis: int, keepdim: bool = False) -> None:
        self.axis, self.keepdim = axis if axis < 0 else axis + 1, keepdim

    def forward(self, x: Tensor) -> Tensor:
        if self.axis % x.ndim < 2:
            raise Unsupported("the model's forward pass takes a mean over the samples of a batch")
        self.shape = x.shape
        return x.mean(self.axis, self.keepdim)

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        grad = grad if self.keepdim else grad.unsqueeze(self.axis)
        return ((grad / self.shape[self.axis]).expand(self.shape),)


class Dropout(CohortLayer):
    """Zero with probability p, else x / (1 - p), while training; see ``core.dropout``."""

    keeps_output = True

    def __init__(self, p: float) -> None:
        self.p = p

    @property
    def is_random(self) -> bool:
        """Whether masks differ, each of which takes a key."""
        return 0 < self.p < 1

    def forward(self, x: Tensor) -> Tensor:
        self.scale = None
        if self.draws is None or self.p == 0:
            return x
        self.scale = masks(next(self.draws), x, self.p) if self.is_random else torch.zeros_like(x)
        return x * self.scale

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (grad if self.scale is None else grad * self.scale,)


def _plain(kind: type[nn.Module], layer: Callable[[], CohortLayer]) -> None:
    cohort_layer(kind)(lambda module, lookup: layer())


for _kind, _layer in (
    (nn.ReLU, ReLU),
    (nn.Tanh, Tanh),
    (nn.Sigmoid, Sigmoid),
    (nn.SiLU, SiLU),
    (nn.Identity, Identity),
):
    _plain(_kind, _layer)


@cohort_layer(nn.GELU)
def gelu(module: nn.GELU, lookup: Lookup) -> CohortLayer:
    """The cohort layer of ``nn.GELU``."""
    return GELU(module.approximate)


@cohort_layer(nn.LeakyReLU)
def leaky_relu(module: nn.LeakyReLU, lookup: Lookup) -> CohortLayer:
    """The cohort layer of ``nn.LeakyReLU``."""
    return LeakyReLU(module.negative_slope)


@cohort_layer(nn.Flatten)
def flatten(module: nn.Flatten, lookup: Lookup) -> CohortLayer:
    """The cohort layer of ``nn.Flatten``."""
    return Flatten(module.start_dim, module.end_dim)


@cohort_layer(nn.ConstantPad1d)
def pad(module: nn.ConstantPad1d, lookup: Lookup) -> CohortLayer:
    """The cohort layer of ``nn.ConstantPad1d``."""
    before, after = module.padding
    return Pad((before, after), module.value)


@cohort_layer(nn.Dropout)
def dropout(module: nn.Dropout, lookup: Lookup) -> CohortLayer:
    """The cohort layer of ``nn.Dropout``; a model may keep it off while training."""
    return Dropout(module.p) if module.training else Identity()
