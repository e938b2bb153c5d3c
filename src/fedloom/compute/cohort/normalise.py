"""Normalisation within a sample: group and layer normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.compute.cohort.layers import CohortLayer, Lookup, clients, cohort_layer, images
from fedloom.compute.cohort.parameters import Parameter

aten = torch.ops.aten


@cohort_layer(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, lookup: Lookup) -> CohortLayer:
    return GroupNorm(module.num_groups, module.eps, lookup("weight"), lookup("bias"))


@cohort_layer(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm, lookup: Lookup) -> CohortLayer:
    return LayerNorm(tuple(module.normalized_shape), module.eps, lookup("weight"), lookup("bias"))


class _Affine(CohortLayer):
    """y = γ x̂ + β with per-client γ and β, where x̂ is the normalised input."""

    weight: Parameter | None
    bias: Parameter | None

    def scale(self, normal: Tensor, axes: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Scale x̂ [c, B, ...]; γ and β vary along ``shape`` [c, 1, ...] and are constant along ``axes``."""
        self.normal, self.axes, self.shape = normal, axes, shape
        gamma, beta = (None if p is None else p.value[: len(normal)].reshape(shape) for p in (self.weight, self.bias))
        if gamma is None:
            return normal.clone()
        return normal * gamma if beta is None else torch.addcmul(beta, normal, gamma)

    def scale_backward(self, grad: Tensor) -> Tensor:
        """The gradient of x̂; computes those of γ and β on the way."""
        normal, count = self.normal, len(grad)
        if self.bias is not None:
            self.bias.take(grad.sum(self.axes).view_as(self.bias.value[:count]))
        if self.weight is None:
            return grad
        back = grad * self.weight.value[:count].reshape(self.shape)
        self.weight.take((grad * normal).sum(self.axes).view_as(self.weight.value[:count]))
        return back


class GroupNorm(_Affine):
    """Group normalisation of [c, B, channels, ...]; samples are independent, so all clients form one batch."""

    def __init__(self, groups: int, eps: float, weight: Parameter | None, bias: Parameter | None) -> None:
        self.groups, self.eps, self.weight, self.bias = groups, eps, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        self.x = images(x)  # [N, channels, ...]
        if not self.x.is_cpu:  # PyTorch normalises channels-last images on the CPU alone
            self.x = self.x.contiguous()
        self.sizes = (len(self.x), self.x.shape[1], self.x[0, 0].numel(), self.groups)
        normal, self.mean, self.rstd = torch.native_group_norm(self.x, None, None, *self.sizes, self.eps)
        self.x = _like(self.x, normal)
        shared = tuple(range(3, x.ndim))
        return self.scale(clients(normal, len(x)), (1, *shared), (len(x), 1, x.shape[2], *(1 for _ in shared)))

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        delta = _like(images(self.scale_backward(grad)), self.x)
        back = aten.native_group_norm_backward(
            delta, self.x, self.mean, self.rstd, None, *self.sizes, [True, False, False]
        )[0]
        return (clients(back, len(grad)),)


class LayerNorm(_Affine):
    """Layer normalisation over the last axes."""

    def __init__(self, shape: tuple[int, ...], eps: float, weight: Parameter | None, bias: Parameter | None) -> None:
        self.over, self.eps, self.weight, self.bias = list(shape), eps, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.contiguous()
        normal, self.mean, self.rstd = torch.native_layer_norm(self.x, self.over, None, None, self.eps)
        rest = x.ndim - 1 - len(self.over)
        return self.scale(normal, tuple(range(1, 1 + rest)), (len(x), *(1 for _ in range(rest)), *self.over))

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        delta = self.scale_backward(grad).contiguous()
        back = aten.native_layer_norm_backward(
            delta, self.x, self.over, self.mean, self.rstd, None, None, [True, False, False]
        )[0]
        return (back,)


def _like(value: Tensor, other: Tensor) -> Tensor:
    """The value in the memory order of ``other``, which has the same shape."""
    if value.ndim != 4:
        return value.contiguous()
    last = other.stride(1) == 1 and other.shape[1] > 1
    return value.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
