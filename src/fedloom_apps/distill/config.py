"""The configuration of ``fedloom distill``, and the student of a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from torch import nn

from fedloom.base.errors import CheckpointError, ConfigError, in_one_line, nearest
from fedloom.base.ranges import NonNegativeInt
from fedloom.cli.command import Command, Job, Rows, RunPlan
from fedloom.config.keys import COMMON, DATA, MODEL, Shared, model_factory, run_settings
from fedloom.config.schema import CommandSchema, Config
from fedloom.config.sections import Choice, Record, Tree, arguments, sections_of
from fedloom.core.targets import CLASSES
from fedloom.data.sources import Source
from fedloom.data.sources.arrays import as_bytes
from fedloom.experiment.atomic import read_model_file, refuse_link
from fedloom.experiment.callbacks import NullProgress
from fedloom.experiment.console import ABSENT, count, duration, number, numeric_table
from fedloom.experiment.conventions import table_of
from fedloom.experiment.deployed import DeployedModel
from fedloom.experiment.evaluation import Evaluation, Measurement
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.runtime import pick_device
from fedloom.experiment.setup import initial_model
from fedloom.experiment.teacher import load_teacher
from fedloom.experiment.trained import RunRecords
from fedloom.models import models
from fedloom_apps.distill.data import Splits
from fedloom_apps.distill.experiment import DistillExperiment, SGDConfig
from fedloom_apps.distill.learner import StudentModule, make_learner
from fedloom_apps.distill.method import distillers
from fedloom_apps.distill.methods import ce
from fedloom_apps.distill.task import Distilled, load_start, run

PENDING = Path("still to be trained")
"""Placeholder for a teacher that is not trained yet, in experiments that are only checked."""


class Teacher(Choice):
    """The name of a model to train first, or the run directory of a trained one."""

    def nest(self, key: str, rest: Sequence[str], value: Any) -> Tree:
        return super().nest(key, rest, value["run"] if isinstance(value, Mapping) and "run" in value else value)

    def validate(self, key: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        name = raw["name"]
        if name in self.registry:
            return super().validate(key, raw)
        if not Path(name).exists() and "/" not in name:
            hint = nearest(name, self.registry.names())
            raise ConfigError(f"{key} is {name!r}: neither a run directory nor a model; {hint}")
        return {"run": str(Path(name).expanduser().resolve())}


def shared_settings(teacher_epochs: NonNegativeInt = 20, split_seed: int = 0) -> None:
    """Settings of the data split and of a teacher that is trained first, which do not depend on ``seed``.

    Args:
        teacher_epochs: passes over the data of a teacher that is trained first; 0 uses its initial parameters, for
            networks that load parameters, like ``teacher=timm teacher.head=true teacher.weights=FILE``.
        split_seed: seed of the data split and of such a teacher.
    """


DISTILLER = Choice(distillers)
TRAINING = Record(SGDConfig)
CONDITIONS = sections_of(DistillExperiment, ("method", "data", "model", "teacher", "config"))
SPLITS = sections_of(Splits.of, ("source", "seed"))

DISTILL = CommandSchema(
    "distill",
    {
        "method": DISTILLER,
        "data": DATA,
        "model": MODEL,
        "teacher": Teacher(models, hidden=MODEL.hidden),
        **SPLITS,
        **sections_of(shared_settings),
        **CONDITIONS,
        "teacher_training": TRAINING,
        **COMMON,
    },
    defaults={
        "method": "disk",
        "data": "digits",
        "model": {"name": "mlp", "hidden": [4]},
        "teacher": {"name": "mlp", "hidden": [256, 256]},
        "training": {"batch_size": 50, "lr": 0.05, "clip": 10.0},
        "teacher_training": {"batch_size": 50, "lr": 0.05, "clip": 10.0},
        "checkpoint": {"every": 5},
    },
    default_sweep=lambda keys: ("method=ce,kd,disk",),
    may_change=("device", "cache", "checkpoint", "trackers"),
)


def build(config: Config, shared: Shared | None = None) -> DistillExperiment:
    """Build the experiment of a configuration, and try its networks together.

    If the teacher is to be trained first (``build_teacher``), it is ``PENDING``.
    """
    experiment, dtype = _experiment(config, shared), torch.float32
    method, data, teacher = experiment.method, experiment.data, _given_teacher(config, experiment.data)
    pick_device(experiment.device)
    if teacher == PENDING:
        network = initial_model(build_teacher(config, shared).model, config["split_seed"], dtype)
    else:
        network = load_teacher(teacher, data.federation(), dtype, "cpu")
    student = initial_model(experiment.model, experiment.seed, dtype)
    if experiment.start is not None:
        load_start(student, experiment.start, data)
    inputs, teacher_network = tuple(data.train.x.shape[1:]), network if method.needs_teacher else None
    make_learner(method, student, teacher_network, inputs, experiment.training, experiment.seed, dtype)
    return replace(experiment, teacher=teacher)


def _experiment(config: Config, shared: Shared | None = None) -> DistillExperiment:
    """The experiment of a configuration, with a teacher that is ``PENDING``."""
    values, data = config.values, _splits(config, shared)
    return DistillExperiment(
        method=DISTILLER.instantiate(values["method"]),
        data=data,
        model=model_factory(values["model"], data.train.first),
        teacher=PENDING,
        config=values,
        **arguments(DistillExperiment, CONDITIONS, values),
    )


def _given_teacher(config: Config, data: Splits) -> nn.Module | Path:
    """The teacher's run directory, or the module itself if it is not trained; ``PENDING`` if it is trained first."""
    choice = config["teacher"]
    if "run" in choice:
        return Path(choice["run"])
    if config["teacher_epochs"] != 0:
        return PENDING
    if not choice.get("pretrained") and not choice.get("weights"):
        raise ConfigError(
            f"teacher_epochs=0 takes the teacher as it starts, but {choice['name']} starts from random values; "
            "train it, with teacher_epochs=20, or give it parameters, like teacher=timm teacher.weights=FILE."
        )
    return initial_model(model_factory(choice, data.train.first), config["split_seed"], torch.float32)


def build_teacher(config: Config, shared: Shared | None = None) -> DistillExperiment:
    """Build the experiment that trains the teacher, with the settings of a run that can be continued by itself."""
    values, data = config.values, _splits(config, shared)
    try:
        return DistillExperiment(
            ce(),
            data,
            model_factory(values["teacher"], data.train.first),
            epochs=values["teacher_epochs"],
            training=TRAINING.instantiate(values["teacher_training"]),
            augment=tuple(values["augment"]),
            seed=values["split_seed"],
            dtype=values["dtype"],
            device=values["device"],
            config=teacher_settings(config),
        )
    except ConfigError as error:
        raise ConfigError(f"the teacher cannot be trained first: {error}") from error


def teacher_settings(config: Config) -> dict[str, Any]:
    """The configuration of the run that trains the teacher: all that the teacher depends on."""
    keys = ("data", "augment", "dtype", "device", "teacher_epochs", "split_seed", *SPLITS)
    return {
        **{key: config[key] for key in keys},
        "method": {"name": "ce", "warm": False},
        "model": config["teacher"],
        "epochs": config["teacher_epochs"],
        "training": config["teacher_training"],
        "seed": config["split_seed"],
    }


def _splits(config: Config, shared: Shared | None) -> Splits:
    """The data splits, from the cache if they are there; images stay bytes until a mini-batch reads them."""
    shared = shared or Shared()

    def split(settings: Mapping[str, Any]) -> Splits:
        source = shared("source", settings["data"], _read)
        return Splits.of(source, seed=settings["split_seed"], **arguments(Splits.of, SPLITS, settings))

    return shared("splits", {key: config[key] for key in ("data", "split_seed", *SPLITS)}, split)


def _read(settings: Mapping[str, Any]) -> Source:
    with as_bytes():
        return DATA.instantiate(settings)


def train(experiment: DistillExperiment, job: Job, batch: RunPlan, *, callbacks: list[Any], **settings: Any) -> None:
    """Train a student, and before it its teacher if that is still to be trained."""
    if experiment.teacher == PENDING:
        is_needed = batch.is_sweep or experiment.method.needs_teacher
        experiment = replace(experiment, teacher=_teacher(job, batch, callbacks[0]) if is_needed else None)
    settings["resume"] = settings["resume"] or True  # or starts in the folder of the teacher
    result = run(experiment, job.directory, callbacks=callbacks, cache=batch.parent / "answers", **settings)
    _check_written(job.directory, result, batch)


def _teacher(job: Job, batch: RunPlan, progress: NullProgress) -> Path:
    """The run directory of a job's teacher, which is trained if necessary; jobs with equal settings share it."""

    def settings_text(config: Config) -> str:
        return json.dumps(teacher_settings(config), sort_keys=True)

    teachers = list(dict.fromkeys(settings_text(job.config) for job in batch.jobs))
    position = teachers.index(settings_text(job.config))
    place = batch.parent / (f"teacher-{position + 1}" if position else "teacher")
    if not RunDirectory(place).status.ended:
        refuse_link(place, "a teacher's run")
        label, progress.label = progress.label, "teacher"
        trackers = run_settings(job.config)["callbacks"]
        result = run(build_teacher(job.config), place, resume=True, callbacks=[progress, *trackers])
        progress.label = label
        _check_written(place, result, batch)
    return place


def _check_written(directory: Path, result: Distilled, batch: RunPlan) -> None:
    """Raise ``CheckpointError`` if the last files of a run are not there, for which a full disk had no room."""
    if not RunDirectory(directory).status.ended:
        reason = " ".join(result.summary["warnings"][-1:]).rstrip(".") or "its summary.json is missing"
        raise CheckpointError(
            f"the run {directory} is not complete: {reason}; make room and continue with resume={batch.parent}."
        )


def table(rows: Rows) -> Table:
    """A table of methods: accuracy, passes and size of the students and of the teacher."""
    heads = ("accuracy", "best on test", "passes", "for guide", "parameters", "MACs", "smaller by", "time")
    overview = numeric_table("method", heads)
    columns: dict[str, tuple[str, Any]] = {}
    for label, summary in rows:
        if summary.get("teacher"):
            columns.setdefault(str(summary["teacher"]), (label, summary["teacher"]))
    for label, facts in columns.values():
        sizes = (count(facts[key]) for key in ("parameters", "macs"))
        cells = (number("accuracy", facts["accuracy"]), *[ABSENT] * 3, *sizes, *[ABSENT] * 2)
        overview.add_row(Text("teacher" if len(columns) == 1 else f"teacher of {label}"), *cells)
    for label, summary in rows:
        student, ratio = summary.get("student") or {}, summary.get("ratio") or {}
        overview.add_row(
            Text(label),
            number("accuracy", (summary.get("selected") or {}).get("accuracy")),
            number("accuracy", (summary.get("as_published") or {}).get("accuracy")),
            str(summary.get("passes", ABSENT)),
            str(summary.get("forwards") or ABSENT),
            count(student.get("parameters")),
            count(student.get("macs")),
            f"{ratio['parameters']:g}x, {ratio['macs']:g}x" if ratio else ABSENT,
            duration(summary.get("seconds")),
        )
    return overview


def remarks(rows: Rows) -> list[str]:
    """Explanations of the columns."""
    summaries = [summary for _, summary in rows]
    selection = (
        "selected on validation samples" if any("best" in summary for summary in summaries) else "of the last round"
    )
    lines = [f"accuracy: test accuracy of the model {selection}; best on test: of the model selected on test samples."]
    if any(summary.get("protocol") == "published" for summary in summaries):
        lines.append("budget=published: methods differ in student passes; with budget=passes these are equal.")
    if any(summary.get("forwards") for summary in summaries):
        lines.append("for guide: additional forward passes of the student for the guide.")
    return lines


command = Command(DISTILL, lambda config: config["method.name"], build, train, table, remarks=remarks, plans=True)


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


def load(path: Path | str) -> TrainedStudent:
    """The student of a finished run: ``load(path).model`` predicts, is evaluated and exported.

    The run of its teacher is needed only if the student has its teacher's head; the run of its warm start never is.

    Raises:
        ConfigError: if it is another kind of run, or one started from Python, which does not record its model.
        CheckpointError: if it is not a run directory or has not ended, or its model cannot be read.
        DataError: if the run's data are not on this machine.
    """
    directory, config = DISTILL.of_run(path, "its student is the model that the run returned")
    experiment, folder = _experiment(config), directory.path
    if not directory.status.ended:
        raise CheckpointError(f"{folder} has not ended, and its student is written at the end; continue it first.")
    method, dtype = experiment.method, getattr(torch, experiment.dtype)
    arrays = experiment.data.to_device(dtype, "cpu").train.first
    module = student = initial_model(experiment.model, experiment.seed, dtype)
    if method.reuse is not None:  # a head like the teacher's; its values are stored with the student
        teacher, inputs = _given_teacher(config, experiment.data), tuple(arrays.x.shape[1:])
        if teacher == PENDING:
            teacher = build_teacher(config).model().to(dtype)
        else:
            teacher = load_teacher(teacher, experiment.data.federation(), dtype, "cpu")
        module, _ = make_learner(method, student, teacher, inputs, experiment.training, experiment.seed, dtype)
    try:
        tensors = read_model_file(folder / "model.safetensors")
        module.deploy(tensors) if isinstance(module, StudentModule) else module.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError) as error:
        message = f"{folder} holds no student that fits its settings ({in_one_line(error, 150)})."
        raise CheckpointError(message) from error
    measurement = Measurement(Evaluation(), CLASSES)
    model = DeployedModel(module.eval(), arrays, measurement, table=table_of(experiment.data.about))
    return TrainedStudent(model, directory.metrics(), directory.summary(), folder)
