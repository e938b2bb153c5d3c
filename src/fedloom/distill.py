"""Students of finished runs of ``fedloom distill``, ready for use.

>>> import fedloom as fl
>>> fl.distill.load("runs/no-such-run")
Traceback (most recent call last):
...
fedloom.core.errors.CheckpointError: ...
"""

from __future__ import annotations

from pathlib import Path

from fedloom.config.distill import DISTILL, PENDING, build, build_teacher
from fedloom.tasks.distill import trained
from fedloom.tasks.distill.trained import TrainedStudent

__all__ = ["TrainedStudent", "load"]


def load(path: Path | str) -> TrainedStudent:
    """The student of a finished run: ``load(path).model`` predicts, is evaluated and exported.

    Raises:
        ConfigError: if it is another kind of run, or one started from Python, which does not record its model.
        CheckpointError: if it is not a run directory or has not ended, or its model cannot be read.
        DataError: if the run's data are not on this machine.
    """
    directory, config = DISTILL.of_run(path, "its student is the model that the run returned")
    experiment = build(config)
    teacher = build_teacher(config).model if experiment.teacher == PENDING else None
    return trained.load(experiment, directory, teacher)
