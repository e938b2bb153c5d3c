"""The kinds of tasks: all classes under task-specific transformations (S-MNIST), or k classes of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.core.checks import at_least
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data.augment.base import Scale
from fedloom.data.augment.pixels import around_centre, rotation, warp
from fedloom.data.streams.base import Tasks, streams


@streams.register(name="s_mnist")
@dataclass(frozen=True)
class Transformed(Tasks):
    """S-MNIST: in every task each class is rotated, flipped, cropped and scaled in its own way (Acar, thesis A.1.4).

    The thesis names the four transformations but not their ranges. Here an image is rotated by a multiple of 90
    degrees, flipped along no axis or one of the two, and cropped to a window at a random position, whose side is a
    ``crop`` fraction of the image's; the window is drawn on black at a ``scale`` fraction of the image's side. All
    training and test samples of a class in a task share one transformation. On MNIST, 1000 tasks of 60 + 10 samples use
    every sample once.

    Args:
        tasks: number of tasks.
        train: training samples per task.
        test: test samples per task.
        crop: range of the fraction of the side that is kept.
        scale: range of the fraction of the side that is filled.
    """

    tasks: int = 1000
    train: int = 60
    test: int = 10
    crop: tuple[float, float] = (0.75, 1.0)
    scale: tuple[float, float] = (0.5, 1.0)

    def __post_init__(self) -> None:
        at_least(1, tasks=self.tasks, train=self.train, test=self.test)
        for name in ("crop", "scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ConfigError(f"{name} must be two numbers with 0 < low ≤ high ≤ 1, not {low}, {high}.")

    @property
    def sizes(self) -> tuple[int, int]:
        return self.train, self.test

    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        return np.tile(np.arange(classes), (self.tasks, 1))

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        if arrays.x.ndim != 4:
            raise DataError(f"task stream 's_mnist' needs images, not inputs of shape {list(arrays.x.shape[1:])}.")
        about = {
            "rotation": 90.0 * draw.integers(0, 4, ways),
            "flip": np.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]])[draw.integers(0, 3, ways)],  # along u, v
            "crop": draw.uniform(*self.crop, ways),
            "corner": draw.uniform(-0.5, 0.5, (ways, 2)),  # as a fraction of the window's room to move
            "scale": draw.uniform(*self.scale, ways),
        }
        black = Scale.of(arrays.x, arrays.mean, arrays.std).black
        each = {name: torch.from_numpy(value).to(arrays.x.dtype) for name, value in about.items()}
        return [
            transformed(a, {name: value[b] for name, value in each.items()}, black) for a, b in zip(x, y, strict=True)
        ], about


def transformed(x: Tensor, how: Mapping[str, Tensor], black: Tensor) -> Tensor:
    """Rotate, flip, crop and scale images [N, C, H, W] by the parameters ``how``, one row per image."""
    height, width = x.shape[2:]
    size = torch.tensor([width, height], dtype=x.dtype)
    linear = (how["crop"] / how["scale"])[:, None, None] * rotation(how["rotation"]) @ torch.diag_embed(how["flip"])
    matrix = around_centre(linear, height, width)
    matrix[:, :, 2] += how["corner"] * (1 - how["crop"])[:, None] * size
    new = warp(x, matrix, black, "bilinear")
    half = how["scale"][:, None] / 2  # outside the window is black, even where the image continues
    across, down = ((torch.arange(n, dtype=x.dtype) + 0.5) / n - 0.5 for n in (width, height))
    inside = (down.abs() <= half)[:, None, :, None] & (across.abs() <= half)[:, None, None, :]
    return torch.where(inside, new, black)


@streams.register(name="k_way")
@dataclass(frozen=True)
class KWay(Tasks):
    """k random classes per task, labelled in random order (Acar, thesis ch. 5).

    With overlap, every task draws its classes independently; without, no class occurs in two tasks.

    Args:
        ways: classes per task, k.
        tasks: number of tasks; without overlap at most ⌊C/k⌋, and 0 means all of them.
        train: training samples per task.
        test: test samples per task.
        overlap: whether tasks may share classes.

    >>> KWay(ways=3, tasks=0, overlap=False).table(10, np.random.default_rng(0)).shape
    (3, 3)
    """

    ways: int = 5
    tasks: int = 200
    train: int = 250
    test: int = 50
    overlap: bool = True

    def __post_init__(self) -> None:
        at_least(1, ways=self.ways, train=self.train, test=self.test)
        at_least(1 if self.overlap else 0, tasks=self.tasks)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.train, self.test

    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        if self.ways > classes:
            raise DataError(f"tasks of {self.ways} classes cannot be made from {classes}.")
        if self.overlap:
            return np.stack([draw.permutation(classes)[: self.ways] for _ in range(self.tasks)])
        most = classes // self.ways
        count = self.tasks or most
        if count > most:
            raise DataError(f"{classes} classes give {most} tasks of {self.ways} without overlap, not {count}.")
        return draw.permutation(classes)[: count * self.ways].reshape(count, self.ways)
