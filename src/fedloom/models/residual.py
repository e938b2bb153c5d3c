"""ResNet-18 for small images, with group or batch normalisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.models.checks import image, positive
from fedloom.models.classifier import Classifier, models

Norm = Callable[[int], nn.Module]
"""Makes the normalisation of a given number of channels."""


class Block(nn.Module):
    """A basic residual block: two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] to [B, after, H / stride, W / stride]."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class GlobalMean(nn.Module):
    """The mean over height and width: [B, C, H, W] to [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        """One value a channel."""
        return x.mean((2, 3))


def _normalisation(norm: str, groups: int) -> Norm:
    kinds: dict[str, Norm] = {
        "group": lambda channels: nn.GroupNorm(groups, channels),
        "batch": lambda channels: nn.BatchNorm2d(channels),
    }
    if norm not in kinds:
        raise ConfigError(f"model 'resnet18' has no norm {norm!r}; {nearest(norm, kinds)}")
    if norm == "group" and 64 % positive("resnet18", "groups", groups):
        raise ConfigError(f"model 'resnet18' needs a number of groups that divides 64, not {groups}.")
    return kinds[norm]


@models.register
def resnet18(*, classes: int, inputs: tuple[int, ...], norm: str = "group", groups: int = 2) -> Classifier:
    """ResNet-18 for small images: 3x3 stem, no first pool (He et al., 2016; in this form 11.17 million parameters).

    Group normalisation is the default, as in the federated experiments: it keeps no statistics of the batches, which
    would differ from client to client. Batch normalisation brings buffers that must be aggregated like parameters, and
    in training mode under ``vmap`` those buffers must be stacked and passed together with the parameters.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; three of the four stages halve it.
        norm: ``group`` or ``batch``.
        groups: groups of channels in group normalisation (two, as Reddi et al., 2021); a divisor of 64.

    Raises:
        ConfigError: for samples that are no images, or an unknown normalisation.

    Example:
        >>> sum(p.numel() for p in resnet18(classes=10, inputs=(3, 32, 32)).parameters())
        11173962
    """
    colours, _, _ = image("resnet18", classes, inputs)
    make = _normalisation(norm, groups)
    body = nn.Sequential(nn.Conv2d(colours, 64, 3, 1, 1, bias=False), make(64), nn.ReLU())
    before = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        body.extend([Block(before, after, stride, make), Block(after, after, 1, make)])
        before = after
    body.append(GlobalMean())
    return Classifier(body, before, classes)
