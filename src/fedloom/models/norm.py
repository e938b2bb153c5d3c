"""Normalisation of feature maps and of weights, and what follows it: chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.models.checks import positive

Norm = Callable[[int], nn.Module]
"""Makes the normalisation of a given number of channels."""


def normalisation(model: str, norm: str, groups: int, channels: Iterable[int], dimensions: int = 2) -> Norm:
    """What normalises feature maps of the given numbers of channels.

    Group normalisation sees one sample at a time and keeps no statistics. Batch normalisation brings buffers that are
    aggregated like parameters, and does not run on the ``vmap`` engine.

    Args:
        model: the model's name, for error messages.
        norm: ``group`` or ``batch``.
        groups: groups of channels in group normalisation; must divide every number of channels.
        channels: the numbers of channels to be normalised.
        dimensions: 2 for images, 1 for signals.

    Raises:
        ConfigError: for another name, or groups that do not divide.

    >>> normalisation("resnet18", "group", 2, (64, 128))(64)
    GroupNorm(2, 64, ...)
    >>> normalisation("resnet18", "group", 3, (64, 128))
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: model 'resnet18' needs a number of groups that divides 64, not 3.
    """
    batch: Norm = nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d
    kinds: dict[str, Norm] = {"group": lambda width: nn.GroupNorm(groups, width), "batch": batch}
    if norm not in kinds:
        raise ConfigError(f"model {model!r} has no norm {norm!r}; {nearest(norm, kinds)}")
    common = gcd(*channels)
    if norm == "group" and common % positive(model, "groups", groups):
        raise ConfigError(f"model {model!r} needs a number of groups that divides {common}, not {groups}.")
    return kinds[norm]


def activation(model: str, name: str) -> Callable[[], nn.Module]:
    """What makes the activation of the given name: ``relu``, or ``swish`` x·σ(x), which is smooth (SiLU).

    Args:
        model: the model's name, for error messages.
        name: of the activation.

    Raises:
        ConfigError: for another name.

    >>> activation("resnet10", "swish")()
    SiLU()
    >>> activation("resnet10", "silu")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: model 'resnet10' has no activation 'silu'; ...
    """
    kinds: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "swish": nn.SiLU}
    if name not in kinds:
        raise ConfigError(f"model {model!r} has no activation {name!r}; {nearest(name, kinds)}")
    return kinds[name]


class SpectralLinear(nn.Linear):
    """A linear layer whose weight is divided by its spectral norm: x ↦ (W / σ(W)) x + b (Miyato et al., 2018, eq. 8).

    σ(W) is the largest singular value itself, where the paper takes one step of a power iteration: the layer keeps no
    vector from one pass to the next, so it runs under ``torch.func`` and its parameters are all that it has. The
    gradient goes through σ, ∂σ/∂W = u vᵀ. The weight is divided also where σ(W) < 1, and the bias stays as it is, as in
    the paper. A weight of zero stays zero.

    Example:
        >>> layer = SpectralLinear(3, 2, bias=False)
        >>> layer.weight.data = torch.tensor([[4.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
        >>> layer(torch.ones(1, 3)).tolist()
        [[1.0, 0.5]]
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        sigma = torch.linalg.svdvals(self.weight)[0]
        return F.linear(input, self.weight / sigma.clamp_min(torch.finfo(sigma.dtype).tiny), self.bias)
