"""The distillation experiment: method, student, teacher, data and conditions.

Settings of SGD, mini-batches as a function of (seed, pass), and the schedule of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, cos, pi
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.checks import DType
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Bound, Count, Decay, NonNegative, NonNegativeInt, Positive, Range, check_ranges
from fedloom.base.settings import check_fields
from fedloom.data.augment import Augmentation, pipeline
from fedloom.rounds.plan import operand_dtype
from fedloom_apps.distill.data import Mode, Splits
from fedloom_apps.distill.method import Distiller


@dataclass(frozen=True)
class SGDConfig:
    """SGD with momentum and a cosine from ``lr`` to 0 over all steps of a phase.

    The defaults are those of Acar, thesis 2023, A.1.5.

    Args:
        batch_size: B; the last batch of a pass is smaller if B does not divide N, and is dropped if it has one sample.
        lr: initial learning rate.
        momentum: momentum coefficient.
        nesterov: whether to use Nesterov momentum.
        weight_decay: coefficient of L2 regularisation.
        clip: maximum norm of the gradient over all trained parameters; null does not clip.
        precision: ``full``, or ``bf16``: while training, the layers of student and teacher round the factors of their
            products to bfloat16, as in local training; parameters, losses and evaluation keep the run's dtype.
    """

    batch_size: Annotated[int, Range(2)] = 200
    lr: Positive = 0.1
    momentum: Decay = 0.9
    nesterov: bool = False
    weight_decay: NonNegative = 5e-4
    clip: Bound | None = None
    precision: Literal["full", "bf16"] = "full"

    def __post_init__(self) -> None:
        check_fields(self, "training.")
        if self.nesterov and not self.momentum:
            raise ConfigError("training.nesterov needs momentum above 0.")

    @property
    def operand_dtype(self) -> torch.dtype | None:
        """The dtype to which layers round the factors of products while training; None if they do not."""
        return operand_dtype(self.precision)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step in a phase of ``steps`` steps, lr (1 + cos(π step / steps)) / 2.

        >>> [round(SGDConfig(lr=1.0).rate(step, 4), 2) for step in range(5)]
        [1.0, 0.85, 0.5, 0.15, 0.0]
        """
        return self.lr * (1 + cos(pi * step / max(steps, 1))) / 2

    def steps(self, samples: int) -> int:
        """The number of mini-batches in one pass."""
        return ceil(samples / self.batch_size) - (samples % self.batch_size == 1)

    def batches(self, samples: int, seed: int, purpose: str, *counters: int) -> list[Tensor]:
        """The rows of each mini-batch of a pass, as a function of (seed, purpose, counters).

        >>> [b.tolist() for b in SGDConfig(batch_size=2).batches(5, 0, "batches", 0)]
        [[1, 3], [4, 0]]
        """
        order = torch.from_numpy(rng.stream(seed, purpose, *counters).permutation(samples).astype(np.int64))
        return [rows for rows in order.split(self.batch_size) if len(rows) > 1]


@dataclass(frozen=True)
class PassSchedule:
    """The numbers of passes over the data, by phase and round."""

    before: int
    warm: int
    rounds: tuple[int, ...]

    @property
    def total(self) -> int:
        """The total number of the student's passes."""
        return self.before + self.warm + sum(self.rounds)

    @property
    def all_rounds(self) -> int:
        """The number of rounds of the run."""
        return self.warm + len(self.rounds)


Budget = Literal["passes", "published"]


def schedule(
    epochs: int,
    round_passes: int,
    warms: bool,
    budget: Budget = "passes",
    warm: int | None = None,
    before: int | None = None,
) -> PassSchedule:
    """Make the schedule of a run under one of two protocols.

    ``passes``: the student makes ``epochs`` passes over the data, warm start included, with every method.
    ``published``: the method runs ``epochs`` rounds of ``round_passes`` passes (three for DiSK, one for the others),
    after a warm start that does not count.

    Args:
        epochs: E.
        round_passes: the student's passes in a round.
        warms: whether the method starts from a student trained on the labels.
        budget: ``passes`` or ``published``.
        warm: passes of the warm start; by default E/4 under ``passes`` and E under ``published``.
        before: passes already made by a given student; then there is no warm start.

    >>> schedule(20, 3, warms=True).rounds
    (3, 3, 3, 3, 3)
    >>> schedule(20, 3, warms=True, budget="published").total, schedule(20, 1, warms=False, budget="published").total
    (80, 20)
    """
    warm_passes = 0
    if warms and before is None:
        warm_passes = warm if warm is not None else max(epochs // 4, 1) if budget == "passes" else epochs
    if budget == "published":
        return PassSchedule(before or 0, warm_passes, (round_passes,) * epochs)
    left = epochs - warm_passes - (before or 0)
    if left < 1:
        raise ConfigError(
            f"the budget of {epochs} passes is used up by the warm start, which takes {epochs - left}; set epochs "
            "higher or warmup_epochs lower."
        )
    rounds = (round_passes,) * (left // round_passes) + ((left % round_passes,) if left % round_passes else ())
    return PassSchedule(before or 0, warm_passes, rounds)


@dataclass(frozen=True)
class DistillExperiment:
    """A student, its teacher, a method and the conditions; equal experiments give identical bits on one machine.

    Args:
        method: the composition of terms and guide.
        data: training, validation and test samples.
        model: factory of a freshly initialised student; called once, under a seed that depends on ``seed`` alone.
        teacher: a trained model or the run directory of one; not needed by ``ce``.
        epochs: E: the total number of the student's passes over the data (``budget=passes``), or the method's rounds.
        budget: ``passes``, equal student passes for every method, or ``published``, as in the papers.
        warmup_epochs: passes of the warm start, for methods that have one; by default E/4, or E as published.
        start: run directory of a student trained with ``ce``, in place of a warm start; its passes count.
        training: settings of SGD.
        augment: augmentations of every mini-batch, the same for student and teacher.
        every: student passes between evaluations; the last round is always evaluated.
        cache: where the teacher's outputs are cached: ``auto``, ``memory``, ``disk`` or ``none``.
        seed: seed of all random numbers.
        dtype: ``float32`` or ``float64``.
        device: ``auto`` (a GPU if available), ``cpu`` or ``cuda``.
        config: the settings as given, stored in the run directory.

    Raises:
        ConfigError: for impossible settings, before anything runs.
    """

    method: Distiller
    data: Splits
    model: Callable[[], nn.Module]
    teacher: nn.Module | Path | str | None = None
    epochs: Count = 40
    budget: Budget = "passes"
    warmup_epochs: NonNegativeInt | None = None
    start: Path | None = None
    training: SGDConfig = field(default_factory=SGDConfig)
    augment: tuple[str | Mapping[str, Any] | Augmentation, ...] = ()
    every: Count = 1
    cache: Mode = "auto"
    seed: int = 0
    dtype: DType = "float32"
    device: str = "auto"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.method.needs_teacher and self.teacher is None:
            raise ConfigError(
                f"method {self.method.name!r} learns from a teacher; give a run directory, with teacher=runs/..., or a "
                "model to be trained first, like teacher=two_cnn."
            )
        if self.training.precision != "full" and self.dtype != "float32":
            raise ConfigError(
                f"training.precision={self.training.precision} rounds to fewer digits than dtype={self.dtype} keeps; "
                "choose dtype=float32, or training.precision=full."
            )
        if self.start is not None and not self.method.warm:
            raise ConfigError(f"method {self.method.name!r} starts from scratch, so it cannot begin with start=.")
        self.schedule(0 if self.start is not None else None)
        if self.augment:
            pipeline(self.augment, self.data.train.first)

    def schedule(self, before: int | None = None) -> PassSchedule:
        """The schedule of the run; ``before`` is the number of passes already made by the student in ``start``."""
        return schedule(self.epochs, self.method.passes, self.method.warm, self.budget, self.warmup_epochs, before)
