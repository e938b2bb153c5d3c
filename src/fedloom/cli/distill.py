"""``fedloom distill``: a teacher, a student, and what the one learns from the other."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli.places import dated, free
from fedloom.cli.places import summary as read_summary
from fedloom.cli.train import Stopped
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.distill.config import PENDING, Config, build, build_teacher, complete, resolve, splits
from fedloom.distill.data import Splits
from fedloom.distill.picture import picture
from fedloom.distill.trainer import run
from fedloom.run.checkpoint import write_whole
from fedloom.run.config.files import split_words
from fedloom.run.console import (
    ABSENT,
    Quiet,
    count,
    duration,
    make_console,
    make_progress,
    number,
    short,
    show_warnings,
)
from fedloom.run.directory import RunDirectory
from fedloom.run.machine import pick_device
from fedloom.run.teacher import load_teacher

PLAN, TEACHER = "distill.yaml", "teacher"
ANSWERS = "answers"


@dataclass(frozen=True)
class Job:
    """One run to do."""

    config: Config
    directory: Path
    label: str


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
        for job in jobs:
            console.print(OmegaConf.to_yaml(OmegaConf.create(job.config.values)), markup=False, soft_wrap=True, end="")
        return 0
    with make_progress(console, arguments.quiet) as progress:
        work(parent, jobs, progress)
    show(console, parent, jobs)
    return 0


def planned(words: Sequence[str], base: Path | None, multirun: bool) -> tuple[Path, list[Job]]:
    """What is to be run, and the folder that holds it: the run directory itself where there is one run."""
    resume = next((Path(word.partition("=")[2]) for word in words if word.startswith("resume=")), None)
    if resume is not None and (resume / PLAN).is_file():
        if len(words) > 1 or base is not None:
            raise ConfigError(f"{str(resume)!r} holds several runs, which go on as they are; leave out other settings.")
        return resume, _read_plan(resume)
    configs = resolve(words, base, multirun)
    if configs[0].resume is not None:
        return configs[0].resume, [Job(configs[0], configs[0].resume, configs[0].method)]
    if len(configs) == 1:
        config = configs[0]
        directory = free(config.out) if config.out else dated(f"{config.method}-{config['seed']}")
        return directory, [Job(config, directory, config.method)]
    methods = list(dict.fromkeys(config.method for config in configs))
    name = "-".join(methods) if len(methods) <= 3 else "distill"
    parent = free(configs[0].out) if configs[0].out else dated(name)
    return parent, [Job(c, parent / n, label) for c, (n, label) in zip(configs, _names(configs), strict=True)]


def _names(configs: Sequence[Config]) -> list[tuple[str, str]]:
    """A folder name and a label for each run of several."""
    found: list[tuple[str, str]] = []
    for config in configs:
        others = [f"{k.rpartition('.')[2]}={v}" for k, v in config.swept.items() if k not in ("method", "seed")]
        folder = re.sub(r"[^\w.=+,-]+", "_", "-".join([config.method, *others, str(config["seed"])]))
        seeds = len({one["seed"] for one in configs}) > 1
        found.append((folder, ", ".join([config.method, *others, *([f"seed {config['seed']}"] if seeds else [])])))
    seen: Counter[str] = Counter()
    unique = []
    for folder, label in found:
        seen[folder] += 1
        unique.append((folder if seen[folder] == 1 else f"{folder}-{seen[folder]}", label))
    return unique


def _read_plan(parent: Path) -> list[Job]:
    plan = OmegaConf.to_container(OmegaConf.load(parent / PLAN))
    if not isinstance(plan, dict):
        raise CheckpointError(f"{parent / PLAN} does not list any runs.")
    kept = [(str(name), about) for name, about in plan.items()]
    return [
        Job(Config(complete({k: v for k, v in a["config"].items() if k != "command"}, {})), parent / n, a["label"])
        for n, a in kept
    ]


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


def work(parent: Path, jobs: Sequence[Job], progress: Quiet) -> None:
    """Train what is missing: the teacher, then every student.

    Raises:
        KeyboardInterrupt: after saying how to go on.
    """
    data = [_checked(job) for job in jobs]
    several = len(jobs) > 1
    if several and not (parent / PLAN).exists():
        plan = {job.directory.name: {"label": job.label, "config": job.config.values} for job in jobs}
        try:
            parent.mkdir(parents=True, exist_ok=True)
            write_whole(parent / PLAN, OmegaConf.to_yaml(OmegaConf.create(plan)).encode())
        except OSError as error:
            raise CheckpointError(f"the folder {parent} cannot be written: {error.strerror}.") from error
    try:
        for job, here in zip(jobs, data, strict=True):
            if read_summary(job.directory).get("status") == "finished":
                continue
            experiment = build(job.config, data=here)
            if experiment.teacher == PENDING:
                wanted = experiment.method.taught or several
                place = _teachers_place(parent, job, jobs)
                experiment = replace(
                    experiment, teacher=_teacher(job.config, here, place, progress) if wanted else None
                )
            progress.label = job.label
            run(experiment, job.directory, resume=True, progress=progress, cache=parent / ANSWERS)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; go on with: fedloom distill resume={short(parent)}") from None


def _teachers_place(parent: Path, job: Job, jobs: Sequence[Job]) -> Path:
    """Where the teacher of a job is trained: jobs with the same teacher share it."""
    keys = ("teacher", "teaching", "teaching_epochs", "data", "samples", "validation", "split_seed", "augment")

    def said(config: Config) -> str:
        return json.dumps([config[key] for key in keys], sort_keys=True)

    different = list(dict.fromkeys(said(one.config) for one in jobs))
    number = different.index(said(job.config))
    return parent / (TEACHER if number == 0 else f"{TEACHER}-{number + 1}")


def _teacher(config: Config, data: Splits, place: Path, progress: Quiet) -> Path:
    """The run directory of a teacher that is trained on the spot, if it is not yet."""
    if read_summary(place).get("status") != "finished":
        experiment = build_teacher(config, data)
        assert experiment is not None
        progress.label = "teacher"
        run(experiment, place, resume=True, progress=progress)
    return place


def show(console: Console, parent: Path, jobs: Sequence[Job]) -> None:
    """The results, a picture, and where everything is."""
    rows = [(job.label, read_summary(job.directory), job.directory) for job in jobs]
    rows = [row for row in rows if row[1]]
    console.print()
    console.print(table([(label, summary) for label, summary, _ in rows]))
    for text in remarks([summary for _, summary, _ in rows]):
        console.print(text, markup=False, soft_wrap=True)
    console.print()
    made = picture([(label, directory) for label, _, directory in rows], parent / "figures" / "distill.png")
    several = len(jobs) > 1
    console.print(f"run director{'ies' if several else 'y'}: {short(parent)}", markup=False, soft_wrap=True)
    console.print(f"picture: {short(made)}", markup=False, soft_wrap=True)


def table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Methods with their students' accuracy, passes and size beside the teacher's."""
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    shown.add_column("method", overflow="fold")
    heads = ("accuracy", "best on test", "passes", "guide's", "parameters", "MACs", "smaller by", "time")
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
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
