"""A small convolutional network with an early exit, for federations of devices that are not alike."""

from __future__ import annotations

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.models.checks import image, positive
from fedloom.models.classifier import models
from fedloom.models.preactivated import EarlyExit
from fedloom.models.residual import GlobalMean


@models.register
def exit_cnn(
    *, classes: int, inputs: tuple[int, ...], channels: tuple[int, ...] = (16, 32, 64, 64), near: int = 2
) -> EarlyExit:
    """3x3 convolutions with 2x2 maximum pools, and an early exit after the first few of them.

    Every convolution is followed by ReLU and, but for the last one, by a pool; a global mean precedes the head. The
    exit is mixed pooling and a linear layer; see ``EarlyExit`` for how it is trained.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, 8 by 8 or larger with four convolutions.
        channels: channels of the convolutions.
        near: how many of them lie before the exit.

    Raises:
        ConfigError: for samples that are no images or too small, or an exit that is not in between.

    Example:
        >>> net = exit_cnn(classes=10, inputs=(1, 8, 8))
        >>> count = lambda part: sum(p.numel() for p in part.parameters())
        >>> count(net), count(net.body.near) + count(net.exit)
        (61205, 5131)
    """
    before, *sides = image("exit_cnn", classes, inputs)
    if not 0 < positive("exit_cnn", "near", near) < len(channels):
        raise ConfigError(
            f"model 'exit_cnn' needs an exit between its {len(channels)} convolutions, not after {near} of them."
        )
    least = 2 ** (len(channels) - 1)
    if min(sides) < least:
        raise ConfigError(
            f"model 'exit_cnn' needs images of at least {least} by {least}, but a sample has shape {tuple(inputs)}."
        )
    layers = []
    for number, after in enumerate(channels, start=1):
        stage = [nn.Conv2d(before, positive("exit_cnn", "channels", after), 3, padding=1), nn.ReLU()]
        layers.append(nn.Sequential(*stage, *([nn.MaxPool2d(2)] if number < len(channels) else [GlobalMean()])))
        before = after
    first, rest = nn.Sequential(*layers[:near]), nn.Sequential(*layers[near:])
    return EarlyExit(first, rest, channels[near - 1], channels[-1], classes)
