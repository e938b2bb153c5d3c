"""The distillation experiment: method, student, teacher, data and conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.core.checks import DTYPES, one_of
from fedloom.core.errors import ConfigError
from fedloom.data.augment import Augmentation, pipeline
from fedloom_apps.distill.data import Splits
from fedloom_apps.distill.method import Distiller
from fedloom_apps.distill.teacher_cache import MODES
from fedloom_apps.distill.training import PassSchedule, SGDConfig, schedule


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
    epochs: int = 40
    budget: str = "passes"
    warmup_epochs: int | None = None
    start: Path | None = None
    training: SGDConfig = field(default_factory=SGDConfig)
    augment: tuple[str | Mapping[str, Any] | Augmentation, ...] = ()
    every: int = 1
    cache: str = "auto"
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method.needs_teacher and self.teacher is None:
            raise ConfigError(
                f"method {self.method.name!r} learns from a teacher; give a run directory, with teacher=runs/..., or a "
                "model to be trained first, like teacher=two_cnn."
            )
        one_of("unknown dtype", self.dtype, DTYPES)
        one_of("unknown cache", self.cache, MODES)
        if self.training.precision != "full" and self.dtype != "float32":
            raise ConfigError(
                f"training.precision={self.training.precision} rounds to fewer digits than dtype={self.dtype} keeps; "
                "choose dtype=float32, or training.precision=full."
            )
        if self.every < 1:
            raise ConfigError(f"every is {self.every}, but it must be at least 1 student pass.")
        if self.start is not None and not self.method.warm:
            raise ConfigError(f"method {self.method.name!r} starts from scratch, so it cannot begin with start=.")
        self.schedule(0 if self.start is not None else None)
        if self.augment:
            pipeline(self.augment, self.data.train.first)

    def schedule(self, before: int | None = None) -> PassSchedule:
        """The schedule of the run; ``before`` is the number of passes already made by the student in ``start``."""
        return schedule(self.epochs, self.method.passes, self.method.warm, self.budget, self.warmup_epochs, before)
