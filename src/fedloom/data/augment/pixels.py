"""Operations on pixels from 0 to 1, on a whole batch with one strength an image; in the sense of Pillow's.

Pillow works on 8 bits. Where that is what an operation is about (posterise, equalise), pixels are rounded to 8 bits;
elsewhere they stay real numbers, so that results differ from Pillow's by a rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data.augment.base import per_image


def grey(x: Tensor) -> Tensor:
    """Luminance [N, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return (x * torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype, device=x.device)[:, None, None]).sum(1, keepdim=True)


def blend(other: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """``other`` at factor 0, ``x`` at 1, beyond it above 1; clipped."""
    return (other + per_image(factor, x) * (x - other)).clamp(0, 1)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """From black (0) to as it is (1) to brighter."""
    return blend(torch.zeros_like(x), x, factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """From the mean grey (0) to as it is (1) to starker."""
    return blend(grey(x).mean((1, 2, 3), keepdim=True), x, factor)


def colour(x: Tensor, factor: Tensor) -> Tensor:
    """From grey (0) to as it is (1) to more colourful."""
    return x if x.shape[1] == 1 else blend(grey(x), x, factor)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """From smoothed (0) to as it is (1) to sharper; the outermost pixels stay."""
    kernel = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=x.dtype, device=x.device) / 13
    smooth = x.clone()
    if min(x.shape[2:]) > 2:
        inner = F.conv2d(x.flatten(0, 1)[:, None], kernel[None, None])
        smooth[:, :, 1:-1, 1:-1] = inner.unflatten(0, x.shape[:2])[:, :, 0]
    return blend(smooth, x, factor)


def invert(x: Tensor, _: Tensor) -> Tensor:
    """The negative."""
    return 1 - x


def solarise(x: Tensor, threshold: Tensor) -> Tensor:
    """The negative of all pixels from ``threshold`` (0 to 255) on."""
    return torch.where(x * 255 >= per_image(threshold, x), 1 - x, x)


def posterise(x: Tensor, bits: Tensor) -> Tensor:
    """The first so many bits of each pixel."""
    step = 2 ** (8 - per_image(bits, x))
    return torch.floor((x * 255).round() / step) * step / 255


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Each channel stretched to the whole range."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (x - low) / torch.where(span > 0, span, 1.0), x)


def equalise(x: Tensor, _: Tensor) -> Tensor:
    """Each channel with a flat histogram."""
    level = (x * 255).round().long().flatten(2)  # [N, C, HW]
    planes = level.flatten(0, 1)
    counts = torch.zeros(len(planes), 256, dtype=torch.long, device=x.device)
    counts.scatter_add_(1, planes, torch.ones_like(planes))
    last = counts.gather(1, planes.amax(1, keepdim=True))  # pixels of the brightest level
    step = (planes.shape[1] - last) // 255
    table = ((counts.cumsum(1) - counts + step // 2) // step.clamp(min=1)).clamp(max=255)
    new = torch.where(step > 0, table.gather(1, planes), planes)
    return new.to(x.dtype).div(255).view_as(x)


def hue(x: Tensor, turn: Tensor) -> Tensor:
    """Colours turned around the circle of hues by ``turn`` (1: all around)."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    high, low = x.amax(1), x.amin(1)
    span = high - low
    safe = torch.where(span > 0, span, 1.0)
    angle = torch.where(
        high == red,
        (green - blue) / safe,
        torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    angle = (angle / 6 + turn.to(x.dtype)[:, None, None]) % 1 * 6

    def channel(offset: int) -> Tensor:
        k = (offset + angle) % 6
        return high - span * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1)


def blur(x: Tensor, sigma: Tensor, size: int) -> Tensor:
    """Gaussian blur with a kernel of ``size`` (odd); images are mirrored at the border."""
    half = size // 2
    at = torch.arange(-half, half + 1, dtype=x.dtype, device=x.device)
    weight = torch.exp(-0.5 * (at / sigma.to(x.dtype)[:, None]) ** 2)  # [N, size]
    weight = weight / weight.sum(1, keepdim=True)
    for axis in (2, 3):
        wide = F.pad(x, [half, half, 0, 0] if axis == 3 else [0, 0, half, half], mode="reflect")
        x = sum(
            (per_image(weight[:, k], x) * wide.narrow(axis, k, x.shape[axis]) for k in range(size)),
            start=torch.zeros_like(x),
        )
    return x
