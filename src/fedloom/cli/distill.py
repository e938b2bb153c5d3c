"""``fedloom distill``: a teacher, a student, and what the one learns from the other."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli import run_paths as places
from fedloom.cli.run_paths import Job
from fedloom.cli.run_paths import summary as read_summary
from fedloom.cli.train import Stopped, show_configs, show_places
from fedloom.experiment.config.files import split_words
from fedloom.experiment.console import (
    ABSENT,
    count,
    duration,
    figures,
    make_console,
    number,
    print_raw,
    relpath,
    show_warnings,
)
from fedloom.experiment.progress import NullProgress, make_progress
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.runtime import pick_device
from fedloom.experiment.teacher import load_teacher
from fedloom.tasks.distill.config import PENDING, Config, build, build_teacher, complete, resolve, splits
from fedloom.tasks.distill.data import Splits
from fedloom.tasks.distill.picture import picture
from fedloom.tasks.distill.task import run

PLAN, TEACHER = "distill.yaml", "teacher"
ANSWERS = "answers"


def command(arguments: argparse.Namespace) -> int:
    """Do what ``fedloom distill`` was asked for."""
    console = make_console()
    if not arguments.quiet:
        show_warnings(console)
    base, words = split_words(arguments.words)
    parent, jobs = planned(words, base, arguments.multirun)
    if arguments.dry_run:
        for job in jobs:
            _checked(job)
        show_configs(console, jobs)
        return 0
    with make_progress(console, arguments.quiet) as progress:
        work(parent, jobs, progress)
    show(console, parent, jobs)
    return 0


def planned(words: Sequence[str], base: Path | None, multirun: bool) -> tuple[Path, list[Job]]:
    """What is to be run, and the folder that holds it: the run directory itself where there is one run."""
    if (parent := places.begun(words, base, PLAN)) is not None:
        return parent, places.read_plan(parent, PLAN, complete)
    configs = resolve(words, base, multirun)
    if len(configs) == 1:
        job = places.single(configs[0], configs[0]["method.name"])
        return job.directory, [job]
    methods = list(dict.fromkeys(config["method.name"] for config in configs))
    return places.together(configs, "-".join(methods) if len(methods) <= 3 else "distill", _names(configs))


def _names(configs: Sequence[Config]) -> list[tuple[str, str]]:
    """A folder name and a label for each run of several."""
    seeds = len({config["seed"] for config in configs}) > 1
    seen: Counter[str] = Counter()
    found = []
    for config in configs:
        method, seed = config["method.name"], config["seed"]
        others = [f"{k.rpartition('.')[2]}={v}" for k, v in config.swept.items() if k not in ("method", "seed")]
        folder = re.sub(r"[^\w.=+,-]+", "_", "-".join([method, *others, str(seed)]))
        seen[folder] += 1
        label = ", ".join([method, *others, *([f"seed {seed}"] if seeds else [])])
        found.append((folder if seen[folder] == 1 else f"{folder}-{seen[folder]}", label))
    return found


def _checked(job: Job) -> Splits:
    """The data of a job, which with its settings is refused here if it is impossible."""
    data = splits(job.config)
    experiment = build(job.config, data=data)
    build_teacher(job.config, data)
    pick_device(experiment.device)
    if experiment.teacher is not None and experiment.teacher != PENDING:
        load_teacher(experiment.teacher, data.federation(), torch.float32, "cpu")
    if experiment.start is not None:
        RunDirectory(experiment.start).config()
    return data


def work(parent: Path, jobs: Sequence[Job], progress: NullProgress) -> None:
    """Train what is missing: the teacher, then every student.

    Raises:
        KeyboardInterrupt: after saying how to go on.
    """
    data = [_checked(job) for job in jobs]
    several = len(jobs) > 1
    if several:
        places.write_plan(parent, jobs, PLAN)
    try:
        for job, here in zip(jobs, data, strict=True):
            if RunDirectory(job.directory).status.ended:
                continue
            experiment = build(job.config, data=here)
            if experiment.teacher == PENDING:
                wanted = experiment.method.needs_teacher or several
                place = _teachers_place(parent, job, jobs)
                experiment = replace(
                    experiment, teacher=_teacher(job.config, here, place, progress) if wanted else None
                )
            progress.label = job.label
            run(experiment, job.directory, resume=True, callbacks=[progress], cache=parent / ANSWERS)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; go on with: fedloom distill resume={relpath(parent)}") from None


def _teachers_place(parent: Path, job: Job, jobs: Sequence[Job]) -> Path:
    """Where the teacher of a job is trained: jobs with the same teacher share it."""
    keys = ("teacher", "teacher_training", "teacher_epochs", "data", "samples", "validation", "split_seed", "augment")

    def said(config: Config) -> str:
        return json.dumps([config[key] for key in keys], sort_keys=True)

    different = list(dict.fromkeys(said(one.config) for one in jobs))
    number = different.index(said(job.config))
    return parent / (TEACHER if number == 0 else f"{TEACHER}-{number + 1}")


def _teacher(config: Config, data: Splits, place: Path, progress: NullProgress) -> Path:
    """The run directory of a teacher that is trained on the spot, if it is not yet."""
    if not RunDirectory(place).status.ended:
        experiment = build_teacher(config, data)
        assert experiment is not None
        progress.label = "teacher"
        run(experiment, place, resume=True, callbacks=[progress])
    return place


def show(console: Console, parent: Path, jobs: Sequence[Job]) -> None:
    """The results, a picture, and where everything is."""
    rows = [(job.label, read_summary(job.directory), job.directory) for job in jobs]
    rows = [row for row in rows if row[1]]
    console.print()
    console.print(table([(label, summary) for label, summary, _ in rows]))
    for text in remarks([summary for _, summary, _ in rows]):
        print_raw(console, text)
    console.print()
    made = picture([(label, directory) for label, _, directory in rows], parent / "figures" / "distill.png")
    show_places(console, parent, jobs, made)


def table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Methods with their students' accuracy, passes and size beside the teacher's."""
    heads = ("accuracy", "best on test", "passes", "guide's", "parameters", "MACs", "smaller by", "time")
    shown = figures("method", heads)
    taught = next((summary["teacher"] for _, summary in rows if summary.get("teacher")), None)
    if taught:
        cells = (number("accuracy", taught["accuracy"]), ABSENT, ABSENT, ABSENT, count(taught["parameters"]))
        shown.add_row(Text("teacher"), *cells, count(taught["macs"]), ABSENT, ABSENT)
    for label, summary in rows:
        student, ratio = summary.get("student") or {}, summary.get("ratio") or {}
        smaller = f"{ratio['parameters']:g}x, {ratio['macs']:g}x" if ratio else ABSENT
        shown.add_row(
            Text(label),
            number("accuracy", (summary.get("selected") or {}).get("accuracy")),
            number("accuracy", (summary.get("as_published") or {}).get("accuracy")),
            str(summary.get("passes", ABSENT)),
            str(summary.get("forwards") or ABSENT),
            count(student.get("parameters")),
            count(student.get("macs")),
            smaller,
            duration(summary.get("seconds")),
        )
    return shown


def remarks(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the columns mean where it is not plain."""
    chosen = "on validation samples" if any("best" in summary for summary in summaries) else "as the last one"
    said = [
        f"accuracy: of the model chosen {chosen}; best on test: chosen on the test samples, as published tables do."
    ]
    if any(summary.get("protocol") == "published" for summary in summaries):
        said.append("budget=published: methods differ in student passes; budget=passes gives all the same number.")
    if any(summary.get("forwards") for summary in summaries):
        said.append("guide's: the student's forward passes for the guide, besides its passes.")
    return said
