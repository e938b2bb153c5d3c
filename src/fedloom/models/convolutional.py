"""Small convolutional networks: convolutions with maximum pools, then dense layers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.models.checks import image, positive
from fedloom.models.classifier import Classifier, models
from fedloom.models.norm import normalisation

_MARGIN = {"same": 2, "valid": 0}  # zeros on every side of the input of a 5x5 convolution


def _pooled(size: int, margin: int) -> int:
    """Height or width left by a 5x5 convolution and a 2x2 pool."""
    return (size + 2 * margin - 4) // 2


def _two_convolutions(
    name: str,
    classes: int,
    inputs: tuple[int, ...],
    channels: tuple[int, int],
    dense: tuple[int, ...],
    padding: str,
) -> Classifier:
    colours, *sides = image(name, classes, inputs)
    if padding not in _MARGIN:
        raise ConfigError(f"model {name!r} has no padding {padding!r}; {nearest(padding, _MARGIN)}")
    margin = _MARGIN[padding]
    left = [_pooled(_pooled(side, margin), margin) for side in sides]
    if min(left) < 1:
        least = 4 if margin else 16
        raise ConfigError(
            f"model {name!r} with {padding!r} padding needs images of at least {least} by {least}, "
            f"but a sample has shape {tuple(inputs)}."
        )
    first, second = channels
    body = nn.Sequential(
        nn.Conv2d(colours, first, 5, padding=margin),  # [B, first, H, W]
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=margin),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),  # [B, second * left[0] * left[1]]
    )
    widths = [second * left[0] * left[1], *dense]
    for before, after in pairwise(widths):
        body.extend([nn.Linear(before, after), nn.ReLU()])
    return Classifier(body, widths[-1], classes)


@models.register
def two_cnn(*, classes: int, inputs: tuple[int, ...], padding: str = "same") -> Classifier:
    """TwoCNN: 5x5 convolutions of 32 and 64 channels, 512 dense units (McMahan et al., 2017).

    With zero padding it has the 1,663,370 parameters on MNIST that the paper states.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        padding: ``same`` keeps height and width in a convolution, ``valid`` shrinks both by four.

    Raises:
        ConfigError: for samples that are no images or too small (4 by 4 with ``same``, 16 by 16 with ``valid``).

    Example:
        >>> sum(p.numel() for p in two_cnn(classes=10, inputs=(1, 28, 28)).parameters())
        1663370
    """
    return _two_convolutions("two_cnn", classes, inputs, (32, 64), (512,), padding)


@models.register
def feddyn_cnn(*, classes: int, inputs: tuple[int, ...], padding: str = "valid") -> Classifier:
    """The FedDyn CNN: 5x5 convolutions of 64 and 64 channels, 384 and 192 dense units (Acar et al., 2021).

    The paper leaves the padding open; ``valid`` (none) is the choice here, as usual for this network from McMahan et
    al. to Acar et al.: 1600 values reach the dense layers on CIFAR-10, and there are 797,962 parameters. The width 394
    that the thesis prints is a misprint of 384.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        padding: ``valid`` shrinks height and width by four in a convolution, ``same`` keeps both.

    Raises:
        ConfigError: for samples that are no images or too small (16 by 16 with ``valid``, 4 by 4 with ``same``).

    Example:
        >>> feddyn_cnn(classes=10, inputs=(1, 8, 8))
        Traceback (most recent call last):
        ...
        fedloom.core.errors.ConfigError: model 'feddyn_cnn' with 'valid' padding needs images of at least 16 by 16, ...
        >>> feddyn_cnn(classes=10, inputs=(1, 8, 8), padding="same").head.in_features
        192
    """
    return _two_convolutions("feddyn_cnn", classes, inputs, (64, 64), (384, 192), padding)


@models.register
def fedssa_cnn(
    *, classes: int, inputs: tuple[int, ...], channels: tuple[int, int] = (6, 16), padding: str = "valid"
) -> Classifier:
    """The FedSSA CNN: 5x5 convolutions of 6 and 16 channels, 120 and 84 dense units (as Li et al., 2021).

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        channels: channels of the two convolutions.
        padding: ``valid`` shrinks height and width by four in a convolution, ``same`` keeps both.

    Raises:
        ConfigError: for samples that are no images or too small (16 by 16 with ``valid``, 4 by 4 with ``same``).

    Example:
        >>> sum(p.numel() for p in fedssa_cnn(classes=10, inputs=(3, 32, 32)).parameters())
        62006
    """
    if len(channels) != 2:
        raise ConfigError(f"model 'fedssa_cnn' needs two numbers of 'channels', not {tuple(channels)}.")
    first, second = (positive("fedssa_cnn", "channels", c) for c in channels)
    return _two_convolutions("fedssa_cnn", classes, inputs, (first, second), (120, 84), padding)


def _large_enough(name: str, sides: list[int], least: int, inputs: tuple[int, ...]) -> None:
    if min(sides) < least:
        raise ConfigError(
            f"model {name!r} needs images of at least {least} by {least}, but a sample has shape {tuple(inputs)}."
        )


@models.register
def leaf_cnn(
    *, classes: int, inputs: tuple[int, ...], width: int = 32, groups: tuple[int, ...] = (32, 16, 8, 4)
) -> Classifier:
    """The LEAF ConvNet for CelebA: four 3x3 convolutions of 32 channels, group normalised (Caldas et al.; Hahn, 2024).

    Each convolution is followed by group normalisation (32, 16, 8 and 4 groups), a 2x2 maximum pool and ReLU; the
    feature maps, averaged to 5 by 5, go to the head.

    Args:
        classes: number of classes; the binary task has two, where the paper takes one logit.
        inputs: (channels, height, width) of one image, 16 by 16 or larger.
        width: channels of every convolution.
        groups: groups of channels after each convolution, divisors of ``width``.

    Raises:
        ConfigError: for samples that are no images or too small, or groups that do not divide.

    Example:
        >>> sum(p.numel() for p in leaf_cnn(classes=2, inputs=(3, 84, 84)).parameters())
        30370
    """
    before, *sides = image("leaf_cnn", classes, inputs)
    _large_enough("leaf_cnn", sides, 2 ** len(groups), inputs)
    body = nn.Sequential()
    for count in groups:
        norm = normalisation("leaf_cnn", "group", count, (positive("leaf_cnn", "width", width),))
        body.extend([nn.Conv2d(before, width, 3, 1, 1, bias=False), norm(width), nn.MaxPool2d(2), nn.ReLU()])
        before = width
    body.extend([nn.AdaptiveAvgPool2d(5), nn.Flatten()])
    return Classifier(body, 25 * width, classes)


@models.register
def vgg9(
    *, classes: int, inputs: tuple[int, ...], channels: tuple[int, ...] = (16, 32, 64, 128, 256, 512), dense: int = 256
) -> Classifier:
    """VGG9 for FEMNIST: six 3x3 convolutions with four maximum pools, one dense layer (after Simonyan et al., 2015).

    Hahn (2024) names the network without its widths; these are 16, 32, 64-128 and 256-512, a pool after each group.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, 16 by 16 or larger.
        channels: channels of the six convolutions.
        dense: units of the layer before the head.

    Raises:
        ConfigError: for samples that are no images or too small, or another number of channels.

    Example:
        >>> sum(p.numel() for p in vgg9(classes=62, inputs=(1, 28, 28)).parameters())
        1719742
    """
    before, *sides = image("vgg9", classes, inputs)
    _large_enough("vgg9", sides, 16, inputs)
    if len(channels) != 6:
        raise ConfigError(f"model 'vgg9' needs six numbers of 'channels', not {tuple(channels)}.")
    body = nn.Sequential()
    for number, after in enumerate(channels):
        body.extend([nn.Conv2d(before, positive("vgg9", "channels", after), 3, 1, 1), nn.ReLU()])
        if number in (0, 1, 3, 5):
            body.append(nn.MaxPool2d(2))
        before = after
    left = before * (sides[0] // 16) * (sides[1] // 16)
    body.extend([nn.Flatten(), nn.Linear(left, positive("vgg9", "dense", dense)), nn.ReLU()])
    return Classifier(body, dense, classes)
