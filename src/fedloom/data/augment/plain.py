"""Crop, flip, cutout: what needs no colours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.data.augment.base import Augmentation, Draws, Scale, augmentations, chance, uniform


@augmentations.register
@dataclass(frozen=True)
class Crop(Augmentation):
    """A window of the image's own size out of the image with a black border.

    Args:
        padding: width of the border.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        if self.padding < 1:
            raise ConfigError(f"crop: padding must be at least 1, not {self.padding}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        """The window's corner, int [count, 2]."""
        return {"corner": torch.from_numpy(rng.integers(0, 2 * self.padding + 1, (count, 2)))}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        """See ``Augmentation.apply``."""
        n, channels, height, width = x.shape
        wide = F.pad(x - scale.black, [self.padding] * 4)  # [N, C, H + 2p, W + 2p]
        corner = drawn["corner"]
        down = corner[:, :1] + torch.arange(height, device=x.device)  # [N, H]
        right = corner[:, 1:] + torch.arange(width, device=x.device)  # [N, W]
        tall = wide.gather(2, down[:, None, :, None].expand(n, channels, height, wide.shape[3]))
        return tall.gather(3, right[:, None, None, :].expand(n, channels, height, width)) + scale.black


@augmentations.register
@dataclass(frozen=True)
class Flip(Augmentation):
    """Left and right change places.

    Args:
        p: with which probability.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        chance("flip: p", self.p)

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        """Which images are flipped, bool [count]."""
        return {"flipped": uniform(rng, count) < self.p}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        """See ``Augmentation.apply``."""
        return torch.where(drawn["flipped"][:, None, None, None], x.flip(3), x)


@augmentations.register
@dataclass(frozen=True)
class Cutout(Augmentation):
    """A square of the mean colour over the image, around any of its pixels (DeVries and Taylor, 2017).

    The square is cut off at the border. The mean colour is zero in a normalised image, as in the authors' code; images
    that are not normalised get black.

    Args:
        size: side of the square in pixels.
    """

    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"cutout: size must be at least 1, not {self.size}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        """The pixel in the middle, int [count, 2]."""
        return {"centre": torch.from_numpy(rng.integers(0, shape[-2:], (count, 2)))}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        """See ``Augmentation.apply``."""
        start = drawn["centre"] - self.size // 2

        def inside(axis: int) -> Tensor:
            at = torch.arange(x.shape[2 + axis], device=x.device) - start[:, axis, None]
            return (at >= 0) & (at < self.size)

        return x.masked_fill((inside(0)[:, :, None] & inside(1)[:, None, :])[:, None], 0.0)
