"""Deep networks for images: residual ones, those with pre-activation and wide ones, and those for mobile devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, Positive
from fedloom.models.classifier import Classifier, image, models
from fedloom.models.early_exit import EarlyExit, Shallow
from fedloom.models.layers import (
    ActivationName,
    GlobalMean,
    Norm,
    NormName,
    activation_of,
    classifier,
    normalisation,
)


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
    norm: NormName = "group",
    groups: Count = 2,
    activation: ActivationName = "relu",
    spectral: bool = False,
) -> Classifier:
    """A residual network: 3x3 stem, stages of basic blocks, global mean, linear head; all stages but the first halve.

    The other settings are those of all models.
    """
    colours, _, _ = image(name, classes, inputs)
    make = normalisation(name, norm, groups, (stem, *widths))
    act = activation_of(name, activation)
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
        norm: NormName = "group",
        groups: Count = 2,
        activation: ActivationName = "relu",
        spectral: bool = False,
    ) -> Classifier:
        settings = {"norm": norm, "groups": groups, "activation": activation, "spectral": spectral}
        return residual(name, stem, widths, repeats, classes=classes, inputs=inputs, **settings)

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
    width: Count = 16,
    groups: Count = 2,
    activation: ActivationName = "swish",
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
    settings = {"classes": classes, "inputs": inputs, "groups": groups, "activation": activation, "spectral": spectral}
    return residual("energy_resnet", width, (width, 2 * width, 4 * width), (1, 1, 1), **settings)


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
    name: str, repeats: tuple[int, ...], classes: int, inputs: tuple[int, ...], norm: NormName, groups: int
) -> tuple[nn.Sequential, Norm]:
    colours, _, _ = image(name, classes, inputs)
    make = normalisation(name, norm, groups, _WIDTHS)
    stem = nn.Sequential(nn.Conv2d(colours, 64, 3, 1, 1, bias=False))
    return _stages(stem, 64, _WIDTHS[:2], repeats[:2], 1, make), make


def _preact(
    name: str, repeats: tuple[int, ...], classes: int, inputs: tuple[int, ...], exit: bool, norm: NormName, groups: int
) -> Classifier:
    near, make = _near(name, repeats, classes, inputs, norm, groups)
    far = _stages(nn.Sequential(), 128, _WIDTHS[2:], repeats[2:], 2, make)
    far.extend([make(512), nn.ReLU(), GlobalMean()])
    if exit:
        return EarlyExit(near, far, 128, 512, classes)
    return Classifier(nn.Sequential(OrderedDict(near=near, far=far)), 512, classes)


@models.register
def preact_resnet18(
    *, classes: int, inputs: tuple[int, ...], exit: bool = False, norm: NormName = "group", groups: Count = 2
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
    *, classes: int, inputs: tuple[int, ...], exit: bool = False, norm: NormName = "group", groups: Count = 2
) -> Classifier:
    """PreActResNet-34 for small images, 21 million parameters (He et al., 2016b), optionally with an early exit.

    Args:
        inputs: (channels, height, width) of one image, of any size; three of the four stages halve it.
        exit: whether to add an exit after two stages, as in ``preact_resnet18``.
    """
    return _preact("preact_resnet34", (3, 4, 6, 3), classes, inputs, exit, norm, groups)


@models.register
def preact_exit18(*, classes: int, inputs: tuple[int, ...], norm: NormName = "group", groups: Count = 2) -> Shallow:
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
    *,
    classes: int,
    inputs: tuple[int, ...],
    depth: Count = 16,
    width: Count = 2,
    norm: NormName = "group",
    groups: Count = 2,
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
    blocks, rest = divmod(depth - 4, 6)
    if blocks < 1 or rest:
        raise ConfigError(f"model 'wide_resnet' needs a depth of 6n + 4 (10, 16, 22, 28, 34, 40, ...), not {depth}.")
    widths = tuple(channels * width for channels in (16, 32, 64))
    make = normalisation("wide_resnet", norm, groups, (16, *widths))
    body = _stages(nn.Sequential(nn.Conv2d(colours, 16, 3, 1, 1, bias=False)), 16, widths, (blocks,) * 3, 1, make)
    body.extend([make(widths[-1]), nn.ReLU(), GlobalMean()])
    return Classifier(body, widths[-1], classes)


def _conv(
    before: int, after: int, norm: Norm, kernel: int = 1, stride: int = 1, groups: int = 1, relu: bool = True
) -> list[nn.Module]:
    """A convolution that keeps or halves the size, normalisation and, unless ``relu`` is false, ReLU."""
    layers = [nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False), norm(after)]
    return [*layers, nn.ReLU()] if relu else layers


def _scaled(channels: tuple[int, ...], width: float) -> tuple[int, ...]:
    return tuple(max(4, 4 * round(c * width / 4)) for c in channels)


@models.register
def mobilenet(
    *, classes: int, inputs: tuple[int, ...], width: Positive = 1.0, norm: NormName = "group", groups: Count = 2
) -> Classifier:
    """MobileNet: a 3x3 stem of stride 2 and 13 depthwise separable convolutions (Howard et al., 2017).

    With 1000 classes and 224x224 images it has the 4.2 million parameters and 569 million multiply-adds that the paper
    states. The paper uses batch normalisation.

    Args:
        inputs: (channels, height, width) of one image, of any size; five convolutions halve it.
        width: factor on the channels, which are rounded to multiples of four.

    Example:
        >>> sum(p.numel() for p in mobilenet(classes=1000, inputs=(3, 224, 224)).parameters())
        4231976
    """
    colours, _, _ = image("mobilenet", classes, inputs)
    plan = _scaled((32, 64, 128, 128, 256, 256, *(512,) * 6, 1024, 1024), width)
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    make = normalisation("mobilenet", norm, groups, plan)
    body = nn.Sequential(*_conv(colours, plan[0], make, 3, 2))
    for before, after, stride in zip(plan, plan[1:], strides, strict=False):
        body.extend(_conv(before, before, make, 3, stride, groups=before))
        body.extend(_conv(before, after, make))
    body.append(GlobalMean())
    return Classifier(body, plan[-1], classes)


class InvertedBlock(nn.Module):
    """Inverted residual: 1x1 expansion, 3x3 depthwise convolution, 1x1 projection; with a shortcut where sizes allow.

    [B, before, H, W] to [B, after, H / stride, W / stride].
    """

    def __init__(self, before: int, after: int, expansion: int, stride: int, norm: Norm) -> None:
        super().__init__()
        inner = before * expansion
        self.path = nn.Sequential(
            *(_conv(before, inner, norm) if expansion > 1 else ()),
            *_conv(inner, inner, norm, 3, stride, groups=inner),
            *_conv(inner, after, norm, relu=False),
        )
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(x) if self.adds else self.path(x)


@models.register
def mobilenet_v2(
    *, classes: int, inputs: tuple[int, ...], width: Positive = 1.0, norm: NormName = "group", groups: Count = 2
) -> Classifier:
    """MobileNetV2 for small images: four halvings instead of five (Sandler et al., 2018, as in Chen et al., 2022).

    Distillation papers call width 0.5 "MobileNetV2" and width 1 "MobileNetV2x2". They use batch normalisation.

    Args:
        inputs: (channels, height, width) of one image, of any size.
        width: factor on the channels, which are rounded to multiples of four; the last 1280 are never reduced.

    Example:
        >>> round(sum(p.numel() for p in mobilenet_v2(classes=100, inputs=(3, 32, 32)).parameters()) / 1e6, 2)
        2.35
    """
    colours, _, _ = image("mobilenet_v2", classes, inputs)
    stem, *widths = _scaled((32, 16, 24, 32, 64, 96, 160, 320), width)
    last = _scaled((1280,), max(width, 1.0))[0]
    make = normalisation("mobilenet_v2", norm, groups, (stem, *widths, last))
    body = nn.Sequential(*_conv(colours, stem, make, 3, 2))
    before = stem
    plan = zip(widths, (1, 6, 6, 6, 6, 6, 6), (1, 2, 3, 4, 3, 3, 1), (1, 1, 2, 2, 1, 2, 1), strict=True)
    for after, expansion, count, stride in plan:
        for number in range(count):
            body.append(InvertedBlock(before, after, expansion, 1 if number else stride, make))
            before = after
    body.extend([*_conv(before, last, make), GlobalMean()])
    return Classifier(body, last, classes)


class ShuffleBlock(nn.Module):
    """Two branches of half the channels, concatenated and shuffled: [B, before, H, W] to [B, after, ...].

    With stride 1 the left branch is the first half of the input and the right branch convolves the second half; with
    stride 2 both branches convolve the whole input.
    """

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        half = after // 2
        right_inputs = before if stride == 2 else before // 2
        self.split = stride == 1
        self.left = nn.Sequential()
        if stride == 2:
            self.left = nn.Sequential(
                *_conv(before, before, norm, 3, 2, groups=before, relu=False), *_conv(before, half, norm)
            )
        self.right = nn.Sequential(
            *_conv(right_inputs, half, norm),
            *_conv(half, half, norm, 3, stride, groups=half, relu=False),
            *_conv(half, half, norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1) if self.split else (x, x)
        y = torch.stack([self.left(a), self.right(b)], 2)  # [B, after / 2, 2, H, W]: alternating channels
        return y.flatten(1, 2)


_SHUFFLE = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}


@models.register
def shufflenet_v2(
    *, classes: int, inputs: tuple[int, ...], width: float = 1.0, norm: NormName = "group", groups: Count = 2
) -> Classifier:
    """ShuffleNetV2 for small images: 1x1 stem, no first pool (Ma et al., 2018, as in Chen et al., SimKD, 2022).

    Width 1 takes at most two groups. The paper uses batch normalisation.

    Args:
        inputs: (channels, height, width) of one image, of any size; three stages halve it.
        width: 0.5, 1, 1.5 or 2.

    Raises:
        ConfigError: for another width, groups that do not divide the channels, or samples that are not images.

    Example:
        >>> sum(p.numel() for p in shufflenet_v2(classes=100, inputs=(3, 32, 32)).parameters())
        1355528
    """
    colours, _, _ = image("shufflenet_v2", classes, inputs)
    if width not in _SHUFFLE:
        raise ConfigError(f"model 'shufflenet_v2' needs a 'width' of {', '.join(map(str, _SHUFFLE))}, not {width!r}.")
    *widths, last = _SHUFFLE[width]
    make = normalisation("shufflenet_v2", norm, groups, (24, *(w // 2 for w in widths), last))
    body = nn.Sequential(*_conv(colours, 24, make))
    before = 24
    for after, count in zip(widths, (4, 8, 4), strict=True):
        for number in range(count):
            body.append(ShuffleBlock(before, after, 1 if number else 2, make))
            before = after
    body.extend([*_conv(before, last, make), GlobalMean()])
    return Classifier(body, last, classes)
