"""All classes in every task, but seen anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data.augment.base import Scale
from fedloom.data.augment.warp import around_centre, rotation, warp
from fedloom.data.streams.base import Tasks, at_least_one, streams


@streams.register(name="s_mnist")
@dataclass(frozen=True)
class Transformed(Tasks):
    """Every class of a task is turned, flipped, cropped and scaled in its own way (S-MNIST; Acar, thesis ch. 5, A.1.4).

    The thesis names the four transformations and leaves their ranges open; here an image is turned by 0, 90, 180 or
    270 degrees, flipped along no axis or one of the two, cut down to a window whose side is a ``crop`` share of the
    image's (anywhere in it), and the window is drawn at a ``scale`` share of the image's side on black. All samples of
    a class in a task, for training and for testing, go through the same. On MNIST, 1000 tasks of 60 + 10 samples use
    as many samples as there are.

    Args:
        tasks: how many tasks.
        train: training samples per task.
        test: test samples per task.
        crop: least and greatest share of the side that is kept.
        scale: least and greatest share of the side that is filled.
    """

    tasks: int = 1000
    train: int = 60
    test: int = 10
    crop: tuple[float, float] = (0.75, 1.0)
    scale: tuple[float, float] = (0.5, 1.0)

    def __post_init__(self) -> None:
        at_least_one(tasks=self.tasks, train=self.train, test=self.test)
        for name in ("crop", "scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ConfigError(f"{name} must be two numbers with 0 < low ≤ high ≤ 1, not {low}, {high}.")

    @property
    def sizes(self) -> tuple[int, int]:
        """See ``Tasks.sizes``."""
        return self.train, self.test

    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        """See ``Tasks.table``."""
        return np.tile(np.arange(classes), (self.tasks, 1))

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        """See ``Tasks.change``; what was done is told for each class."""
        if arrays.x.ndim != 4:
            raise DataError(f"task stream 's_mnist' needs images, not inputs of shape {list(arrays.x.shape[1:])}.")
        about = {
            "rotation": 90.0 * draw.integers(0, 4, ways),
            "flip": np.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]])[draw.integers(0, 3, ways)],  # along u, v
            "crop": draw.uniform(*self.crop, ways),
            "corner": draw.uniform(-0.5, 0.5, (ways, 2)),  # of the room that the window has
            "scale": draw.uniform(*self.scale, ways),
        }
        black = Scale.of(arrays.x, arrays.mean, arrays.std).black
        each = {name: torch.from_numpy(value).to(arrays.x.dtype) for name, value in about.items()}
        return [
            transformed(a, {name: value[b] for name, value in each.items()}, black) for a, b in zip(x, y, strict=True)
        ], about


def transformed(x: Tensor, how: Mapping[str, Tensor], black: Tensor) -> Tensor:
    """Images [N, C, H, W], each turned, flipped, cropped and scaled as ``how`` says, one row an image."""
    height, width = x.shape[2:]
    size = torch.tensor([width, height], dtype=x.dtype)
    linear = (how["crop"] / how["scale"])[:, None, None] * rotation(how["rotation"]) @ torch.diag_embed(how["flip"])
    matrix = around_centre(linear, height, width)
    matrix[:, :, 2] += how["corner"] * (1 - how["crop"])[:, None] * size
    new = warp(x, matrix, black, "bilinear")
    half = how["scale"][:, None] / 2  # what the window does not fill is black, also where the image goes on
    across, down = ((torch.arange(n, dtype=x.dtype) + 0.5) / n - 0.5 for n in (width, height))
    inside = (down.abs() <= half)[:, None, :, None] & (across.abs() <= half)[:, None, None, :]
    return torch.where(inside, new, black)
