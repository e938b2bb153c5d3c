"""Layers without parameters that act elementwise or change shapes: activations, sums, dropout, flattening."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.compute.cohort.layers import CohortLayer, Unsupported, cohort_layer
from fedloom.core.dropout import masks

aten = torch.ops.aten


class Activation(CohortLayer):
    """An elementwise function; its gradient is computed from the output if that is kept, else from the input.

    Attributes:
        function: the function.
        in_place_function: the same in place, if the output is kept.
        gradient: the input's gradient from the output's and the kept value.
    """

    function: Callable[[Tensor], Tensor]
    in_place_function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = self.in_place_function(x) if self.keeps_output and self.in_place else self.function(x)
        self.saved_value = y if self.keeps_output else x
        return y

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        return (self.gradient(grad, self.saved_value),)


class ReLU(Activation):
    """max(x, 0)."""

    keeps_output = selects = True
    function, in_place_function = torch.relu, torch.relu_
    gradient = staticmethod(partial(aten.threshold_backward, threshold=0))


class Tanh(Activation):
    """tanh(x), whose derivative is 1 - y²."""

    keeps_output = True
    function, in_place_function, gradient = torch.tanh, torch.tanh_, aten.tanh_backward


class Sigmoid(Activation):
    """σ(x) = 1 / (1 + exp(-x)), whose derivative is y (1 - y)."""

    keeps_output = True
    function, in_place_function, gradient = torch.sigmoid, torch.sigmoid_, aten.sigmoid_backward


class SiLU(Activation):
    """x σ(x), also called swish."""

    function, gradient = staticmethod(nn.functional.silu), aten.silu_backward


class GELU(Activation):
    """x Φ(x), where Φ is the standard normal distribution function or its tanh approximation."""

    def __init__(self, approximate: str = "none") -> None:
        self.function = partial(nn.functional.gelu, approximate=approximate)
        self.gradient = partial(aten.gelu_backward, approximate=approximate)


class LeakyReLU(Activation):
    """x if x > 0, else slope · x."""

    def __init__(self, slope: float = 0.01) -> None:
        self.function = partial(nn.functional.leaky_relu, negative_slope=slope)
        self.gradient = partial(aten.leaky_relu_backward, negative_slope=slope, self_is_result=False)


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
        grad_x, grad_y = (grad if grad.shape == shape else grad.sum_to_size(shape) for shape in self.shapes)
        return grad_x, grad_y


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


for _kind, _layer in {
    nn.ReLU: lambda module: ReLU(),
    nn.Tanh: lambda module: Tanh(),
    nn.Sigmoid: lambda module: Sigmoid(),
    nn.SiLU: lambda module: SiLU(),
    nn.Identity: lambda module: Identity(),
    nn.GELU: lambda module: GELU(module.approximate),
    nn.LeakyReLU: lambda module: LeakyReLU(module.negative_slope),
    nn.Flatten: lambda module: Flatten(module.start_dim, module.end_dim),
    nn.ConstantPad1d: lambda module: Pad(module.padding, module.value),
    nn.Dropout: lambda module: Dropout(module.p) if module.training else Identity(),  # a model may keep it off
}.items():
    cohort_layer(_kind)(lambda module, lookup, layer=_layer: layer(module))
