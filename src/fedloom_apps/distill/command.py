"""``fedloom distill``: train a student with a teacher, which is trained first if needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.cli.command import Command, Job, Rows, RunPlan
from fedloom.config.keys import run_settings
from fedloom.config.schema import Config
from fedloom.core.errors import CheckpointError
from fedloom.experiment.callbacks import NullProgress
from fedloom.experiment.console import ABSENT, count, duration, number, numeric_table
from fedloom.experiment.rundir import RunDirectory
from fedloom_apps.distill.config import DISTILL, PENDING, build, build_teacher
from fedloom_apps.distill.experiment import DistillExperiment
from fedloom_apps.distill.task import Distilled, run

TEACHER = ("teacher", "teacher_training", "teacher_epochs", "data", "samples", "validation", "split_seed", "augment")
"""Keys that determine a teacher that is trained first."""


def train(experiment: DistillExperiment, job: Job, batch: RunPlan, *, callbacks: list[Any], **settings: Any) -> None:
    """Train a student, and before it its teacher if that is still to be trained."""
    if experiment.teacher == PENDING:
        wanted = batch.is_sweep or experiment.method.needs_teacher
        experiment = replace(experiment, teacher=_teacher(job, batch, callbacks[0]) if wanted else None)
    settings["resume"] = settings["resume"] or True  # or starts in the folder of the teacher
    result = run(experiment, job.directory, callbacks=callbacks, cache=batch.parent / "answers", **settings)
    _check_written(job.directory, result, batch)


def _teacher(job: Job, batch: RunPlan, progress: NullProgress) -> Path:
    """The run directory of a job's teacher, which is trained if necessary; jobs with equal settings share it."""

    def described(config: Config) -> str:
        return json.dumps([config[key] for key in TEACHER], sort_keys=True)

    different = list(dict.fromkeys(described(job.config) for job in batch.jobs))
    number = different.index(described(job.config))
    place = batch.parent / ("teacher" if number == 0 else f"teacher-{number + 1}")
    if not RunDirectory(place).status.ended:
        label, progress.label = progress.label, "teacher"
        trackers = run_settings(job.config)["callbacks"]
        result = run(build_teacher(job.config), place, resume=True, callbacks=[progress, *trackers])
        progress.label = label
        _check_written(place, result, batch)
    return place


def _check_written(directory: Path, result: Distilled, batch: RunPlan) -> None:
    """Raise ``CheckpointError`` if the last files of a run are not there, for which a full disk had no room."""
    if not RunDirectory(directory).status.ended:
        why = " ".join(result.summary["warnings"][-1:]).rstrip(".") or "its summary.json is missing"
        raise CheckpointError(
            f"the run {directory} is not complete: {why}; make room and continue with resume={batch.parent}."
        )


def table(rows: Rows) -> Table:
    """A table of methods: accuracy, passes and size of the students and of the teacher."""
    heads = ("accuracy", "best on test", "passes", "for guide", "parameters", "MACs", "smaller by", "time")
    shown = numeric_table("method", heads)
    columns: dict[str, tuple[str, Any]] = {}
    for label, summary in rows:
        if summary.get("teacher"):
            columns.setdefault(str(summary["teacher"]), (label, summary["teacher"]))
    for label, taught in columns.values():
        cells = (number("accuracy", taught["accuracy"]), ABSENT, ABSENT, ABSENT, count(taught["parameters"]))
        shown.add_row(
            Text("teacher" if len(columns) == 1 else f"teacher of {label}"),
            *cells,
            count(taught["macs"]),
            ABSENT,
            ABSENT,
        )
    for label, summary in rows:
        student, ratio = summary.get("student") or {}, summary.get("ratio") or {}
        shown.add_row(
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
    return shown


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
