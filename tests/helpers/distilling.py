"""Small problems for distillation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.federation import Arrays
from fedloom.models import models
from fedloom.models.deep import residual
from fedloom_apps.distill import Distiller, DistillExperiment, SGDConfig, Splits, Subset


class Problem(NamedTuple):
    """A teacher, a student's factory and data."""

    data: Splits
    teacher: nn.Module
    student: Callable[[], nn.Module]

    def experiment(self, method: Distiller, **settings: object) -> DistillExperiment:
        """A run in double precision, few passes, unless said otherwise."""
        defaults: dict[str, object] = {"epochs": 4, "training": SGDConfig(batch_size=16, lr=0.05), "dtype": "float64"}
        return DistillExperiment(method, self.data, self.student, self.teacher, **(defaults | settings))  # type: ignore[arg-type]


def blobs(shape: tuple[int, ...], count: int, seed: int) -> Arrays:
    """Three classes around three random centres, with noise as large as their distance."""
    draw = torch.Generator().manual_seed(7)
    centres = torch.randn(3, *shape, generator=draw, dtype=torch.float64)
    draw.manual_seed(seed)
    y = torch.arange(count) % 3
    x = centres[y] + torch.randn(count, *shape, generator=draw, dtype=torch.float64)
    return Arrays(x, y, 3)


def splits(shape: tuple[int, ...]) -> Splits:
    """50 samples to learn from, 20 to choose on, 30 to test on; the last mini-batch of 16 holds two."""
    train, validation, test = (Subset(blobs(shape, count, seed)) for count, seed in ((50, 1), (20, 2), (30, 3)))
    return Splits(train, validation, test)


def model_from_seed(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def vectors() -> Problem:
    """Perceptrons on vectors."""
    wide = partial(models.make, "mlp", classes=3, inputs=(5,), hidden=(12, 8))
    return Problem(
        splits((5,)), model_from_seed(wide, 0), partial(models.make, "mlp", classes=3, inputs=(5,), hidden=(4,))
    )


def images() -> Problem:
    """Residual networks with batch normalisation on small images; their features are the mean of the last map."""
    kind = {"classes": 3, "inputs": (1, 8, 8), "norm": "batch"}
    wide = partial(residual, "wide", 6, (6, 10), (1, 1), **kind)
    narrow = partial(residual, "narrow", 3, (3, 4), (1, 1), **kind)
    return Problem(splits((1, 8, 8)), model_from_seed(wide, 0), narrow)


def weights(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
