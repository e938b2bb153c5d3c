"""Residual networks with pre-activation: PreActResNet, optionally with an early exit, and wide residual networks."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.classifier import Classifier, image, models, whole_number
from fedloom.models.early_exit import EarlyExit, Shallow
from fedloom.models.layers import GlobalMean, Norm, normalisation


class PreBlock(nn.Module):
    """Pre-activated block: norm, ReLU, 3x3 convolution, twice; [B, before, H, W] to [B, after, H/stride, W/stride]."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm2 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = None
        if stride != 1 or before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm1(x))
        y = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return y + (x if self.shortcut is None else self.shortcut(active))


def _stages(
    body: nn.Sequential, before: int, widths: tuple[int, ...], repeats: tuple[int, ...], first: int, norm: Norm
) -> nn.Sequential:
    """Append stages of pre-activated blocks; the first stage begins with stride ``first``, the others with 2."""
    for stage, (after, count) in enumerate(zip(widths, repeats, strict=True)):
        for number in range(count):
            stride = 1 if number else (2 if stage else first)
            body.append(PreBlock(before, after, stride, norm))
            before = after
    return body


_WIDTHS = (64, 128, 256, 512)


def _near(
    name: str, repeats: tuple[int, ...], classes: int, inputs: tuple[int, ...], norm: str, groups: int
) -> tuple[nn.Sequential, Norm]:
    colours, _, _ = image(name, classes, inputs)
    make = normalisation(name, norm, groups, _WIDTHS)
    stem = nn.Sequential(nn.Conv2d(colours, 64, 3, 1, 1, bias=False))
    return _stages(stem, 64, _WIDTHS[:2], repeats[:2], 1, make), make


def _preact(
    name: str, repeats: tuple[int, ...], classes: int, inputs: tuple[int, ...], exit: bool, norm: str, groups: int
) -> Classifier:
    near, make = _near(name, repeats, classes, inputs, norm, groups)
    far = _stages(nn.Sequential(), 128, _WIDTHS[2:], repeats[2:], 2, make)
    far.extend([make(512), nn.ReLU(), GlobalMean()])
    if exit:
        return EarlyExit(near, far, 128, 512, classes)
    return Classifier(nn.Sequential(OrderedDict(near=near, far=far)), 512, classes)


@models.register
def preact_resnet18(
    *, classes: int, inputs: tuple[int, ...], exit: bool = False, norm: str = "group", groups: int = 2
) -> Classifier:
    """PreActResNet-18 for small images, 11.1 million parameters (He et al., 2016b), optionally with an early exit.

    Args:
        inputs: (channels, height, width) of one image, of any size; three of the four stages halve it.
        exit: whether to add an exit after two stages: mixed pooling and a linear layer (``EarlyExit``).

    Example:
        >>> from fedloom.models.early_exit import in_exit
        >>> net = preact_resnet18(classes=10, inputs=(3, 32, 32), exit=True)
        >>> sum(p.numel() for n, p in net.named_parameters() if in_exit(n))
        676171
    """
    return _preact("preact_resnet18", (2, 2, 2, 2), classes, inputs, exit, norm, groups)


@models.register
def preact_resnet34(
    *, classes: int, inputs: tuple[int, ...], exit: bool = False, norm: str = "group", groups: int = 2
) -> Classifier:
    """PreActResNet-34 for small images, 21 million parameters (He et al., 2016b), optionally with an early exit.

    Args:
        inputs: (channels, height, width) of one image, of any size; three of the four stages halve it.
        exit: whether to add an exit after two stages, as in ``preact_resnet18``.
    """
    return _preact("preact_resnet34", (3, 4, 6, 3), classes, inputs, exit, norm, groups)


@models.register
def preact_exit18(*, classes: int, inputs: tuple[int, ...], norm: str = "group", groups: int = 2) -> Shallow:
    """The first two stages of PreActResNet-18, mixed pooling and a linear head: 0.7 million parameters (Acar, 2023).

    It is the sub-network M of ``preact_resnet18`` with ``exit``, under the same parameter names.

    Args:
        inputs: (channels, height, width) of one image, of any size; one of the two stages halves it.

    Example:
        >>> sum(p.numel() for p in preact_exit18(classes=10, inputs=(3, 32, 32)).parameters())
        676171
    """
    near, _ = _near("preact_exit18", (2, 2), classes, inputs, norm, groups)
    return Shallow(near, 128, classes)


@models.register
def wide_resnet(
    *, classes: int, inputs: tuple[int, ...], depth: int = 16, width: int = 2, norm: str = "group", groups: int = 2
) -> Classifier:
    """WRN-depth-width: stem of 16, three stages of 16, 32, 64 times ``width`` channels (Zagoruyko, Komodakis, 2016).

    The paper uses batch normalisation.

    Args:
        inputs: (channels, height, width) of one image, of any size; two of the three stages halve it.
        depth: 6n + 4 with n blocks per stage: 10, 16, 22, 28, 34, 40, ...
        width: factor on the channels.

    Raises:
        ConfigError: for another depth, groups that do not divide the channels, or samples that are not images.

    Example:
        >>> sum(p.numel() for p in wide_resnet(classes=100, inputs=(3, 32, 32), depth=16, width=2).parameters())
        703284
    """
    colours, _, _ = image("wide_resnet", classes, inputs)
    blocks, rest = divmod(whole_number("wide_resnet", "depth", depth) - 4, 6)
    if blocks < 1 or rest:
        raise ConfigError(f"model 'wide_resnet' needs a depth of 6n + 4 (10, 16, 22, 28, 34, 40, ...), not {depth}.")
    widths = tuple(channels * whole_number("wide_resnet", "width", width) for channels in (16, 32, 64))
    make = normalisation("wide_resnet", norm, groups, (16, *widths))
    body = _stages(nn.Sequential(nn.Conv2d(colours, 16, 3, 1, 1, bias=False)), 16, widths, (blocks,) * 3, 1, make)
    body.extend([make(widths[-1]), nn.ReLU(), GlobalMean()])
    return Classifier(body, widths[-1], classes)
