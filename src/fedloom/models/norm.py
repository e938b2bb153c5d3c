"""Group or batch normalisation, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd

from torch import nn

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
