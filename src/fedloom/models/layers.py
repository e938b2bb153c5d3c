"""Layers shared by several models, and batched versions, for several clients at once, of those not in PyTorch.

``NarrowConv2d`` is a way around a fault of PyTorch's convolutions on processors without AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError
from fedloom.compute.cohort import CohortLayer, Lookup, Parameter, cohort_layer
from fedloom.compute.cohort.convolution import convolution, is_narrow
from fedloom.models.classifier import Classifier

Norm = Callable[[int], nn.Module]
"""Makes the normalisation layer of a given number of channels."""


NormName = Literal["group", "batch"]
ActivationName = Literal["relu", "swish"]
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "swish": nn.SiLU}
"""Makers of activations; ``swish`` is the smooth x·σ(x)."""


def activation_of(model: str, activation: ActivationName) -> Callable[[], nn.Module]:
    """The maker of a model's activations; ``model`` is its name, for error messages.

    >>> activation_of("resnet18", "swish")()
    SiLU()
    """
    one_of(f"model {model!r} has no activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation]


def normalisation(model: str, norm: NormName, groups: int, channels: Iterable[int], dimensions: int = 2) -> Norm:
    """The factory of a model's normalisation layers.

    Group normalisation treats one sample at a time and keeps no statistics. Batch normalisation adds buffers, which
    are aggregated like parameters.

    Args:
        model: the model's name, for error messages.
        norm: the kind of normalisation.
        groups: groups of channels in group normalisation; must divide every number of channels.
        channels: all numbers of channels to be normalised.
        dimensions: 2 for images, 1 for signals.

    >>> normalisation("resnet18", "group", 2, (64, 128))(64)
    GroupNorm(2, 64, ...)
    >>> normalisation("resnet18", "group", 3, (64, 128))
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: model 'resnet18' needs a number of groups that divides 64, not 3.
    """
    one_of(f"model {model!r} has no norm", norm, get_args(NormName))
    if norm == "batch":
        return nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d
    common = gcd(*channels)
    if common % groups:
        raise ConfigError(f"model {model!r} needs a number of groups that divides {common}, not {groups}.")
    return lambda width: nn.GroupNorm(groups, width)


class GlobalMean(nn.Module):
    """Global average pooling: [B, C, H, W] or [B, C, T] to [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2)


class MixedPool(nn.Module):
    """Global pooling a·max + (1 - a)·mean, [B, C, H, W] to [B, C], with a learnt from 1/2 (Lee et al., 2016).

    >>> MixedPool()(torch.tensor([[[[0.0, 4.0]]]])).item()
    3.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        return self.mix * flat.amax(2) + (1 - self.mix) * flat.mean(2)


class SpectralLinear(nn.Linear):
    """A linear layer with a spectrally normalised weight: x ↦ (W / σ(W)) x + b (Miyato et al., 2018, eq. 8).

    σ(W) is the exact largest singular value, where the paper takes one step of power iteration; the layer therefore
    has no state but its parameters and runs under ``torch.func``. The gradient flows through σ, ∂σ/∂W = u vᵀ. As in the
    paper, the weight is divided even if σ(W) < 1, and the bias is unchanged. A zero weight stays zero.

    Example:
        >>> layer = SpectralLinear(3, 2, bias=False)
        >>> layer.weight.data = torch.tensor([[4.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
        >>> layer(torch.ones(1, 3)).tolist()
        [[1.0, 0.5]]
    """

    def forward(self, input: Tensor) -> Tensor:
        sigma = torch.linalg.svdvals(self.weight)[0]
        return F.linear(input, self.weight / sigma.clamp_min(torch.finfo(sigma.dtype).tiny), self.bias)


def classifier(body: nn.Module, width: int, classes: int, spectral: bool) -> Classifier:
    """A ``Classifier``, with a ``SpectralLinear`` head if ``spectral``."""
    network = Classifier(body, width, classes)
    if spectral:
        network.head = SpectralLinear(width, classes)
    return network


@cohort_layer(MixedPool)
def cohort_mixed_pool(module: MixedPool, lookup: Lookup) -> CohortLayer:
    """The layer of a cohort of models with mixed pooling."""
    mix = lookup("mix")
    assert mix is not None
    return CohortMixedPool(mix)


class CohortMixedPool(CohortLayer):
    """a·max + (1 - a)·mean with each client's a: [c, B, channels, height, width] to [c, B, channels].

    Positions that attain the maximum share its gradient equally.
    """

    def __init__(self, mix: Parameter) -> None:
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        self.x, flat = x, x.flatten(3)
        self.largest, self.mean = flat.amax(3), flat.mean(3)
        share = self.mix.value[: len(x), :, None]
        return share * self.largest + (1 - share) * self.mean

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        flat = self.x.flatten(3)
        share = self.mix.value[: len(grad), :, None]
        at = (flat == self.largest[..., None]).to(grad.dtype)
        back = at * (share * grad / at.sum(3))[..., None] + ((1 - share) * grad / flat.shape[3])[..., None]
        self.mix.take((grad * (self.largest - self.mean)).sum((1, 2))[:, None])
        return (back.view(self.x.shape),)


@cohort_layer(SpectralLinear)
def cohort_spectral_linear(module: SpectralLinear, lookup: Lookup) -> CohortLayer:
    """The layer of a cohort of models with spectrally normalised weights."""
    weight = lookup("weight")
    assert weight is not None
    return CohortSpectralLinear(weight, lookup("bias"))


class CohortSpectralLinear(CohortLayer):
    """y = x Ŵᵀ + b with Ŵ = W / σ for every client: [c, B, in] to [c, B, out].

    If G is the gradient of Ŵ, that of W is (G - ⟨G, Ŵ⟩ u vᵀ) / σ, with the singular vectors u and v of σ.
    """

    def __init__(self, weight: Parameter, bias: Parameter | None) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        u, sigma, v = torch.linalg.svd(self.weight.matrix[: len(x)], full_matrices=False)
        self.outer = u[:, :, :1] * v[:, :1]  # [c, out, in]
        self.sigma = sigma[:, 0].clamp_min(torch.finfo(sigma.dtype).tiny)[:, None, None]
        self.normal = self.weight.matrix[: len(x)] / self.sigma
        y = torch.bmm(x, self.normal.mT)
        return y if self.bias is None else y + self.bias.value[: len(x), None]

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        passed = torch.bmm(grad, self.normal)
        gradient = torch.bmm(grad.mT, self.x)
        along = (gradient * self.normal).sum((1, 2), keepdim=True)
        self.weight.take((gradient - along * self.outer) / self.sigma)
        if self.bias is not None:
            self.bias.take(grad.sum(1))
        return (passed,)


class NarrowConv2d(nn.Conv2d):
    """A strided 1x1 convolution of fewer than 8 channels, applied to images in the default memory order.

    For images stored channels-last, PyTorch 2.13 on x86 processors without AVX-512 writes beyond its memory when it
    computes the gradient of such a kernel, and the process aborts at some later time.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.flatten(1)[..., None, None]  # [out, in, 1, 1] of the default strides
        return self._conv_forward(input.contiguous(), weight, self.bias)


cohort_layer(NarrowConv2d)(convolution)


def with_safe_convolutions(model: nn.Module) -> nn.Module:
    """The model, whose ``nn.Conv2d`` that the fault concerns have become ``NarrowConv2d``."""
    for module in model.modules():
        if type(module) is nn.Conv2d and is_narrow(module):
            module.__class__ = NarrowConv2d  # keeps its parameters, hooks and place
    return model
