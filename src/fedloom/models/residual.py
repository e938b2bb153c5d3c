"""Residual networks for small images, from 13 thousand to 21 million parameters, with group or batch normalisation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fedloom.models.checks import image
from fedloom.models.classifier import Classifier, models
from fedloom.models.norm import Norm, SpectralLinear, normalisation
from fedloom.models.norm import activation as activated


class Block(nn.Module):
    """A basic residual block: two 3x3 convolutions beside a shortcut."""

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
        """[B, before, H, W] to [B, after, H / stride, W / stride]."""
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + self.shortcut(x))


class GlobalMean(nn.Module):
    """The mean over all positions: [B, C, H, W] or [B, C, T] to [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        """One value a channel."""
        return x.flatten(2).mean(2)


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
        name: of the model, for error messages.
        stem: channels of the first convolution.
        widths: channels of each stage.
        repeats: blocks of each stage.
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size.
        norm: ``group`` or ``batch``.
        groups: groups of channels in group normalisation.
        activation: ``relu``, or ``swish``.
        spectral: whether the head's weight is divided by its largest singular value; see ``SpectralLinear``.

    Example:
        >>> import torch
        >>> tiny = residual("tiny", 4, (4, 8), (1, 2), classes=3, inputs=(1, 6, 6))
        >>> tiny(torch.zeros(2, 1, 6, 6)).shape
        torch.Size([2, 3])
    """
    colours, _, _ = image(name, classes, inputs)
    make = normalisation(name, norm, groups, (stem, *widths))
    act = activated(name, activation)
    body = nn.Sequential(nn.Conv2d(colours, stem, 3, 1, 1, bias=False), make(stem), act())
    before = stem
    for stage, (after, count) in enumerate(zip(widths, repeats, strict=True)):
        for number in range(count):
            body.append(Block(before, after, 2 if stage and not number else 1, make, act))
            before = after
    body.append(GlobalMean())
    network = Classifier(body, before, classes)
    if spectral:
        network.head = SpectralLinear(before, classes)
    return network


_STAGES = {
    "resnet34": ((64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet18": ((64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet10": ((64, 128, 256, 512), (1, 1, 1, 1)),
    "resnet10_l": ((32, 64, 128, 256), (1, 1, 1, 1)),
    "resnet10_m": ((16, 32, 64, 128), (1, 1, 1, 1)),
    "resnet10_s": ((8, 16, 32, 64), (1, 1, 1, 1)),
    "resnet10_xs": ((8, 16, 16, 32), (1, 1, 1, 1)),
    "resnet10_xxs": ((8, 8, 16, 16), (1, 1, 1, 1)),
}
_SUMMARY = "{title}: 3x3 stem, no first pool; {widths} channels, {repeats} basic blocks (He et al., 2016)."
_DOCUMENTATION = """

    Widths and repetitions as in Acar (2023), appendix A.1.5. Group normalisation is the default, as in the federated
    experiments: it keeps no statistics of the batches, which would differ from client to client. Batch normalisation
    brings buffers that are aggregated like parameters. Energy-based training takes ``activation="swish"`` and
    ``spectral=True``, spectral normalisation of the last layer alone (Hahn, 2024, IV.4.1).

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; three of the four stages halve it.
        norm: ``group`` or ``batch``.
        groups: groups of channels in group normalisation (two, as Reddi et al., 2021); a divisor of every width.
        activation: ``relu``, or ``swish`` x·σ(x).
        spectral: divide the head's weight by its largest singular value.

    Raises:
        ConfigError: for samples that are no images, an unknown normalisation or activation, or groups that do not
            divide.
"""


def _member(name: str) -> Callable[..., Classifier]:
    widths, repeats = _STAGES[name]

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
        settings |= {"activation": activation, "spectral": spectral}
        return residual(name, widths[0], widths, repeats, **settings)

    make.__name__ = make.__qualname__ = name
    listed = ("-".join(map(str, numbers)) for numbers in (widths, repeats))
    title = name.replace("resnet", "ResNet-").replace("_", "-")
    make.__doc__ = _SUMMARY.format(title=title, widths=next(listed), repeats=next(listed)) + _DOCUMENTATION
    return models.register(make)


resnet34, resnet18, resnet10, resnet10_l, resnet10_m, resnet10_s, resnet10_xs, resnet10_xxs = map(_member, _STAGES)


@models.register
def resnet8x4(*, classes: int, inputs: tuple[int, ...], norm: str = "group", groups: int = 2) -> Classifier:
    """ResNet-8x4: stem of 32, three stages of 64-128-256 channels with one block each (as in Chen et al., SimKD, 2022).

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; two of the three stages halve it.
        norm: ``group`` or ``batch`` (the paper's).
        groups: groups of channels in group normalisation; a divisor of 32.

    Raises:
        ConfigError: for samples that are no images, or an unknown normalisation.

    Example:
        >>> sum(p.numel() for p in resnet8x4(classes=100, inputs=(3, 32, 32)).parameters())
        1233540
    """
    settings = {"classes": classes, "inputs": inputs, "norm": norm, "groups": groups}
    return residual("resnet8x4", 32, (64, 128, 256), (1, 1, 1), **settings)


@models.register
def resnet32x4(*, classes: int, inputs: tuple[int, ...], norm: str = "group", groups: int = 2) -> Classifier:
    """ResNet-32x4: as ``resnet8x4`` with five blocks a stage (Chen et al., SimKD, 2022).

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, of any size; two of the three stages halve it.
        norm: ``group`` or ``batch`` (the paper's).
        groups: groups of channels in group normalisation; a divisor of 32.

    Raises:
        ConfigError: for samples that are no images, or an unknown normalisation.
    """
    settings = {"classes": classes, "inputs": inputs, "norm": norm, "groups": groups}
    return residual("resnet32x4", 32, (64, 128, 256), (5, 5, 5), **settings)
