"""Small networks whose logits are energies, E(x, y) = -f(x)[y]: smooth activations and a bounded last layer.

Whoever descends ∇_x E to make samples needs a gradient that is smooth in x, hence swish instead of ReLU and strided
convolutions instead of maximum pools, and energies that cannot grow by the head alone, hence its spectral normalisation
(Hahn, 2024, IV.4.1). The thesis takes ``resnet10`` with ``activation="swish"`` and ``spectral=True``, of 5 million
parameters; these two are of the same kind and run on a laptop.
"""

from __future__ import annotations

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.models.checks import image, positive
from fedloom.models.classifier import Classifier, models
from fedloom.models.norm import SpectralLinear, normalisation
from fedloom.models.norm import activation as activated
from fedloom.models.residual import GlobalMean, residual


@models.register
def energy_resnet(
    *,
    classes: int,
    inputs: tuple[int, ...],
    width: int = 16,
    groups: int = 2,
    activation: str = "swish",
    spectral: bool = True,
) -> Classifier:
    """A residual energy network: stem of 16, three stages of 16-32-64 channels with one block each, swish.

    It is ``resnet10`` without its last stage and at a quarter of the width: 78 thousand parameters.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; two of the three stages halve it.
        width: channels of the stem and the first stage; each further stage doubles them.
        groups: groups of channels in group normalisation; a divisor of ``width``.
        activation: ``swish`` x·σ(x), or ``relu``.
        spectral: divide the head's weight by its largest singular value.

    Raises:
        ConfigError: for samples that are no images, an unknown activation, or groups that do not divide.

    Example:
        >>> net = energy_resnet(classes=10, inputs=(3, 32, 32))
        >>> sum(p.numel() for p in net.parameters()), sum(b.numel() for b in net.buffers())
        (78042, 0)
    """
    first = positive("energy_resnet", "width", width)
    settings = {"classes": classes, "inputs": inputs, "groups": groups, "activation": activation, "spectral": spectral}
    return residual("energy_resnet", first, (first, 2 * first, 4 * first), (1, 1, 1), **settings)


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
    """A plain energy network: a 3x3 convolution, then 4x4 ones of stride 2, each group normalised, swish; global mean.

    Kernels of even size at stride 2 meet every pixel equally often, so that ∇_x E has no pattern of its own.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image; every convolution but the first halves it.
        channels: channels of the convolutions; None halves the image until its shorter side has one or two pixels, so
            that an energy is that of the whole image, with twice the channels each time, up to 64.
        groups: groups of channels in group normalisation; a divisor of all of ``channels``.
        activation: ``swish`` x·σ(x), or ``relu``.
        spectral: divide the head's weight by its largest singular value.

    Raises:
        ConfigError: for samples that are no images or too small, an unknown activation, or groups that do not divide.

    Example:
        >>> [sum(p.numel() for p in energy_cnn(classes=10, inputs=(1, n, n)).parameters()) for n in (8, 28)]
        [41978, 109634]
    """
    before, *sides = image("energy_cnn", classes, inputs)
    if channels is None:
        channels = fitting(min(sides))
    widths = [positive("energy_cnn", "channels", c) for c in channels]
    if not widths:
        raise ConfigError("model 'energy_cnn' needs at least one number of 'channels'.")
    least = 2 ** (len(widths) - 1)
    if min(sides) < least:
        raise ConfigError(
            f"model 'energy_cnn' needs images of at least {least} by {least}, but a sample has shape {tuple(inputs)}."
        )
    norm, act = normalisation("energy_cnn", "group", groups, widths), activated("energy_cnn", activation)
    body = nn.Sequential()
    for number, after in enumerate(widths):
        kernel, stride = (4, 2) if number else (3, 1)
        body.extend([nn.Conv2d(before, after, kernel, stride, 1, bias=False), norm(after), act()])
        before = after
    body.append(GlobalMean())
    network = Classifier(body, before, classes)
    if spectral:
        network.head = SpectralLinear(before, classes)
    return network


def fitting(side: int) -> tuple[int, ...]:
    """Channels of convolutions of which all but the first halve an image, until a side has one or two pixels.

    >>> fitting(8), fitting(28)
    ((16, 32, 64), (8, 16, 32, 64, 64))
    """
    halvings = max((side - 1).bit_length() - 1, 0)
    first = max(64 >> halvings, 8)
    return tuple(min(first << k, 64) for k in range(halvings + 1))
