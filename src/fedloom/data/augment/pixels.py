"""Image operations on batches [N, C, H, W] with one strength per image: colours as defined by Pillow, and warps.

Colour operations work on pixels in [0, 1]. Pillow works on 8 bits: posterise and equalise round to 8 bits as well, the
other operations do not, so that results differ from Pillow's by rounding.
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
    """Interpolate from ``other`` (factor 0) to ``x`` (1) or extrapolate beyond it; clipped to [0, 1]."""
    return (other + per_image(factor, x) * (x - other)).clamp(0, 1)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Black at factor 0, unchanged at 1, brighter above."""
    return blend(torch.zeros_like(x), x, factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """The mean grey at factor 0, unchanged at 1, more contrast above."""
    return blend(grey(x).mean((1, 2, 3), keepdim=True), x, factor)


def colour(x: Tensor, factor: Tensor) -> Tensor:
    """Grey at factor 0, unchanged at 1, more saturated above."""
    return x if x.shape[1] == 1 else blend(grey(x), x, factor)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Smoothed at factor 0, unchanged at 1, sharper above; border pixels stay."""
    kernel = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=x.dtype, device=x.device) / 13
    smooth = x.clone()
    if min(x.shape[2:]) > 2:
        inner = F.conv2d(x.flatten(0, 1)[:, None], kernel[None, None])
        smooth[:, :, 1:-1, 1:-1] = inner.unflatten(0, x.shape[:2])[:, :, 0]
    return blend(smooth, x, factor)


def invert(x: Tensor, _: Tensor) -> Tensor:
    """Invert all pixels; the strength is ignored."""
    return 1 - x


def solarise(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert pixels of at least ``threshold``, 0 to 255."""
    return torch.where(x * 255 >= per_image(threshold, x), 1 - x, x)


def posterise(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the leading ``bits`` of 8 bits per pixel."""
    step = 2 ** (8 - per_image(bits, x))
    return torch.floor((x * 255).round() / step) * step / 255


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (x - low) / torch.where(span > 0, span, 1.0), x)


def equalise(x: Tensor, _: Tensor) -> Tensor:
    """Equalise the histogram of each channel."""
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
    """Shift hues by the fraction ``turn`` of the colour circle."""
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
    """Gaussian blur with a kernel of odd ``size`` and reflection at the border; ``sigma`` [N] in pixels."""
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


def warp(x: Tensor, matrix: Tensor, fill: Tensor | float = 0.0, mode: str = "nearest") -> Tensor:
    """Affine warp: the output pixel at column u and row v is sampled at ``matrix`` (u, v, 1); pixel centres are at .5.

    Args:
        x: images [N, C, H, W].
        matrix: one affine map per image, [N, 2, 3].
        fill: colour outside the image, [C, 1, 1].
        mode: nearest or bilinear.
    """
    height, width = x.shape[2:]
    v, u = torch.meshgrid(
        torch.arange(height, dtype=x.dtype, device=x.device) + 0.5,
        torch.arange(width, dtype=x.dtype, device=x.device) + 0.5,
        indexing="ij",
    )
    m = matrix.to(x.dtype)[:, :, :, None, None]  # elementwise products: each image's bits are independent of the batch
    there = (m[:, :, 0] * u + m[:, :, 1] * v + m[:, :, 2]).movedim(1, -1)  # [N, H, W, 2]
    size = torch.tensor([width, height], dtype=x.dtype, device=x.device)
    return F.grid_sample(x - fill, there * 2 / size - 1, mode=mode, align_corners=False) + fill


def around_centre(linear: Tensor, height: int, width: int) -> Tensor:
    """Affine maps [N, 2, 3] that apply ``linear`` [N, 2, 2] around the centre of the image."""
    centre = torch.tensor([width / 2, height / 2], dtype=linear.dtype, device=linear.device)
    return torch.cat([linear, (centre - linear @ centre)[:, :, None]], dim=2)


def rotation(degrees: Tensor) -> Tensor:
    """Counter-clockwise rotations, [N, 2, 2]."""
    angle = torch.deg2rad(degrees)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
