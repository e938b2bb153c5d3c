"""Federations of a few dozen samples, with clients of unequal sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedloom.core.federation import Arrays, Federation, Index, Split, Unlabelled
from fedloom.data.augment import Augmentation, Draws, Scale

SIZES = (7, 12, 5, 9, 16, 4)
FEATURES, CLASSES = 4, 3


def federation(arrays: Arrays, lists: Sequence[Sequence[int]], test: Arrays, held_out: int = 2) -> Federation:
    """Clients with the given training rows; each with ``held_out`` test samples, dealt in turn."""
    test_rows = [[(held_out * i + j) % max(len(test), 1) for j in range(held_out)] for i in range(len(lists))]
    nothing = Index.of([[] for _ in lists])
    return Federation(
        Split(arrays, Index.of(lists)),
        Split(test, nothing),
        Split(test, Index.of(test_rows)),
        test,
        unlabelled=Unlabelled(test.x),
    )


def deal_rows(sizes: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Row numbers 0 .. sum(sizes) - 1 in random order, cut to the sizes."""
    rows = np.random.default_rng(seed).permutation(sum(sizes))
    return np.split(rows, np.cumsum(sizes)[:-1])


def classes(
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
    shape: tuple[int, ...] = (FEATURES,),
    labels: int = CLASSES,
    dtype: torch.dtype = torch.float64,
) -> Federation:
    """Classification: every client has its own mean and its own mixture of labels."""
    draw = np.random.default_rng(seed)
    total = sum(sizes)
    lists = deal_rows(sizes, seed)
    x = draw.normal(size=(total, *shape))
    y = np.zeros(total, dtype=np.int64)
    for number, rows in enumerate(lists):
        x[rows] += draw.normal(size=shape)
        y[rows] = np.where(draw.random(len(rows)) < 0.6, number % labels, draw.integers(labels, size=len(rows)))
    test = Arrays(torch.tensor(draw.normal(size=(20, *shape)), dtype=dtype), torch.arange(20) % labels, labels)
    return federation(Arrays(torch.tensor(x, dtype=dtype), torch.tensor(y), labels), lists, test)


def as_images(original: Federation) -> Federation:
    """The same samples with vectors [d] as images [d, 1, 1], which can be augmented."""

    def image(x: torch.Tensor) -> torch.Tensor:
        return x[..., None, None] if x.ndim == 2 else x

    def change(arrays: Arrays) -> Arrays:
        return replace(arrays, x=image(arrays.x))

    splits = {name: getattr(original, name) for name in ("train", "validation", "held_out")}
    moved = {name: replace(split, arrays=change(split.arrays)) for name, split in splits.items()}
    hidden = original.unlabelled
    return replace(original, test=change(original.test), unlabelled=hidden and Unlabelled(image(hidden.x)), **moved)


@dataclass(frozen=True)
class Shaken(Augmentation):
    """Adds Gaussian noise to every number."""

    by: float = 0.5

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        return {"noise": torch.from_numpy(rng.normal(scale=self.by, size=(count, *shape)))}

    def apply(self, x: torch.Tensor, parameters: Draws, scale: Scale) -> torch.Tensor:
        return x + parameters["noise"].to(x.dtype)


def regression(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> Federation:
    """Least squares: client i holds inputs x[i] [n_i, d] and targets y[i] [n_i]."""
    sizes = [len(part) for part in x]
    ends = np.cumsum(sizes)
    lists = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    arrays = Arrays(torch.tensor(np.concatenate(x)), torch.tensor(np.concatenate(y))[:, None], 1)
    return federation(arrays, lists, arrays, held_out=1)


def with_validation(shift: float = 0.0, moved_client: int | None = None) -> Federation:
    """Two rows of each client set aside, their inputs moved by ``shift``; ``moved_client``'s training rows too."""
    original = classes()
    lists = [original.train.index[i] for i in range(len(SIZES))]
    train, validation = Index.of([rows[2:] for rows in lists]), Index.of([rows[:2] for rows in lists])
    arrays = original.train.arrays
    x = arrays.x.clone()
    x[torch.from_numpy(validation.rows)] += shift
    if moved_client is not None:
        x[torch.from_numpy(train[moved_client])] += 1.0
    arrays = replace(arrays, x=x)
    return replace(original, train=Split(arrays, train), validation=Split(arrays, validation))
