"""Residual networks with pre-activation: PreActResNet, with an early exit if asked for, and wide residual networks."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.checks import image, positive
from fedloom.models.classifier import Classifier, models
from fedloom.models.norm import Norm, normalisation
from fedloom.models.residual import GlobalMean


class PreBlock(nn.Module):
    """A pre-activated block: norm, ReLU, 3x3 convolution, twice, beside a shortcut."""

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
        """[B, before, H, W] to [B, after, H / stride, W / stride]."""
        active = torch.relu(self.norm1(x))
        y = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return y + (x if self.shortcut is None else self.shortcut(active))


class MixedPool(nn.Module):
    """a·max + (1 - a)·mean over height and width, with a learned from 1/2 on (Lee et al., 2016; Kaya et al., 2019).

    >>> MixedPool()(torch.tensor([[[[0.0, 4.0]]]])).item()
    3.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C]."""
        flat = x.flatten(2)
        return self.mix * flat.amax(2) + (1 - self.mix) * flat.mean(2)


class Exit(nn.Module):
    """What ends the network early: mixed pooling and a linear head."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool = MixedPool()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of feature maps [B, width, H, W]."""
        return self.head(self.pool(x))


EXIT = ("body.near.", "exit.")
"""How the names of the parameters begin that form the nested sub-network M."""


def in_exit(name: str) -> bool:
    """Whether the parameter of this name belongs to the nested sub-network M, which the early exit ends.

    >>> [in_exit(n) for n in ("body.near.0.weight", "body.far.0.conv1.weight", "exit.pool.mix", "head.bias")]
    [True, False, True, False]
    """
    return name.startswith(EXIT)


class EarlyExit(Classifier):
    """A network with a second, earlier end: logits after its first stages and after all of them.

    The parameters whose names begin with ``body.near.`` or ``exit.`` form the nested sub-network M, the rest are
    ``body.far.`` and ``head.``; a ``Shallow`` network has just the parameters of M, under the same names. ``forward``
    leaves the exit unused, so that a plain objective has no gradient for it: train with both ends.

    Args:
        near: the first stages, [B, ...] to [B, shallow, H, W].
        far: what follows, up to features [B, width].
        shallow: channels where the exit branches off.
        width: features before the head.
        classes: number of classes.
    """

    def __init__(self, near: nn.Module, far: nn.Module, shallow: int, width: int, classes: int) -> None:
        super().__init__(nn.Sequential(OrderedDict(near=near, far=far)), width, classes)
        self.exit = Exit(shallow, classes)

    def exit_features(self, x: Tensor) -> Tensor:
        """The exit's features [B, shallow]."""
        return self.exit.pool(self.body.get_submodule("near")(x))

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at the exit and at the end, each [B, classes], with one pass through the stages they share."""
        near = self.body.get_submodule("near")(x)
        return self.exit(near), self.head(self.body.get_submodule("far")(near))


class Shallow(nn.Module):
    """The nested sub-network M by itself: the parameters of an ``EarlyExit`` up to its exit, under the same names."""

    def __init__(self, near: nn.Module, shallow: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(OrderedDict(near=near))
        self.exit = Exit(shallow, classes)

    @property
    def head(self) -> nn.Linear:
        """The exit's linear layer."""
        return self.exit.head

    def features(self, x: Tensor) -> Tensor:
        """Features [B, shallow] of samples [B, ...]."""
        return self.exit.pool(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of samples [B, ...]."""
        return self.exit.head(self.features(x))


def _stages(
    body: nn.Sequential, before: int, widths: tuple[int, ...], repeats: tuple[int, ...], first: int, norm: Norm
) -> nn.Sequential:
    """Append stages of pre-activated blocks; the first block of the first one has stride ``first``, of others 2."""
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
    """PreActResNet-18 for small images (He et al., 2016b): 11.1 million parameters; with an early exit if asked for.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; three of the four stages halve it.
        exit: add an exit after two stages (mixed pooling and a linear layer); see ``EarlyExit`` for how it is trained.
        norm: ``group`` or ``batch``.
        groups: groups of channels in group normalisation; a divisor of 64.

    Raises:
        ConfigError: for samples that are no images, or an unknown normalisation.

    Example:
        >>> net = preact_resnet18(classes=10, inputs=(3, 32, 32), exit=True)
        >>> sum(p.numel() for n, p in net.named_parameters() if in_exit(n))
        676171
    """
    return _preact("preact_resnet18", (2, 2, 2, 2), classes, inputs, exit, norm, groups)


@models.register
def preact_resnet34(
    *, classes: int, inputs: tuple[int, ...], exit: bool = False, norm: str = "group", groups: int = 2
) -> Classifier:
    """PreActResNet-34 for small images (He et al., 2016b): 21 million parameters; with an early exit if asked for.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; three of the four stages halve it.
        exit: add an exit after two stages, as in ``preact_resnet18``.
        norm: ``group`` or ``batch``.
        groups: groups of channels in group normalisation; a divisor of 64.

    Raises:
        ConfigError: for samples that are no images, or an unknown normalisation.
    """
    return _preact("preact_resnet34", (3, 4, 6, 3), classes, inputs, exit, norm, groups)


@models.register
def preact_exit18(*, classes: int, inputs: tuple[int, ...], norm: str = "group", groups: int = 2) -> Shallow:
    """The first two stages of PreActResNet-18, mixed pooling and a linear head: 0.7 million parameters (Acar, 2023).

    It is the sub-network M of ``preact_resnet18`` with ``exit``, under the same names.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; one of the two stages halves it.
        norm: ``group`` or ``batch``.
        groups: groups of channels in group normalisation; a divisor of 64.

    Raises:
        ConfigError: for samples that are no images, or an unknown normalisation.

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

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; two of the three stages halve it.
        depth: 6n + 4 with n blocks a stage: 10, 16, 22, 28, 34, 40, ...
        width: factor on the channels.
        norm: ``group`` or ``batch`` (the paper's).
        groups: groups of channels in group normalisation; a divisor of 16.

    Raises:
        ConfigError: for samples that are no images, an unknown normalisation, or an impossible depth.

    Example:
        >>> sum(p.numel() for p in wide_resnet(classes=100, inputs=(3, 32, 32), depth=16, width=2).parameters())
        703284
    """
    colours, _, _ = image("wide_resnet", classes, inputs)
    blocks, rest = divmod(positive("wide_resnet", "depth", depth) - 4, 6)
    if blocks < 1 or rest:
        raise ConfigError(f"model 'wide_resnet' needs a depth of 6n + 4 (10, 16, 22, 28, 34, 40, ...), not {depth}.")
    widths = tuple(channels * positive("wide_resnet", "width", width) for channels in (16, 32, 64))
    make = normalisation("wide_resnet", norm, groups, (16, *widths))
    body = _stages(nn.Sequential(nn.Conv2d(colours, 16, 3, 1, 1, bias=False)), 16, widths, (blocks,) * 3, 1, make)
    body.extend([make(widths[-1]), nn.ReLU(), GlobalMean()])
    return Classifier(body, widths[-1], classes)
