"""Residual networks for small images, from 13 thousand to 21 million parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fedloom.models.classifier import Classifier, image, models, whole_number
from fedloom.models.layers import GlobalMean, Norm, activation_layer, classifier, normalisation


class Block(nn.Module):
    """Basic residual block with two 3x3 convolutions: [B, before, H, W] to [B, after, H / stride, W / stride]."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + self.shortcut(x))


def residual(
    name: str,
    stem: int,
    widths: tuple[int, ...],
    repeats: tuple[int, ...],
    *,
    classes: int,
    inputs: tuple[int, ...],
    norm: str = "group",
    groups: int = 2,
    activation: str = "relu",
    spectral: bool = False,
) -> Classifier:
    """A residual network: 3x3 stem, stages of basic blocks, global mean, linear head; all stages but the first halve.

    Args:
        name: the model's name, for error messages.
        stem: channels of the first convolution.
        widths: channels of each stage.
        repeats: blocks of each stage.

    The other settings are those of all models.

    Example:
        >>> import torch
        >>> tiny = residual("tiny", 4, (4, 8), (1, 2), classes=3, inputs=(1, 6, 6))
        >>> tiny(torch.zeros(2, 1, 6, 6)).shape
        torch.Size([2, 3])
    """
    colours, _, _ = image(name, classes, inputs)
    make = normalisation(name, norm, groups, (stem, *widths))
    act = activation_layer(name, activation)
    body = nn.Sequential(nn.Conv2d(colours, stem, 3, 1, 1, bias=False), make(stem), act())
    before = stem
    for stage, (after, count) in enumerate(zip(widths, repeats, strict=True)):
        for number in range(count):
            body.append(Block(before, after, 2 if stage and not number else 1, make, act))
            before = after
    body.append(GlobalMean())
    return classifier(body, before, classes, spectral)


_RESNETS = {  # channels of the stem and of each stage, blocks per stage
    "resnet34": (64, (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet18": (64, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet10": (64, (64, 128, 256, 512), (1, 1, 1, 1)),
    "resnet10_l": (32, (32, 64, 128, 256), (1, 1, 1, 1)),
    "resnet10_m": (16, (16, 32, 64, 128), (1, 1, 1, 1)),
    "resnet10_s": (8, (8, 16, 32, 64), (1, 1, 1, 1)),
    "resnet10_xs": (8, (8, 16, 16, 32), (1, 1, 1, 1)),
    "resnet10_xxs": (8, (8, 8, 16, 16), (1, 1, 1, 1)),
    "resnet8x4": (32, (64, 128, 256), (1, 1, 1)),
    "resnet32x4": (32, (64, 128, 256), (5, 5, 5)),
}
_DOC = """{title}: 3x3 stem of {stem}, stages of {widths} channels with {repeats} basic blocks (He et al., 2016).

Widths and repetitions are those of {source}. Group normalisation is the default, as in
federated experiments: it keeps no batch statistics, which would differ between clients. The buffers of batch
normalisation are aggregated like parameters. Energy-based training uses ``activation="swish"`` and ``spectral=True``,
spectral normalisation of the last layer alone (Hahn, 2024, IV.4.1).

Args:
    inputs: (channels, height, width) of one image, of any size; every stage but the first halves it.
"""


def _resnet(name: str) -> Callable[..., Classifier]:
    stem, widths, repeats = _RESNETS[name]

    def make(
        *,
        classes: int,
        inputs: tuple[int, ...],
        norm: str = "group",
        groups: int = 2,
        activation: str = "relu",
        spectral: bool = False,
    ) -> Classifier:
        settings = {"classes": classes, "inputs": inputs, "norm": norm, "groups": groups}
        return residual(name, stem, widths, repeats, **settings, activation=activation, spectral=spectral)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = _DOC.format(
        title=name.replace("resnet", "ResNet-").replace("_", "-"),
        stem=stem,
        widths="-".join(map(str, widths)),
        repeats="-".join(map(str, repeats)),
        source="Chen et al. (SimKD, 2022)" if name.endswith("x4") else "Acar (2023), appendix A.1.5",
    )
    return models.register(make)


(
    resnet34, resnet18, resnet10, resnet10_l, resnet10_m, resnet10_s, resnet10_xs, resnet10_xxs, resnet8x4, resnet32x4,
) = map(_resnet, _RESNETS)  # fmt: skip


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
    """A residual network whose logits are energies: stem of 16, stages of 16-32-64 channels with one block each.

    It is ``resnet10`` without its last stage at a quarter of the width, 78 thousand parameters; see ``energy_cnn`` for
    why it has swish and a spectrally normalised head.

    Args:
        inputs: (channels, height, width) of one image, of any size; two of the three stages halve it.
        width: channels of the stem and the first stage; each further stage doubles them.

    Example:
        >>> net = energy_resnet(classes=10, inputs=(3, 32, 32))
        >>> sum(p.numel() for p in net.parameters()), sum(b.numel() for b in net.buffers())
        (78042, 0)
    """
    first = whole_number("energy_resnet", "width", width)
    settings = {"classes": classes, "inputs": inputs, "groups": groups, "activation": activation, "spectral": spectral}
    return residual("energy_resnet", first, (first, 2 * first, 4 * first), (1, 1, 1), **settings)
