"""An experiment: a method, a student, a teacher, data, and the conditions of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.data.augment import Augmentation, pipeline
from fedloom.tasks.distill.data import Splits
from fedloom.tasks.distill.method import Distiller
from fedloom.tasks.distill.teacher_cache import MODES
from fedloom.tasks.distill.training import PassSchedule, SGDConfig, schedule


@dataclass(frozen=True)
class DistillExperiment:
    """Two equal experiments give the same bits on one machine.

    Args:
        method: the composition.
        data: what is learned from, chosen on and reported.
        model: makes a freshly initialised student; called once, under a seed that depends on ``seed`` alone.
        teacher: a trained model, or the run directory of one; not needed by ``ce``.
        epochs: E: all the student's passes over the data (``budget=passes``), or the method's rounds.
        budget: ``passes``, equal student passes for every method, or ``published``.
        warmup_epochs: passes of the warm start, for methods that have one; by default E/4, or E as published.
        start: the run directory of a student trained by ``ce``, instead of a warm start; its passes count.
        training: the optimiser.
        augment: random changes of the images of every mini-batch, the same for student and teacher.
        every: student passes between two evaluations; the last round is always evaluated.
        cache: where the teacher's answers are kept: ``auto``, ``memory``, ``disk`` or ``none``.
        seed: of everything that is random.
        dtype: ``float32`` or ``float64``.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``.
        config: the settings as a person gave them, kept in the run directory.

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
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"unknown dtype {self.dtype!r}; {nearest(self.dtype, ('float32', 'float64'))}")
        if self.cache not in MODES:
            raise ConfigError(f"unknown cache {self.cache!r}; {nearest(self.cache, MODES)}")
        if self.every < 1:
            raise ConfigError(f"every is {self.every}, but at least 1 student pass lies between two evaluations.")
        if self.start is not None and not self.method.warm:
            raise ConfigError(f"method {self.method.name!r} starts from scratch, so it cannot begin with start=.")
        self.schedule(0 if self.start is not None else None)
        if self.augment:
            pipeline(self.augment, self.data.train)

    def schedule(self, before: int | None = None) -> PassSchedule:
        """The rounds of the run; ``before`` are the passes of the student in ``start``."""
        return schedule(self.epochs, self.method.passes, self.method.warm, self.budget, self.warmup_epochs, before)
