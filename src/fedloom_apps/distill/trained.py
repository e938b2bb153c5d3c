"""The student of a finished run, ready for use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fedloom.core.errors import CheckpointError, in_one_line
from fedloom.core.targets import CLASSES
from fedloom.experiment.atomic import read_model_file
from fedloom.experiment.conventions import table_of
from fedloom.experiment.experiment import Evaluation, Measurement
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.setup import load_teacher
from fedloom.experiment.trained import DeployedModel, RunRecords
from fedloom_apps.distill.config import DISTILL, PENDING, build, build_teacher
from fedloom_apps.distill.experiment import DistillExperiment
from fedloom_apps.distill.learner import make_learner, make_student


class TrainedStudent(RunRecords):
    """The student trained by a run of ``fedloom distill``; ``fedloom_apps.distill.load`` reads it from a run directory.

    Attributes:
        model: the deployed student of the selected round, with the head of its teacher if the method reuses it; it
            predicts, is evaluated and exported like the models of federated runs.
    """

    def __init__(
        self, model: DeployedModel, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], path: Path
    ) -> None:
        super().__init__(history, summary, path)
        self.model = model

    def __repr__(self) -> str:
        return f"<TrainedStudent of {self.summary.get('method')!r}: {len(self.records)} rounds>"


def student_of(
    experiment: DistillExperiment, directory: RunDirectory, teacher: Callable[[], nn.Module] | None = None
) -> TrainedStudent:
    """Load the student in a run directory; nothing is written.

    Args:
        experiment: the experiment of the run.
        directory: the run directory.
        teacher: makes a network of the teacher's architecture, unless the teacher is a run directory.

    Raises:
        CheckpointError: if the run has not ended, or its model cannot be read.
    """
    path, dtype = directory.path, getattr(torch, experiment.dtype)
    if not directory.status.ended:
        raise CheckpointError(f"{path} has not ended, and its student is written at the end; continue it first.")
    method, arrays = experiment.method, experiment.data.placed(dtype, "cpu").train.first
    taught: nn.Module | None = None
    if method.needs_teacher and teacher is not None:
        taught = teacher().to(dtype)
    elif method.needs_teacher and experiment.teacher is not None:
        taught = load_teacher(experiment.teacher, experiment.data.federation(), dtype, "cpu")
    learner, _ = make_learner(
        method,
        make_student(experiment.model, experiment.seed, dtype),
        taught,
        tuple(arrays.x.shape[1:]),
        experiment.training,
        experiment.seed,
        dtype,
    )
    try:
        learner.deploy(read_model_file(path / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} holds no student that fits its settings ({in_one_line(error, 150)}).") from error
    module = learner if learner.reuse is not None else learner.student
    measurement = Measurement(Evaluation(), CLASSES)
    model = DeployedModel(module.eval(), arrays, measurement, table=table_of(experiment.data.about))
    return TrainedStudent(model, directory.metrics(), directory.summary(), path)


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
    return student_of(experiment, directory, teacher)
