"""Small convolutional networks."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError
from fedloom.models.classifier import Classifier, image, models, whole_number
from fedloom.models.layers import GlobalMean, activation_layer, classifier, normalisation

_PADDING = {"same": (2, 4), "valid": (0, 16)}  # zeros on every side of a 5x5 convolution, and the smallest image


def _two_convolutions(
    name: str,
    classes: int,
    inputs: tuple[int, ...],
    channels: tuple[int, int],
    dense: tuple[int, ...],
    padding: str,
) -> Classifier:
    one_of(f"model {name!r} has no padding", padding, _PADDING)
    zeros, least = _PADDING[padding]
    colours, *sides = image(name, classes, inputs, least, f" with {padding!r} padding")
    first, second = channels
    body = nn.Sequential(
        nn.Conv2d(colours, first, 5, padding=zeros),  # [B, first, H, W]
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=zeros),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),  # [B, second * height * width]
    )
    for _ in range(2):
        sides = [(side + 2 * zeros - 4) // 2 for side in sides]
    widths = [second * sides[0] * sides[1], *dense]
    for before, after in pairwise(widths):
        body.extend([nn.Linear(before, after), nn.ReLU()])
    return Classifier(body, widths[-1], classes)


@models.register
def two_cnn(*, classes: int, inputs: tuple[int, ...], padding: str = "same") -> Classifier:
    """The CNN of McMahan et al. (2017): 5x5 convolutions of 32 and 64 channels, 512 dense units.

    With ``same`` padding it has the 1,663,370 parameters on MNIST that the paper states.

    Example:
        >>> sum(p.numel() for p in two_cnn(classes=10, inputs=(1, 28, 28)).parameters())
        1663370
    """
    return _two_convolutions("two_cnn", classes, inputs, (32, 64), (512,), padding)


@models.register
def feddyn_cnn(*, classes: int, inputs: tuple[int, ...], padding: str = "valid") -> Classifier:
    """The CNN of FedDyn: 5x5 convolutions of 64 and 64 channels, 384 and 192 dense units (Acar et al., 2021).

    The paper leaves the padding open; ``valid`` is usual for this network and gives 1600 inputs to the dense layers and
    797,962 parameters on CIFAR-10. The width 394 printed in the thesis is a misprint of 384.

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
    """The CNN of FedSSA: 5x5 convolutions of 6 and 16 channels, 120 and 84 dense units (as in Li et al., 2021).

    Args:
        channels: channels of the two convolutions.

    Raises:
        ConfigError: unless there are two numbers of channels, or if samples are not images of sufficient size.

    Example:
        >>> sum(p.numel() for p in fedssa_cnn(classes=10, inputs=(3, 32, 32)).parameters())
        62006
    """
    if len(channels) != 2:
        raise ConfigError(f"model 'fedssa_cnn' needs two numbers of 'channels', not {tuple(channels)}.")
    first, second = (whole_number("fedssa_cnn", "channels", c) for c in channels)
    return _two_convolutions("fedssa_cnn", classes, inputs, (first, second), (120, 84), padding)


@models.register
def leaf_cnn(
    *, classes: int, inputs: tuple[int, ...], width: int = 32, groups: tuple[int, ...] = (32, 16, 8, 4)
) -> Classifier:
    """LEAF's CNN for CelebA: four 3x3 convolutions of 32 channels with group normalisation (Caldas et al.; Hahn, 2024).

    Each convolution is followed by group normalisation, a 2x2 maximum pool and ReLU; the feature maps, averaged to 5 by
    5, go to the head. The binary task has two logits here and one in the paper.

    Args:
        inputs: (channels, height, width) of one image, 16 by 16 or larger.
        width: channels of every convolution.
        groups: groups of channels after each convolution, divisors of ``width``.

    Example:
        >>> sum(p.numel() for p in leaf_cnn(classes=2, inputs=(3, 84, 84)).parameters())
        30370
    """
    before, *_ = image("leaf_cnn", classes, inputs, 2 ** len(groups))
    body = nn.Sequential()
    for count in groups:
        norm = normalisation("leaf_cnn", "group", count, (whole_number("leaf_cnn", "width", width),))
        body.extend([nn.Conv2d(before, width, 3, 1, 1, bias=False), norm(width), nn.MaxPool2d(2), nn.ReLU()])
        before = width
    body.extend([nn.AdaptiveAvgPool2d(5), nn.Flatten()])
    return Classifier(body, 25 * width, classes)


@models.register
def vgg9(
    *, classes: int, inputs: tuple[int, ...], channels: tuple[int, ...] = (16, 32, 64, 128, 256, 512), dense: int = 256
) -> Classifier:
    """VGG9 for FEMNIST: six 3x3 convolutions with four maximum pools, one dense layer (after Simonyan et al., 2015).

    Hahn (2024) does not give the widths; ours are 16, 32, 64-128 and 256-512, with a pool after each group.

    Args:
        inputs: (channels, height, width) of one image, 16 by 16 or larger.
        channels: channels of the six convolutions.
        dense: units of the layer before the head.

    Raises:
        ConfigError: unless there are six numbers of channels, or if samples are not images of sufficient size.

    Example:
        >>> sum(p.numel() for p in vgg9(classes=62, inputs=(1, 28, 28)).parameters())
        1719742
    """
    before, height, width = image("vgg9", classes, inputs, 16)
    if len(channels) != 6:
        raise ConfigError(f"model 'vgg9' needs six numbers of 'channels', not {tuple(channels)}.")
    body = nn.Sequential()
    for number, after in enumerate(channels):
        body.extend([nn.Conv2d(before, whole_number("vgg9", "channels", after), 3, 1, 1), nn.ReLU()])
        if number in (0, 1, 3, 5):
            body.append(nn.MaxPool2d(2))
        before = after
    left = before * (height // 16) * (width // 16)
    body.extend([nn.Flatten(), nn.Linear(left, whole_number("vgg9", "dense", dense)), nn.ReLU()])
    return Classifier(body, dense, classes)


@models.register
def energy_cnn(
    *,
    classes: int,
    inputs: tuple[int, ...],
    channels: tuple[int, ...] | None = None,
    groups: int = 2,
    activation: str = "swish",
    spectral: bool = True,
) -> Classifier:
    """A small network whose logits are energies, E(x, y) = -f(x)[y]: smooth in x, with a bounded last layer.

    Samplers that descend ∇_x E need a gradient that is smooth in x, hence swish instead of ReLU and strided
    convolutions instead of maximum pools, and energies that cannot grow through the head alone, hence its spectral
    normalisation (Hahn, 2024, IV.4.1). A 3x3 convolution is followed by 4x4 convolutions of stride 2, which cover
    every pixel equally often and so leave no checkerboard in ∇_x E, and a global mean. The thesis uses ``resnet10``
    with ``activation=swish spectral=true``, 5 million parameters.

    Args:
        inputs: (channels, height, width) of one image; every convolution but the first halves it.
        channels: channels of the convolutions; by default the image is halved until its shorter side has one or two
            pixels, so that an energy depends on the whole image, and channels double up to 64.

    Raises:
        ConfigError: without channels, or if samples are not images.

    Example:
        >>> [sum(p.numel() for p in energy_cnn(classes=10, inputs=(1, n, n)).parameters()) for n in (8, 28)]
        [41978, 109634]
    """
    before, *sides = image("energy_cnn", classes, inputs)
    if channels is None:
        halvings = max((min(sides) - 1).bit_length() - 1, 0)
        channels = tuple(min(max(64 >> halvings, 8) << k, 64) for k in range(halvings + 1))
    widths = [whole_number("energy_cnn", "channels", c) for c in channels]
    if not widths:
        raise ConfigError("model 'energy_cnn' needs at least one number of 'channels'.")
    image("energy_cnn", classes, inputs, 2 ** (len(widths) - 1))
    norm, act = normalisation("energy_cnn", "group", groups, widths), activation_layer("energy_cnn", activation)
    body = nn.Sequential()
    for number, after in enumerate(widths):
        kernel, stride = (4, 2) if number else (3, 1)
        body.extend([nn.Conv2d(before, after, kernel, stride, 1, bias=False), norm(after), act()])
        before = after
    body.append(GlobalMean())
    return classifier(body, before, classes, spectral)
