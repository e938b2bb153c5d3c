"""Settings of training, and which rows make a mini-batch: data, computed from (seed, pass)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, pi

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.errors import ConfigError


@dataclass(frozen=True)
class SGDConfig:
    """SGD with momentum and a cosine from ``lr`` to 0 over all steps of a phase.

    The defaults are those of Acar, thesis 2023, A.1.5.

    Args:
        batch_size: B; a pass's last batch is smaller if B does not divide N, and is left out if it holds one sample.
        lr: the learning rate of the first step.
        momentum: heavy-ball coefficient.
        nesterov: whether the momentum is Nesterov's.
        weight_decay: coefficient of the parameters in the gradient.
        clip: largest Euclidean norm of the gradient, over all that is trained; null does not clip.

    Raises:
        ConfigError: for values outside their range.
    """

    batch_size: int = 200
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    clip: float | None = None

    def __post_init__(self) -> None:
        checks = {
            "batch_size must be at least 2": self.batch_size >= 2,
            "lr must be positive and finite": 0 < self.lr < float("inf"),
            "momentum must lie in [0, 1)": 0 <= self.momentum < 1,
            "nesterov needs momentum above 0": not self.nesterov or self.momentum > 0,
            "weight_decay must be at least 0": self.weight_decay >= 0,
            "clip must be positive": self.clip is None or self.clip > 0,
        }
        for sentence, holds in checks.items():
            if not holds:
                raise ConfigError(f"training: {sentence}.")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step of a phase, lr (1 + cos(π step / steps)) / 2.

        >>> [round(SGDConfig(lr=1.0).rate(step, 4), 2) for step in range(5)]
        [1.0, 0.85, 0.5, 0.15, 0.0]
        """
        return self.lr * (1 + cos(pi * step / max(steps, 1))) / 2

    def steps(self, samples: int) -> int:
        """Mini-batches in one pass."""
        return ceil(samples / self.batch_size) - (samples % self.batch_size == 1)

    def batches(self, samples: int, seed: int, purpose: str, *counters: int) -> list[Tensor]:
        """The rows of each mini-batch of a pass: a function of (seed, purpose, counters).

        >>> [b.tolist() for b in SGDConfig(batch_size=2).batches(5, 0, "batches", 0)]
        [[1, 3], [4, 0]]
        """
        order = torch.from_numpy(rng.stream(seed, purpose, *counters).permutation(samples).astype(np.int64))
        return [rows for rows in order.split(self.batch_size) if len(rows) > 1]


@dataclass(frozen=True)
class PassSchedule:
    """Who makes how many passes, and when.

    Args:
        before: passes that the student had made when it came.
        warm: passes of the warm start, a round each.
        rounds: the student's passes in every round that follows.
    """

    before: int
    warm: int
    rounds: tuple[int, ...]

    @property
    def main(self) -> int:
        """The student's passes after the warm start."""
        return sum(self.rounds)

    @property
    def total(self) -> int:
        """All the student's passes."""
        return self.before + self.warm + self.main

    @property
    def all_rounds(self) -> int:
        """Rounds of the run."""
        return self.warm + len(self.rounds)


BUDGETS = ("passes", "published")


def schedule(
    epochs: int, each: int, warms: bool, budget: str = "passes", warm: int | None = None, before: int | None = None
) -> PassSchedule:
    """The rounds of a run under one of two protocols.

    ``passes``: the student goes ``epochs`` times over the data, whatever the method, the warm start included.
    ``published``: the method makes ``epochs`` rounds of ``each`` passes (DiSK three, the others one), after a warm
    start that is not counted.

    Args:
        epochs: E.
        each: the student's passes in a round.
        warms: whether the method starts from a student trained on the labels.
        budget: ``passes`` or ``published``.
        warm: passes of the warm start; by default E/4 under ``passes`` and E under ``published``.
        before: passes that a student made which comes trained; then there is no warm start.

    Raises:
        ConfigError: if nothing is left for the method itself.

    >>> schedule(20, 3, warms=True).rounds
    (3, 3, 3, 3, 3)
    >>> schedule(20, 3, warms=True, budget="published").total, schedule(20, 1, warms=False, budget="published").total
    (80, 20)
    """
    if budget not in BUDGETS:
        raise ConfigError(f"budget is {budget!r}, but it must be one of {' and '.join(BUDGETS)}.")
    if epochs < 1 or (warm is not None and warm < 0):
        raise ConfigError(f"epochs must be at least 1 and warmup_epochs at least 0, not {epochs} and {warm}.")
    first = 0
    if warms and before is None:
        first = warm if warm is not None else max(epochs // 4, 1) if budget == "passes" else epochs
    if budget == "published":
        return PassSchedule(before or 0, first, (each,) * epochs)
    left = epochs - first - (before or 0)
    if left < 1:
        raise ConfigError(
            f"the budget of {epochs} passes is spent before the method begins ({epochs - left} passes on the labels); "
            "take more epochs or a shorter warm start."
        )
    rounds = (each,) * (left // each) + ((left % each,) if left % each else ())
    return PassSchedule(before or 0, first, rounds)
