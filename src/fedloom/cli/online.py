"""``fedloom online``: learners on a stream of tasks, each predicted before it is learnt."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli import run_paths as places
from fedloom.cli.run_paths import Job
from fedloom.cli.run_paths import summary as read_summary
from fedloom.cli.train import Stopped, show_configs, show_places
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.config.files import split_words
from fedloom.experiment.console import (
    ABSENT,
    duration,
    figures,
    make_console,
    notes,
    number,
    relpath,
    show_warnings,
)
from fedloom.experiment.progress import LineProgress, NullProgress, make_progress
from fedloom.experiment.rundir import RunDirectory
from fedloom.tasks.online.config import Config, build, complete, resolve
from fedloom.tasks.online.experiment import Online
from fedloom.tasks.online.pictures import picture
from fedloom.tasks.online.task import run

PLAN = "online.yaml"


def command(arguments: argparse.Namespace) -> int:
    """Do what ``fedloom online`` was asked for."""
    console = make_console()
    if not arguments.quiet:
        show_warnings(console)
    base, words = split_words(arguments.words)
    parent, jobs = planned(words, base)
    online = [build(job.config) for job in jobs]  # whatever is impossible is said before anything trains
    for one in online:
        one.bank()
    if arguments.dry_run:
        show_configs(console, jobs)
        return 0
    with make_progress(console, arguments.quiet) as progress:
        work(parent, jobs, online, progress)
    show(console, parent, jobs)
    return 0


def planned(words: Sequence[str], base: Path | None) -> tuple[Path, list[Job]]:
    """What is to be run, and the folder that holds it: the run directory itself where there is one run."""
    if (parent := places.begun(words, base, PLAN)) is not None:
        return parent, places.read_plan(parent, PLAN, complete)
    configs = resolve(words, base)
    if len(configs) == 1:
        job = places.single(configs[0], configs[0]["learner.name"])
        return job.directory, [job]
    return places.together(configs, "online", ((name, name) for name in _names(configs)))


def _names(configs: Sequence[Config]) -> list[str]:
    """A name for each run of several: learner, seed where there are several, a number where that is not enough."""
    seeds = len({config["seed"] for config in configs}) > 1
    found: list[str] = []
    for config in configs:
        name = re.sub(r"[^\w.-]+", "_", config["learner.name"] + (f"-{config['seed']}" if seeds else ""))
        again = sum(other == name or other.startswith(f"{name}#") for other in found)
        found.append(f"{name}#{again + 1}" if again else name)
    return found


class EveryNth(Callback):
    """Passes on one record in so many, besides the last one: where every record is a line, a stream is long."""

    def __init__(self, inner: NullProgress) -> None:
        self.inner, self.on_finish = inner, inner.on_finish
        self.total, self.every = 0, 1

    def on_start(self, run: RunInfo) -> None:
        """Show twenty lines a run."""
        self.total = run.rounds
        self.every = max(1, run.rounds // 20) if isinstance(self.inner, LineProgress) else 1
        self.inner.on_start(run)

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] % self.every == 0 or record["round"] == self.total:
            self.inner.on_round(record)


def work(parent: Path, jobs: Sequence[Job], online: Sequence[Online], progress: NullProgress) -> None:
    """Run what is missing.

    Raises:
        KeyboardInterrupt: after saying how to go on.
    """
    if len(jobs) > 1:
        places.write_plan(parent, jobs, PLAN)
    try:
        for job, one in zip(jobs, online, strict=True):
            progress.label = job.label
            every = job.config["checkpoint"]
            run(
                one,
                job.directory,
                resume=job.resume,
                checkpoint_every=every["every"],
                keep=every["keep"],
                callbacks=[EveryNth(progress)],
            )
    except KeyboardInterrupt:
        if not any(RunDirectory(job.directory).begun for job in jobs):
            raise Stopped("stopped before learning began.") from None
        raise Stopped(f"stopped; go on with: fedloom online resume={relpath(parent)}") from None


def show(console: Console, parent: Path, jobs: Sequence[Job]) -> None:
    """The results, a picture, and where everything is."""
    found = [(job, read_summary(job.directory)) for job in jobs]
    console.print()
    console.print(table([(job.label, summary) for job, summary in found]))
    notes(console, (summary for _, summary in found))
    made = picture([(job.label, job.directory) for job in jobs], parent / "figures" / "online.png")
    show_places(console, parent, jobs, made)


def table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Learners with their accuracies, what they keep and the expert that Hedge trusts most."""
    shown = figures("learner", ("CTM", "LTM", "task data kept", "tasks", "time"))
    hedged = any(len(summary["hedge"]["p"]) > 1 for _, summary in rows)
    if hedged:
        shown.add_column("best expert", overflow="fold")
    for label, summary in rows:
        long, several = summary.get("ltm") or {}, len(summary["hedge"]["p"]) > 1
        shown.add_row(
            Text(label),
            number("accuracy", summary["ctm"]["accuracy"]),
            number("accuracy", long.get("accuracy")),
            f"{summary['memory']['task_bytes'] / 1e6:.2f} MB",
            str(summary["rounds"]),
            duration(summary["seconds"]),
            *([Text(summary["hedge"]["best"] if several else ABSENT)] if hedged else []),
        )
    return shown
