"""Base class of augmentations, which separate random draws (plain tensors) from their application to a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from fedloom.core.errors import ConfigError, in_words
from fedloom.core.federation import Arrays
from fedloom.core.registry import Registry

Draws = dict[str, Tensor]  # random parameters, one row per sample


@dataclass(frozen=True)
class Scale:
    """The normalisation of stored images, x = (pixel - mean) / std, with mean and std [C, 1, 1] in the type of x."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Scale:
        """The normalisation on the device and in the type of ``x``; the identity for empty ``mean`` and ``std``."""
        pair = [
            torch.tensor(v or (d,), dtype=x.dtype, device=x.device)[:, None, None] for v, d in ((mean, 0.0), (std, 1.0))
        ]
        return cls(*pair)

    @property
    def black(self) -> Tensor:
        """The stored value of a black pixel, [C, 1, 1]."""
        return -self.mean / self.std

    def pixels(self, x: Tensor) -> Tensor:
        """Pixels in [0, 1] of stored images."""
        return x * self.std + self.mean

    def stored(self, pixels: Tensor) -> Tensor:
        """Stored images of pixels in [0, 1]."""
        return (pixels - self.mean) / self.std


@dataclass(frozen=True)
class Augmentation(ABC):
    """A random transformation of images, drawn independently for every sample of a batch.

    ``draw`` turns a random stream into plain tensors, and ``apply`` is a deterministic function of them. A client's
    mini-batch is therefore transformed identically on every engine, even when a whole cohort's batches are stacked.
    """

    pixels: ClassVar[bool] = False  # whether ``apply`` maps pixels in [0, 1] to pixels in [0, 1]
    colours: ClassVar[bool] = False  # whether images must have one or three channels

    @abstractmethod
    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        """Random parameters for ``count`` images of the given shape [C, H, W]; tensors [count, ...]."""

    @abstractmethod
    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        """Transformed images [N, C, H, W] of the type and on the device of ``x``; their height and width may differ."""


augmentations = Registry[Augmentation]("augmentation")


def augmentation(given: str | Mapping[str, Any] | Augmentation) -> Augmentation:
    """Make an augmentation from its name, or from a mapping of its name and settings.

    >>> from fedloom.data.augment import augmentation
    >>> augmentation({"name": "cutout", "size": 8})
    Cutout(size=8)

    Raises:
        ConfigError: for unknown names and settings, and a registered class of another kind.
    """
    if isinstance(given, Augmentation):
        return given
    settings: Any = {"name": given} if isinstance(given, str) else given
    settings = dict(settings) if isinstance(settings, Mapping) else {}
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"an augmentation is a name, or a mapping with a name and settings, not {given!r}.")
    made = augmentations.make(name, **settings)
    if not isinstance(made, Augmentation):
        raise ConfigError(
            f"augmentation {name!r} is not derived from fedloom.data.augment.Augmentation, as it must be."
        )
    return made


@dataclass(frozen=True)
class Pipeline:
    """A sequence of augmentations of normalised images.

    Runs of augmentations that work on pixels are wrapped in one conversion to pixels in [0, 1] and back.
    """

    steps: tuple[Augmentation, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, x: Tensor, draws: Sequence[tuple[Generator, int]]) -> Tensor:
        """Transformed images [N, C, H, W]; each (generator, n) of ``draws`` decides for the next n images.

        Raises:
            ValueError: if a step does not return as many images of the same type.
        """
        shape = tuple(x.shape[1:])
        drawn = [[step.draw(count, shape, rng) for step in self.steps] for rng, count in draws]
        scale = Scale.of(x, self.mean, self.std)
        pixels = False
        for number, step in enumerate(self.steps):
            if step.pixels != pixels:
                x = scale.pixels(x).clamp_(0, 1) if step.pixels else scale.stored(x)
                pixels = step.pixels
            parts = [mine[number] for mine in drawn]
            together = parts[0] if len(parts) == 1 else {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
            x = _images(step.apply(x, {k: v.to(x.device) for k, v in together.items()}, scale), x, step)
        return scale.stored(x) if pixels else x


def _images(made: object, x: Tensor, step: Augmentation) -> Tensor:
    """What an augmentation made of images [N, C, H, W]; an error unless it is as many images of the same type."""
    found = in_words(made)
    if isinstance(made, Tensor):
        if made.ndim == 4 and len(made) == len(x) and made.dtype == x.dtype and made.device == x.device:
            return made
        found += f", {made.dtype} on {made.device},"
    raise ValueError(
        f"augmentation {type(step).__name__.lower()!r} returned {found} for images of shape {list(x.shape)}, {x.dtype} "
        f"on {x.device}; it must return as many images [N, C, H, W] of the same type"
    )


def pipeline(given: Sequence[str | Mapping[str, Any] | Augmentation], arrays: Arrays) -> Pipeline:
    """The pipeline of the given augmentations for a data set.

    Raises:
        ConfigError: for unknown names and settings, and augmentations that do not suit the data.
    """
    steps = tuple(augmentation(one) for one in given)
    x = arrays.x
    for one in steps:
        name = type(one).__name__.lower()
        if x.ndim != 4 or not x.is_floating_point():
            raise ConfigError(
                f"augmentation {name!r} needs images [N, C, H, W], not inputs of shape {list(x.shape[1:])}."
            )
        if one.colours and x.shape[1] not in (1, 3):
            raise ConfigError(f"augmentation {name!r} needs images of 1 or 3 channels, not {x.shape[1]}.")
        if one.pixels and not arrays.mean and len(x) and (float(x.min()) < 0 or float(x.max()) > 1):
            raise ConfigError(
                f"augmentation {name!r} works on pixels from 0 to 1, but the inputs lie between {float(x.min()):.3g} "
                f"and {float(x.max()):.3g}; give the mean and std of their normalisation (Arrays.mean, Arrays.std)."
            )
    return Pipeline(steps, arrays.mean, arrays.std)


def two_views(x: Tensor, change: Pipeline, rng: Generator) -> tuple[Tensor, Tensor]:
    """Two independent random views of the same images [N, C, H, W]."""
    return change(x, [(rng, len(x))]), change(x, [(rng, len(x))])


def uniform(rng: Generator, count: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform draws from [low, high), float32 [count]."""
    return torch.from_numpy(rng.random(count, dtype=np.float32)) * (high - low) + low


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """One value per image, in the type of ``x`` and the shape [N, 1, 1, 1]."""
    return values.to(x.dtype)[:, None, None, None]
