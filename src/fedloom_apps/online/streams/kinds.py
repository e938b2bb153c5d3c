"""Kinds of tasks made from a source: all classes, transformed in each task (S-MNIST), or k classes of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedloom.core import rng
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.core.ranges import Count, NonNegativeInt
from fedloom.data.augment import Scale, around_centre, rotation, warp
from fedloom.data.sources import Source
from fedloom_apps.online.streams.base import Dealt, Tasks, streams
from fedloom_apps.online.streams.deals import as_they_come, by_class

SHIFTS = ((0, 0), (0, -1), (0, 1), (-1, 0), (1, 0))  # (down, right): none, left, right, up, down


@streams.register(name="s_mnist")
@dataclass(frozen=True)
class SMnist(Tasks):
    """S-MNIST as the thesis's authors built it: in every task the images of each class are transformed differently.

    In turn, each with equal probability: a quarter turn k ∈ {0, 1, 2, 3}; a flip (none, across, down); a shrink or none
    (the middle 26/28 of the side at half its size, on the mean of the image's border); a shift by 4/28 of the side
    (none, left, right, up, down), which leaves 0 behind, in normalised pixels the mean grey. A class has 4·3·2·5 = 120
    changes, shared by the training and test samples of a task. Samples are shuffled and dealt in turn, so classes are
    not balanced within a task. On MNIST, 1000 tasks of 60 + 10 samples use every sample once.

    Acar, thesis 2023, 5.3 and A.1.4, which name the transformations; their ranges are those of the authors' code.

    Args:
        tasks: number of tasks.
        train: training samples per task.
        test: test samples per task.
    """

    tasks: Count = 1000
    train: Count = 60
    test: Count = 10

    def deal(self, source: Source, seed: int) -> tuple[int, Dealt]:
        shape = tuple(source.train.x.shape[1:])
        if len(shape) != 3 or shape[1] != shape[2]:
            raise DataError(f"task stream 's_mnist' turns square images, not inputs of shape {list(shape)}.")
        return self.tasks, as_they_come(source, (self.train, self.test), seed)

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        about = {
            "turn": draw.integers(0, 4, ways),
            "flip": draw.integers(0, 3, ways),
            "shrink": draw.integers(0, 2, ways),
            "shift": draw.integers(0, len(SHIFTS), ways),
        }
        changed = []
        for images, labels in zip(x, y, strict=True):
            new = torch.empty_like(images)
            for c in labels.unique().tolist():
                new[labels == c] = s_mnist_change(images[labels == c], **{k: int(v[c]) for k, v in about.items()})
            changed.append(new)
        return changed, about


def s_mnist_change(x: Tensor, turn: int, flip: int, shrink: int, shift: int) -> Tensor:
    """Images [N, C, S, S], turned, flipped, shrunk and shifted.

    >>> x = torch.zeros(1, 1, 28, 28)
    >>> x[0, 0, 0, 0] = 1.0
    >>> s_mnist_change(x, turn=1, flip=0, shrink=0, shift=0).nonzero().tolist()  # counter-clockwise
    [[0, 0, 27, 0]]
    >>> s_mnist_change(x, turn=0, flip=2, shrink=0, shift=3).nonzero().tolist()  # down, then up by four
    [[0, 0, 23, 0]]
    """
    side = x.shape[-1]
    x = torch.rot90(x, turn, (2, 3))
    if flip:
        x = x.flip(3 if flip == 1 else 2)
    if shrink:
        kept, half = round(side * 26 / 28), round(side * 13 / 28)
        first, corner = (side - kept) // 2, (side - half) // 2
        middle = x[:, :, first : first + kept, first : first + kept]
        border = x.sum((2, 3), keepdim=True) - x[:, :, 1:-1, 1:-1].sum((2, 3), keepdim=True)
        x = (border / (4 * side - 4)).expand_as(x).clone()
        x[:, :, corner : corner + half, corner : corner + half] = interpolate(middle, (half, half), mode="bilinear")
    down, right = (round(side * 4 / 28) * way for way in SHIFTS[shift])
    if down or right:
        x = torch.roll(x, (down, right), (2, 3))
        for axis, way in ((2, down), (3, right)):
            x.narrow(axis, 0 if way > 0 else side + way, abs(way)).zero_()
    return x


@streams.register(name="transformed")
@dataclass(frozen=True)
class Transformed(Tasks):
    """S-MNIST with ranges: in every task each class is rotated, flipped, cropped and scaled by continuous amounts.

    An image is rotated by a multiple of 90 degrees, flipped along no axis or one of the two, and cropped to a window at
    a random position, whose side is a ``crop`` fraction of the image's; the window is drawn on black at a ``scale``
    fraction of the image's side. All training and test samples of a class in a task share one transformation; classes
    are balanced. The transformations are those named in Acar, thesis 2023, A.1.4, but with other ranges; ``s_mnist``
    has the published ones.

    Args:
        tasks: number of tasks.
        train: training samples per task.
        test: test samples per task.
        crop: range of the fraction of the side that is kept.
        scale: range of the fraction of the side that is filled.
    """

    tasks: Count = 1000
    train: Count = 60
    test: Count = 10
    crop: tuple[float, float] = (0.75, 1.0)
    scale: tuple[float, float] = (0.5, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("crop", "scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ConfigError(f"{name} must be two numbers with 0 < low ≤ high ≤ 1, not {low}, {high}.")

    def deal(self, source: Source, seed: int) -> tuple[int, Dealt]:
        if source.train.x.ndim != 4:
            shape = list(source.train.x.shape[1:])
            raise DataError(f"task stream 'transformed' needs images, not inputs of shape {shape}.")
        table = np.tile(np.arange(source.train.classes), (self.tasks, 1))
        return self.tasks, by_class(source, table, (self.train, self.test), seed)

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
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

    ways: Count = 5
    tasks: NonNegativeInt = 200
    train: Count = 250
    test: Count = 50
    overlap: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap and not self.tasks:
            raise ConfigError("stream.tasks=0, all disjoint tasks, needs stream.overlap=false.")

    def deal(self, source: Source, seed: int) -> tuple[int, Dealt]:
        table = self.table(source.train.classes, rng.stream(seed, "tasks"))
        return len(table), by_class(source, table, (self.train, self.test), seed)

    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        """The source's classes of every task, in the order of the task's labels; int [T, k]."""
        if self.ways > classes:
            raise DataError(f"tasks of {self.ways} classes need more than the {classes} available classes.")
        if self.overlap:
            return np.stack([draw.permutation(classes)[: self.ways] for _ in range(self.tasks)])
        most = classes // self.ways
        count = self.tasks or most
        if count > most:
            raise DataError(f"{classes} classes give {most} tasks of {self.ways} without overlap, not {count}.")
        return draw.permutation(classes)[: count * self.ways].reshape(count, self.ways)
