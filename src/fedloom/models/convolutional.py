"""Small convolutional networks: two 5x5 convolutions, each with a 2x2 maximum pool, then dense layers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.models.checks import image
from fedloom.models.classifier import Classifier, models

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
