"""Affine changes of images: where each pixel comes from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def warp(x: Tensor, matrix: Tensor, fill: Tensor | float = 0.0, mode: str = "nearest") -> Tensor:
    """Images whose pixel at (u, v) is taken from ``matrix`` (u, v, 1): columns and rows, pixel centres at .5.

    Args:
        x: images [N, C, H, W].
        matrix: one affine map an image, [N, 2, 3].
        fill: colour of what lies outside, [C, 1, 1].
        mode: nearest or bilinear.
    """
    height, width = x.shape[2:]
    v, u = torch.meshgrid(
        torch.arange(height, dtype=x.dtype, device=x.device) + 0.5,
        torch.arange(width, dtype=x.dtype, device=x.device) + 0.5,
        indexing="ij",
    )
    m = matrix.to(x.dtype)[:, :, :, None, None]  # a product by hand: each image's bits do not depend on the others
    there = (m[:, :, 0] * u + m[:, :, 1] * v + m[:, :, 2]).movedim(1, -1)  # [N, H, W, 2]
    size = torch.tensor([width, height], dtype=x.dtype, device=x.device)
    return F.grid_sample(x - fill, there * 2 / size - 1, mode=mode, align_corners=False) + fill


def around_centre(linear: Tensor, height: int, width: int) -> Tensor:
    """The affine maps [N, 2, 3] that apply ``linear`` [N, 2, 2] around the middle of the image."""
    centre = torch.tensor([width / 2, height / 2], dtype=linear.dtype, device=linear.device)
    return torch.cat([linear, (centre - linear @ centre)[:, :, None]], dim=2)


def rotation(degrees: Tensor) -> Tensor:
    """Linear maps [N, 2, 2] that turn images counter-clockwise."""
    angle = torch.deg2rad(degrees)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
