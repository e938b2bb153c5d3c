"""What an augmentation is: draws, which are data, and a change of a batch that follows from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.core.registry import Registry

Draws = dict[str, Tensor]  # what was drawn, one row a sample


@dataclass(frozen=True)
class Scale:
    """How stored images follow from pixels: x = (pixel - mean) / std; mean and std are [C, 1, 1] in x's type."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Scale:
        """On the device and in the type of ``x``; without constants images are pixels as they are."""
        made = [
            torch.tensor(v or (d,), dtype=x.dtype, device=x.device)[:, None, None] for v, d in ((mean, 0.0), (std, 1.0))
        ]
        return cls(*made)

    @property
    def black(self) -> Tensor:
        """A black pixel as it is stored, [C, 1, 1]."""
        return -self.mean / self.std

    def pixels(self, x: Tensor) -> Tensor:
        """Stored images as pixels from 0 to 1."""
        return x * self.std + self.mean

    def stored(self, pixels: Tensor) -> Tensor:
        """Pixels as they are stored."""
        return (pixels - self.mean) / self.std


@dataclass(frozen=True)
class Augmentation(ABC):
    """A random change of images, drawn for every sample of a batch by itself.

    Drawing and applying are apart: ``draw`` turns a random stream into plain tensors, ``apply`` is a function of them.
    That is why a client's mini-batch changes in the same way on every engine, also when a whole cohort's batches are
    changed at once.
    """

    pixels: ClassVar[bool] = False  # whether ``apply`` needs pixels from 0 to 1, and gives such pixels
    colours: ClassVar[bool] = False  # whether images must have one or three channels

    @abstractmethod
    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        """What happens to each of ``count`` images of the given shape [C, H, W]; tensors [count, ...]."""

    @abstractmethod
    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        """New images [N, C, H, W]."""


augmentations = Registry[Augmentation]("augmentation")


def augmentation(given: str | Mapping[str, Any] | Augmentation) -> Augmentation:
    """An augmentation by name, or by a mapping of its name and settings.

    >>> from fedloom.data.augment import augmentation
    >>> augmentation({"name": "cutout", "size": 8})
    Cutout(size=8)

    Raises:
        ConfigError: for unknown names and settings.
    """
    if isinstance(given, Augmentation):
        return given
    settings = {"name": given} if isinstance(given, str) else dict(given)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"an augmentation is a name, or a mapping with a name and settings, not {given!r}.")
    return augmentations.make(name, **settings)


@dataclass(frozen=True)
class Pipeline:
    """Augmentations one after the other.

    Images stay as they are stored, normalised; around augmentations that work on pixels they are turned into pixels
    from 0 to 1 and back, once for several in a row.
    """

    steps: tuple[Augmentation, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, x: Tensor, draws: Sequence[tuple[np.random.Generator, int]]) -> Tensor:
        """New images [N, C, H, W]; each generator decides for so many of them, in order."""
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
            x = step.apply(x, {k: v.to(x.device) for k, v in together.items()}, scale)
        return scale.stored(x) if pixels else x


def pipeline(given: Sequence[str | Mapping[str, Any] | Augmentation], arrays: Arrays) -> Pipeline:
    """The augmentations of a data set's images.

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
                f"and {float(x.max()):.3g}; say by which mean and std they were normalised (Arrays.mean, Arrays.std)."
            )
    return Pipeline(steps, arrays.mean, arrays.std)


def two_views(x: Tensor, change: Pipeline, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Two independent random views of the same images."""
    return change(x, [(rng, len(x))]), change(x, [(rng, len(x))])


def chance(name: str, value: float) -> None:
    """Refuse a setting that is no probability."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must lie in [0, 1], not {value}.")


def uniform(rng: np.random.Generator, count: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Numbers from ``low`` to ``high``, float32 [count]."""
    return torch.from_numpy(rng.random(count, dtype=np.float32)) * (high - low) + low


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """One number a sample, as x's type in the shape [N, 1, 1, 1]."""
    return values.to(x.dtype)[:, None, None, None]
