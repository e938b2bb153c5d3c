"""Training a classifier to convergence, on a synthetic set or on real data, to evaluate synthetic sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core import rng
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.core.ranges import Count, NonNegative, Positive, within
from fedloom.data.augment import Pipeline, pipeline
from fedloom.models import models

AUTO = "auto"
DROP = 0.1  # of the learning rate at a plateau
BETTER = 0.98  # a window's loss above this fraction of the best is no progress


@dataclass(frozen=True)
class ClassifierTraining:
    """Settings for training a classifier to convergence with Adam.

    When the mean loss over ``window`` steps has not fallen by two per cent for ``patience`` windows, the learning rate
    drops to a tenth. Training ends at the third such plateau, when the mean loss falls below ``loss_tol``, or after
    ``max_steps`` steps.

    Args:
        lr: initial learning rate of Adam.
        batch_size: samples of a mini-batch.
        window: steps over which the loss is averaged.
        patience: windows without progress that count as a plateau.
        loss_tol: mean loss below which training ends.
        max_steps: maximum number of steps.
        augment: augmentations of the images, as in an experiment; None shifts them by up to an eighth of their side.
    """

    lr: Positive = 2e-3
    batch_size: Count = 50
    window: Count = 25
    patience: Count = 4
    loss_tol: NonNegative = 1e-3
    max_steps: Count = 2000
    augment: tuple[str | Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        within(self, "judge.")


@dataclass(frozen=True)
class FittedClassifier:
    """A trained classifier, in evaluation mode.

    Attributes:
        model: the network.
        steps: number of training steps.
        loss: mean loss over the last window, on augmented mini-batches.
        accuracy: accuracy on the training samples without augmentation.
    """

    model: nn.Module
    steps: int
    loss: float
    accuracy: float


def suited(name: str, arrays: Arrays) -> str:
    """The name of the classifier; for ``auto``, of a small one chosen by the size of the samples.

    ``auto`` is ``fedssa_cnn``, similar to LeNet, for images of at least 16 pixels, ``two_cnn`` for smaller ones, and
    ``mlp`` for vectors.

    >>> suited("auto", Arrays(torch.zeros(1, 1, 8, 8), torch.tensor([0]), classes=10))
    'two_cnn'
    """
    shape = tuple(arrays.x.shape[1:])
    if name != AUTO:
        return name
    return "mlp" if len(shape) != 3 else "two_cnn" if min(shape[1:]) < 16 else "fedssa_cnn"


def classifier(name: str, arrays: Arrays) -> nn.Module:
    """Make a freshly initialised classifier for samples like these, by name or ``auto``."""
    return models.make(suited(name, arrays), classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]))


def fit(name: str, arrays: Arrays, training: ClassifierTraining, seed: int) -> FittedClassifier:
    """Train a freshly initialised classifier on ``arrays``, on their device; a function of its arguments alone.

    Args:
        name: name of a model, or ``auto``.
        arrays: the training samples.
        training: settings of the training.
        seed: seed of initialisation, mini-batches and augmentation.

    Example:
        >>> from fedloom.data.sources.included import digits
        >>> found = fit("mlp", digits().train.take(torch.arange(100)), ClassifierTraining(augment=()), seed=0)
        >>> found.accuracy, found.loss < 0.05
        (1.0, True)
    """
    if not len(arrays):
        raise ConfigError("a classifier cannot be trained on no samples.")
    if not arrays.has_classes:
        raise ConfigError("a classifier needs samples with one class number each.")
    change = changes(training, arrays)
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "judge")
        model = classifier(name, arrays).to(arrays.x.device).train()
        loss, steps = _train(model, arrays, training, change, rng.stream(seed, "judge"))
    model.eval()
    right = predicted(model, arrays.x) == arrays.y
    return FittedClassifier(model, steps, loss, float(right.double().mean()))


def changes(training: ClassifierTraining, arrays: Arrays) -> Pipeline | None:
    """Make the augmentation for samples like these; None for none."""
    choices = training.augment
    if choices is None:
        if arrays.x.ndim != 4:
            return None
        choices = ({"name": "crop", "padding": max(min(arrays.x.shape[2:]) // 8, 1)},)
    return pipeline(choices, arrays) if choices else None


def _batches(count: int, size: int, draws: np.random.Generator) -> Iterator[np.ndarray]:
    while True:
        order = draws.permutation(count)
        yield from np.split(order, range(size, count, size))


def _train(
    model: nn.Module, arrays: Arrays, training: ClassifierTraining, change: Pipeline | None, draws: np.random.Generator
) -> tuple[float, int]:
    """Train to convergence; returns the last window's loss and the number of steps."""
    optimiser = torch.optim.Adam(model.parameters(), lr=training.lr)
    best, plateaus, stale, step = inf, 0, 0, 0
    losses: list[Tensor] = []
    mean = inf
    for rows in _batches(len(arrays), training.batch_size, draws):
        at = torch.from_numpy(rows).to(arrays.x.device)
        x = arrays.x[at] if change is None else change(arrays.x[at], [(draws, len(rows))])
        loss = F.cross_entropy(model(x), arrays.y[at])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
        step += 1
        if step % training.window and step < training.max_steps:
            continue
        mean = float(torch.stack(losses).mean())
        losses.clear()
        stale = stale + 1 if mean > BETTER * best else 0
        best = min(best, mean)
        if stale >= training.patience:
            stale, plateaus = 0, plateaus + 1
            for group in optimiser.param_groups:
                group["lr"] *= DROP
        if plateaus == 3 or mean < training.loss_tol or step >= training.max_steps:
            break
    return mean, step


def predicted(model: nn.Module, x: Tensor, batch: int = 1000) -> Tensor:
    """The classes [N] that a classifier in evaluation mode predicts."""
    with torch.inference_mode():
        return torch.cat([model(part).argmax(1) for part in x.split(batch)])
