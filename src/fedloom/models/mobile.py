"""Networks for mobile devices: MobileNet, MobileNetV2 and ShuffleNetV2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.classifier import Classifier, image, models
from fedloom.models.layers import GlobalMean, Norm, normalisation


def _conv(
    before: int, after: int, norm: Norm, kernel: int = 1, stride: int = 1, groups: int = 1, relu: bool = True
) -> list[nn.Module]:
    """A convolution that keeps or halves the size, normalisation and, unless ``relu`` is false, ReLU."""
    layers = [nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False), norm(after)]
    return [*layers, nn.ReLU()] if relu else layers


def _scaled(model: str, channels: tuple[int, ...], width: float) -> tuple[int, ...]:
    if not width > 0:
        raise ConfigError(f"model {model!r} needs a positive 'width', not {width!r}.")
    return tuple(max(4, 4 * round(c * width / 4)) for c in channels)


@models.register
def mobilenet(
    *, classes: int, inputs: tuple[int, ...], width: float = 1.0, norm: str = "group", groups: int = 2
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
    plan = _scaled("mobilenet", (32, 64, 128, 128, 256, 256, *(512,) * 6, 1024, 1024), width)
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
    *, classes: int, inputs: tuple[int, ...], width: float = 1.0, norm: str = "group", groups: int = 2
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
    stem, *widths = _scaled("mobilenet_v2", (32, 16, 24, 32, 64, 96, 160, 320), width)
    last = _scaled("mobilenet_v2", (1280,), max(width, 1.0))[0]
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
        seen = before if stride == 2 else before // 2
        self.split = stride == 1
        self.left = nn.Sequential()
        if stride == 2:
            self.left = nn.Sequential(
                *_conv(before, before, norm, 3, 2, groups=before, relu=False), *_conv(before, half, norm)
            )
        self.right = nn.Sequential(
            *_conv(seen, half, norm),
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
    *, classes: int, inputs: tuple[int, ...], width: float = 1.0, norm: str = "group", groups: int = 2
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
