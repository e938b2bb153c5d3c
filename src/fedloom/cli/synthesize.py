"""``fedloom synthesize``: run a method that generates data, judge what it makes, and write it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli import run_paths as places
from fedloom.cli.run_paths import Job
from fedloom.cli.train import Stopped, carry_out, goes_on
from fedloom.core.errors import ClientError, ConfigError
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.config import build, build_checkpoints, build_trackers, resolve, sweep
from fedloom.experiment.config.files import split_words
from fedloom.experiment.config.making import made
from fedloom.experiment.config.overrides import parse
from fedloom.experiment.config.resolve import run_directory
from fedloom.experiment.config.schema import signature
from fedloom.experiment.config.tree import read
from fedloom.experiment.config.values import settings
from fedloom.experiment.console import (
    ABSENT,
    count,
    duration,
    figures,
    notes,
    print_raw,
    relpath,
)
from fedloom.experiment.progress import NullProgress
from fedloom.experiment.report import build as build_report
from fedloom.tasks.synthesis.judge import CACHE, EvalConfig
from fedloom.tasks.synthesis.run import synthesize

DEFAULT = "method=fedevg"
PREFIX = "judge."


def command(arguments: argparse.Namespace) -> int:
    """Do what ``fedloom synthesize`` was asked for."""
    return carry_out(arguments, planned, check, work, show)


def planned(arguments: argparse.Namespace) -> tuple[Path | None, list[Job]]:
    """What is to be run, and the folder that holds it all if there are several."""
    base, words = split_words(arguments.words)
    judging = judge_settings([word for word in words if word.startswith(PREFIX)])
    overrides = [word for word in words if not word.startswith(PREFIX)]
    resume = next((Path(word.partition("=")[2]) for word in overrides if word.startswith("resume=")), None)
    if resume is not None:
        if len(words) > len(overrides):
            raise ConfigError(f"resume= continues a run with the judge that it has; leave out {PREFIX}….")
        if (parent := places.begun(overrides, base)) is not None:
            return parent, places.read_plan(parent)
        judging = kept_settings(run_directory(resume))
    named = any(word.partition("=")[0] in ("method", "method.name") for word in overrides)
    if resume is None and not named and (base is None or "method" not in read(base)):
        overrides = [DEFAULT, *overrides]
    configs = sweep(overrides, base) if arguments.multirun else [resolve(overrides, base)]
    configs = [replace(config, values={**config.values, "judge": judging}) for config in configs]
    if len(configs) == 1:
        return None, [places.single(configs[0])]
    return places.several(configs)


def judge_settings(words: Sequence[str]) -> dict[str, Any]:
    """All settings of the judge as plain data, with those given as ``judge.every=10``.

    >>> judge_settings(["judge.every=10"])["every"]
    10

    Raises:
        ConfigError: for unknown ones, wrong types, or several values.
    """
    given: dict[str, Any] = {}
    for word in words:
        one = parse(word)
        if one.is_sweep or len(one.path) != 2:
            raise ConfigError(f"{word!r} is no setting of the judge; write it as {PREFIX}every=10.")
        given[one.path[1]] = one.values[0]
    found = settings("the judge", PREFIX, EvalConfig, signature(EvalConfig), given)
    judged(found)
    return found


def judged(found: Mapping[str, Any]) -> EvalConfig:
    """The settings as a record."""
    return made(EvalConfig, found)


def kept_settings(directory: Path) -> dict[str, Any]:
    """The judge's settings of a stored run."""
    path = directory / "config.yaml"
    stored = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    found = stored.get("judge") if isinstance(stored, dict) else None
    if path.is_file() and not isinstance(found, dict):
        raise ConfigError(f"{str(directory)!r} was not begun by fedloom synthesize; continue it with fedloom run.")
    return settings("the judge", PREFIX, EvalConfig, signature(EvalConfig), found or {})


def check(job: Job) -> None:
    """Refuse what is impossible, before anything trains."""
    build(job.config)
    judged(job.config["judge"])


def work(jobs: Sequence[Job], parent: Path | None, progress: NullProgress) -> list[tuple[str, ClientError]]:
    """Run all jobs, one after the other; those of a sweep that diverged are returned."""
    failed: list[tuple[str, ClientError]] = []
    if parent is not None:
        places.write_plan(parent, jobs)
    for job in jobs:
        if parent is not None and job.is_done and (job.directory / "synthetic.json").is_file():
            continue
        progress.label = job.label if parent is None else job.title
        try:
            experiment, checkpoints = build(job.config), build_checkpoints(job.config)
            synthesize(
                experiment,
                job.directory,
                judged(job.config["judge"]),
                cache=None if parent is None else parent / CACHE,
                resume=job.resume,
                checkpoint_every=checkpoints.every,
                keep=checkpoints.keep,
                callbacks=[SyntheticHeadline(progress), *build_trackers(job.config)],
            )
        except ClientError as error:
            if parent is None:
                raise
            failed.append((job.label, error))
        except KeyboardInterrupt:
            said = goes_on(job, parent).replace("fedloom run resume", "fedloom synthesize resume")
            raise Stopped(said) from None
    return failed


class SyntheticHeadline(Callback):
    """Shows the accuracy of what a classifier learnt from the set where a run shows that of its model."""

    def __init__(self, progress: NullProgress) -> None:
        self.on_start, self.on_finish, self.progress = progress.on_start, progress.on_finish, progress

    def on_round(self, record: Mapping[str, Any]) -> None:
        said = record.get("synthetic/accuracy")
        self.progress.on_round(record if said is None else {**record, "global/accuracy": said})


def show(console: Console, jobs: Sequence[Job], parent: Path | None) -> None:
    """The results, and where everything is."""
    rows = [(job, places.summary(job.directory)) for job in jobs]
    rows = [(job, summary) for job, summary in rows if summary]
    console.print()
    console.print(table([(job.label if parent is None else job.title, summary) for job, summary in rows]))
    notes(console, (summary for _, summary in rows))
    where = parent or jobs[0].directory
    page = build_report([job.directory for job, _ in rows], where) if rows else None
    for job, _ in rows:
        print_raw(console, f"set:     {relpath(job.directory / 'synthetic.npz')}")
        print_raw(console, f"picture: {relpath(job.directory / 'figures' / 'synthetic.png')}")
    if page is not None:
        print_raw(console, f"page:    {relpath(page)}")


SHOWN = {
    "accuracy": "synthetic/accuracy",
    "clients": "synthetic/clients/accuracy/mean",
    "recognised": "synthetic/recognised",
    "FID": "synthetic/fid",
    "diversity": "synthetic/diversity",
    "coverage": "synthetic/coverage",
    "copies": "synthetic/copies",
}
SHARES = ("accuracy", "clients", "recognised", "coverage", "copies")


def table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """What the judge found of each run: a classifier trained on the set, and the set beside real data."""
    made = figures("method", (*SHOWN, "sent", "time"))
    for label, summary in rows:
        final = summary.get("final") or {}
        cells = [_cell(head, final.get(key)) for head, key in SHOWN.items()]
        made.add_row(Text(label), *cells, count(final.get("comm/params")), duration(summary.get("seconds")))
    return made


def _cell(head: str, value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{100 * value:.1f} %" if head in SHARES else f"{value:.3g}"
