"""Colour jitter and blur, as contrastive and self-supervised methods use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.data.augment import pixels
from fedloom.data.augment.base import Augmentation, Draws, Scale, augmentations, chance, uniform


@augmentations.register
@dataclass(frozen=True)
class Jitter(Augmentation):
    """Brightness, contrast, saturation and hue change a little, in this order.

    The first three are multiplied by a number from 1 - s to 1 + s; hues are turned by -s to s of the circle. Images of
    one channel have neither saturation nor hue.

    Args:
        brightness: s of the brightness.
        contrast: s of the contrast.
        saturation: s of the saturation.
        hue: s of the hue, at most .5.
        p: with which probability anything happens to an image.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    p: float = 0.8

    pixels: ClassVar[bool] = True
    colours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation", "p"):
            chance(f"jitter: {name}", getattr(self, name))
        if not 0 <= self.hue <= 0.5:
            raise ConfigError(f"jitter: hue must lie in [0, .5], not {self.hue}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        """The four strengths, where 1, 1, 1 and 0 change nothing, float [count] each."""
        happens = uniform(rng, count) < self.p
        middle = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
        drawn = {k: uniform(rng, count, m - getattr(self, k), m + getattr(self, k)) for k, m in middle.items()}
        return {k: torch.where(happens, v, middle[k]) for k, v in drawn.items()} | {"happens": happens}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        """See ``Augmentation.apply``."""
        new = pixels.brightness(x, drawn["brightness"])
        new = pixels.contrast(new, drawn["contrast"])
        new = pixels.colour(new, drawn["saturation"])
        new = pixels.hue(new, drawn["hue"])
        return torch.where(drawn["happens"][:, None, None, None], new, x)


@augmentations.register
@dataclass(frozen=True)
class Blur(Augmentation):
    """Gaussian blur of a random width.

    Args:
        size: side of the kernel, odd; about a tenth of the image.
        low: least standard deviation in pixels.
        high: greatest standard deviation.
        p: with which probability an image is blurred.
    """

    size: int = 3
    low: float = 0.1
    high: float = 2.0
    p: float = 0.5

    def __post_init__(self) -> None:
        chance("blur: p", self.p)
        if self.size < 3 or self.size % 2 == 0:
            raise ConfigError(f"blur: size must be an odd number from 3 on, not {self.size}.")
        if not 0 < self.low <= self.high < float("inf"):
            raise ConfigError(f"blur: 0 < low ≤ high must hold, not low={self.low}, high={self.high}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        """Widths, and which images are blurred, [count] each."""
        return {"sigma": uniform(rng, count, self.low, self.high), "happens": uniform(rng, count) < self.p}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        """See ``Augmentation.apply``."""
        return torch.where(drawn["happens"][:, None, None, None], pixels.blur(x, drawn["sigma"], self.size), x)
