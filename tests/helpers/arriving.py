"""Small streams, models and experiments for the tests of online learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.federation import Arrays
from fedloom.core.local import Local
from fedloom.core.parts import Adaptation
from fedloom.models import models
from fedloom.parts.adaptation import Maml
from fedloom.parts.objectives.squared_error import SquaredError
from fedloom_apps.online import Measures, Online, OnlineLearner, grid
from fedloom_apps.online.learners import Hedge
from fedloom_apps.online.streams import Task, TaskStream

LOCAL = Local(steps=3, batch_size=4, lr=0.1, weight_decay=1e-3, clip=3.0)


def gaussians(number: int, samples: int = 9, test: int = 5, ways: int = 3, seed: int = 0) -> Task:
    """A task of three classes of points in the plane, whose centres are the task's own."""
    draw = np.random.default_rng([seed, number])
    centres = 2 * draw.normal(size=(ways, 2))

    def split(count: int) -> Arrays:
        y = np.arange(count) % ways
        x = centres[y] + 0.3 * draw.normal(size=(count, 2))
        return Arrays(torch.from_numpy(x), torch.from_numpy(y), ways)

    return Task(number, split(samples), split(test))


def stream(count: int = 6, **settings: Any) -> TaskStream:
    """Such tasks."""
    return TaskStream(count, lambda number: gaussians(number, **settings))


def small() -> nn.Module:
    """A perceptron of 2-4-3."""
    return models.make("mlp", classes=3, inputs=(2,), hidden=(4,))


def online(learner: OnlineLearner, tasks: TaskStream | None = None, **changes: Any) -> Online:
    """A float64 experiment with one expert, or with the grid ``over``."""
    adaptation: Adaptation = changes.pop("adaptation", Maml())
    over: dict[str, Sequence[Any]] = changes.pop("over", {})
    local = changes.pop("local", LOCAL)
    usual: dict[str, Any] = {"model": small, "dtype": "float64", "seed": 1}
    return Online(
        "test", grid(learner, adaptation, local, over), stream() if tasks is None else tasks, **(usual | changes)
    )


class Point(nn.Module):
    """A model that gives w [d] whatever it is asked."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """w for every row, scaled by the row's own weights."""
        return x * self.w


def quadratics(centres: np.ndarray, scales: np.ndarray) -> TaskStream:
    """f^t(w) = ½‖a_t ∘ (w - c_t)‖², one sample a task, as ½‖x ∘ w - y‖² with x = a_t, y = a_t ∘ c_t."""

    def make(number: int) -> Task:
        a = torch.from_numpy(scales[number : number + 1])
        arrays = Arrays(a, a * torch.from_numpy(centres[number : number + 1]), 1)
        return Task(number, arrays, arrays)

    return TaskStream(len(centres), make)


def convex(learner: OnlineLearner, centres: np.ndarray, scales: np.ndarray, **changes: Any) -> Online:
    """Quadratic tasks without adaptation, weight decay or clipping: every step is on the whole f^t."""
    local = changes.pop("local", Local(steps=200, batch_size=0, lr=0.1))
    return online(
        learner,
        quadratics(centres, scales),
        adaptation=Adaptation(),
        local=local,
        model=lambda: Point(centres.shape[1]),
        objective=(SquaredError(),),
        **changes,
    )


__all__ = ["LOCAL", "Hedge", "Measures", "Point", "convex", "gaussians", "online", "quadratics", "small", "stream"]
