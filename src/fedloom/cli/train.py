"""``fedloom run``: one run, a sweep, or the comparison that is the default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from fedloom.cli import run_paths as places
from fedloom.cli.run_paths import Job
from fedloom.core.errors import ClientError
from fedloom.experiment.config import Config, build, build_checkpoints, build_trackers, resolve, sweep, to_yaml
from fedloom.experiment.config.files import split_words
from fedloom.experiment.config.resolve import COMPARED, names_method
from fedloom.experiment.console import (
    make_console,
    notes,
    print_raw,
    relpath,
    results,
    show_warnings,
)
from fedloom.experiment.federated import run
from fedloom.experiment.progress import NullProgress, make_progress
from fedloom.experiment.report import build as build_report
from fedloom.experiment.report import comparison_picture
from fedloom.experiment.rundir import RunDirectory

CURVES = "figures/curves.png"
MARK = "evaluation.target=0.9"
"""The stop-watch mark of the default comparison, which every method reaches on the digits."""


def command(arguments: argparse.Namespace) -> int:
    """Do what ``fedloom run`` was asked for."""
    return carry_out(arguments, planned, lambda job: build(job.config), work, show)


def carry_out(
    arguments: argparse.Namespace,
    planned: Callable[[argparse.Namespace], tuple[Path | None, list[Job]]],
    check: Callable[[Job], object],
    work: Callable[[Sequence[Job], Path | None, NullProgress], list[tuple[str, ClientError]]],
    show: Callable[[Console, Sequence[Job], Path | None], None],
) -> int:
    """Plan jobs, check them if there are several or nothing else is wanted, do them and show what came of it."""
    console = make_console()
    if not arguments.quiet:
        show_warnings(console)
    parent, jobs = planned(arguments)
    if len(jobs) > 1 or arguments.dry_run:
        for job in jobs:
            check(job)  # whatever is impossible is said before anything trains
    if arguments.dry_run:
        show_configs(console, jobs)
        return 0
    with make_progress(console, arguments.quiet) as progress:
        failed = work(jobs, parent, progress)
    show(console, jobs, parent)
    for label, error in failed:
        print(f"fedloom: {label}: {error}", file=sys.stderr)
    return 2 if failed else 0


def planned(arguments: argparse.Namespace) -> tuple[Path | None, list[Job]]:
    """What is to be run, and the folder that holds it all if there are several."""
    base, overrides = split_words(arguments.words)
    if (parent := places.begun(overrides, base)) is not None:
        return parent, places.read_plan(parent)
    if not names_method(overrides, base):
        if not base and not any(word.startswith(("data", "evaluation")) for word in overrides):
            overrides = [MARK, *overrides]
        configs = both(overrides, base, arguments.multirun)
    elif arguments.multirun:
        configs = sweep(overrides, base)
    else:
        configs = [resolve(overrides, base)]
    if len(configs) == 1:
        return None, [places.single(configs[0])]
    return places.several(configs)


def both(overrides: Sequence[str], base: Path | None, multirun: bool) -> list[Config]:
    """The methods that are compared when none is named."""
    if not multirun:
        resolve(overrides, base)  # refuses sweeps
    return sweep([f"method={','.join(COMPARED)}", *overrides], base)


def show_configs(console: Console, jobs: Sequence[Job]) -> None:
    """Print the configurations."""
    for job in jobs:
        if len(jobs) > 1:
            print_raw(console, f"# {job.directory}")
        print_raw(console, to_yaml(job.config), end="")


def work(jobs: Sequence[Job], parent: Path | None, progress: NullProgress) -> list[tuple[str, ClientError]]:
    """Run all jobs, one after the other; those of a sweep that diverged are returned.

    Raises:
        KeyboardInterrupt: after saying how to go on.
    """
    failed: list[tuple[str, ClientError]] = []
    if parent is not None:
        places.write_plan(parent, jobs)
    seeds = len({job.config["seed"] for job in jobs})
    for job in jobs:
        if parent is not None and job.is_done:
            continue
        progress.label = job.label if seeds == 1 else job.title
        try:
            experiment = build(job.config)
            checkpoints = build_checkpoints(job.config)
            run(
                experiment,
                job.directory,
                resume=job.resume,
                checkpoint_every=checkpoints.every,
                keep=checkpoints.keep,
                callbacks=[progress, *build_trackers(job.config)],
            )
        except ClientError as error:
            if parent is None:
                raise
            failed.append((job.label, error))
        except KeyboardInterrupt:
            raise Stopped(goes_on(job, parent)) from None
    return failed


def show_places(console: Console, parent: Path, jobs: Sequence[Job], picture: Path) -> None:
    """Print where runs are, and their picture."""
    print_raw(console, f"run director{'ies' if len(jobs) > 1 else 'y'}: {relpath(parent)}")
    print_raw(console, f"picture: {relpath(picture)}")


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a sentence on how to go on."""


def goes_on(job: Job, parent: Path | None) -> str:
    """How to go on after Ctrl-C."""
    directory = parent or job.directory
    if parent is None and not RunDirectory(directory).begun:
        return "stopped before training began; nothing was written."
    at = places.summary(job.directory).get("rounds", 0)
    who = job.label if parent is None else job.title
    return f"stopped after round {at} of {who}; go on with: fedloom run resume={relpath(directory)}"


def show(console: Console, jobs: Sequence[Job], parent: Path | None) -> None:
    """The results, and where everything is."""
    rows = [(job, places.summary(job.directory)) for job in jobs]
    rows = [(job, summary) for job, summary in rows if summary]
    seeds = {job.config["seed"] for job, _ in rows}
    labelled = [(job.label if len(seeds) == 1 else job.title, summary) for job, summary in rows]
    console.print()
    console.print(results(labelled))
    notes(console, (summary for _, summary in labelled))
    for job, _ in rows:
        comparison_picture([job.directory], job.directory / CURVES)
    if parent is None or not rows:
        for job in jobs:
            print_raw(console, f"run directory: {relpath(job.directory)}")
            print_raw(console, f"picture:       {relpath(job.directory / CURVES)}")
        return
    directories = [job.directory for job, _ in rows]
    picture = comparison_picture(directories, parent / "comparison.png")
    page = build_report(directories, parent)
    print_raw(console, f"run directories: {relpath(parent)}/")
    print_raw(console, f"picture:         {relpath(picture)}")
    print_raw(console, f"page:            {relpath(page)}")
