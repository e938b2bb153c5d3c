"""Single augmentations: crop, flip, cutout, colour jitter and blur."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

from fedloom.core.checks import at_least, probability
from fedloom.core.errors import ConfigError
from fedloom.data.augment import pixels
from fedloom.data.augment.base import Augmentation, Draws, Scale, augmentations, uniform


@augmentations.register
@dataclass(frozen=True)
class Crop(Augmentation):
    """Random crop to the original size after padding with black.

    Args:
        padding: padding on every side, in pixels.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        at_least(1, "crop: ", padding=self.padding)

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"corner": torch.from_numpy(rng.integers(0, 2 * self.padding + 1, (count, 2)))}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
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
    """Random horizontal flip.

    Args:
        p: probability of a flip.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        probability("flip: ", p=self.p)

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"flipped": uniform(rng, count) < self.p}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        return torch.where(drawn["flipped"][:, None, None, None], x.flip(3), x)


@augmentations.register
@dataclass(frozen=True)
class Cutout(Augmentation):
    """A square set to the mean colour, centred at a random pixel and clipped at the border (DeVries and Taylor, 2017).

    The mean colour is 0 in a normalised image, as in the authors' code; in images without normalisation it is black.

    Args:
        size: side of the square in pixels.
    """

    size: int = 16

    def __post_init__(self) -> None:
        at_least(1, "cutout: ", size=self.size)

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"centre": torch.from_numpy(rng.integers(0, shape[-2:], (count, 2)))}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        start = drawn["centre"] - self.size // 2

        def inside(axis: int) -> Tensor:
            at = torch.arange(x.shape[2 + axis], device=x.device) - start[:, axis, None]
            return (at >= 0) & (at < self.size)

        return x.masked_fill((inside(0)[:, :, None] & inside(1)[:, None, :])[:, None], 0.0)


@augmentations.register
@dataclass(frozen=True)
class Jitter(Augmentation):
    """Colour jitter: random changes of brightness, contrast, saturation and hue, in this order.

    The first three are multiplied by a factor from [1 - s, 1 + s]; the hue is shifted by up to a fraction s of the
    colour circle. Grey images have neither saturation nor hue.

    Args:
        brightness: s of the brightness.
        contrast: s of the contrast.
        saturation: s of the saturation.
        hue: s of the hue, at most .5.
        p: probability that an image is changed.

    Raises:
        ConfigError: if a setting is out of range.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    p: float = 0.8

    pixels: ClassVar[bool] = True
    colours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        probability(
            "jitter: ", brightness=self.brightness, contrast=self.contrast, saturation=self.saturation, p=self.p
        )
        if not 0 <= self.hue <= 0.5:
            raise ConfigError(f"jitter: hue must lie in [0, .5], not {self.hue}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        happens = uniform(rng, count) < self.p
        neutral = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
        drawn = {k: uniform(rng, count, v - getattr(self, k), v + getattr(self, k)) for k, v in neutral.items()}
        return {k: torch.where(happens, v, neutral[k]) for k, v in drawn.items()} | {"happens": happens}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        new = pixels.brightness(x, drawn["brightness"])
        new = pixels.contrast(new, drawn["contrast"])
        new = pixels.colour(new, drawn["saturation"])
        new = pixels.hue(new, drawn["hue"])
        return torch.where(drawn["happens"][:, None, None, None], new, x)


@augmentations.register
@dataclass(frozen=True)
class Blur(Augmentation):
    """Gaussian blur with a random standard deviation.

    Args:
        size: side of the kernel in pixels, odd; about a tenth of the image.
        low: smallest standard deviation in pixels.
        high: largest standard deviation in pixels.
        p: probability that an image is blurred.

    Raises:
        ConfigError: if a setting is out of range.
    """

    size: int = 3
    low: float = 0.1
    high: float = 2.0
    p: float = 0.5

    def __post_init__(self) -> None:
        probability("blur: ", p=self.p)
        if self.size < 3 or self.size % 2 == 0:
            raise ConfigError(f"blur: size must be an odd number of at least 3, not {self.size}.")
        if not 0 < self.low <= self.high < float("inf"):
            raise ConfigError(f"blur: 0 < low ≤ high must hold, not low={self.low}, high={self.high}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"sigma": uniform(rng, count, self.low, self.high), "happens": uniform(rng, count) < self.p}

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        return torch.where(drawn["happens"][:, None, None, None], pixels.blur(x, drawn["sigma"], self.size), x)
