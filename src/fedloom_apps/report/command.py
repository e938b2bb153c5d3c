"""``fedloom report``: compare runs on one page, also while they are running."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fedloom.base.errors import ConfigError, printable
from fedloom.config.schema import read
from fedloom.experiment.atomic import Lock
from fedloom.experiment.console import (
    HEADLINES,
    common_metric,
    first_metrics,
    in_percent,
    make_console,
    plural,
    print_raw,
    relpath,
)
from fedloom.experiment.rundir import PLAN, RunDirectory, Status

SECONDS = 3.0
"""Seconds between two checks of watched runs."""


def command(arguments: argparse.Namespace) -> int:
    """Write the page and print its path; with ``--watch``, rewrite it until all runs have ended."""
    from fedloom_apps.report import groups, write  # jinja2 is slow to import

    if not arguments.words:
        raise ConfigError("fedloom report needs at least one run directory, like fedloom report runs/2026-01-31/*.")
    words = [word.removeprefix("run=") if not Path(word).exists() else word for word in arguments.words]
    paths, console = [Path(word) for word in words], make_console()
    out = Path(arguments.out) if arguments.out else (paths[0] if len(paths) == 1 else Path("report"))
    names = {label: str(name) for label, name in read(Path(arguments.names)).items()} if arguments.names else {}
    if arguments.watch:
        watch(paths, out)
    selection = groups.select_groups(groups.read(paths), names)
    only, style = ([word for word in (text or "").split(",") if word] for text in (arguments.only, arguments.style))
    files = ("pdf", "svg") if arguments.figures or only or style else ()
    page = write(selection, out, files=files, only=only or ["*"], style=style)
    runs = groups.all_runs(selection)
    running = sum(not run.ended for run in runs)
    note = f", {running} of them unfinished" if running else ""
    print_raw(console, f"compared {plural(len(runs), 'run')}{note}: {relpath(page)}")
    if arguments.best:
        from fedloom_apps.report.best import write_best

        for line in write_best(selection, Path(arguments.best)):
            print_raw(console, printable(line))
    return 0


def watch(paths: Sequence[Path], out: Path) -> None:
    """Write a page that reloads itself, whenever a run has grown, until all runs and planned runs have ended."""
    from fedloom_apps.report import build
    from fedloom_apps.report.groups import run_directories

    former_sizes: dict[Path, int] = {}
    while True:
        sweeps = [path for path in paths if (path / PLAN).is_file()]
        empty_sweeps = [path for path in sweeps if not any(path.rglob("metrics.jsonl"))]
        runs = [path for path in run_directories(path for path in paths if path not in empty_sweeps) if path.is_dir()]
        planned_runs = [path / name for path in sweeps for name in read(path / PLAN)]
        if runs and not any(map(Lock.may_be_held, sweeps)):  # runs without a directory failed early
            planned_runs = [path for path in planned_runs if RunDirectory(path).is_begun]
        if all(RunDirectory(path).status is not Status.UNFINISHED for path in (*runs, *planned_runs)):
            return
        directories = [path for path in dict.fromkeys(runs) if (path / "metrics.jsonl").is_file()]
        sizes = {path: (path / "metrics.jsonl").stat().st_size for path in directories}
        if sizes != former_sizes:
            page = build(directories, out, reload=SECONDS)
            if not former_sizes:
                print_raw(make_console(), f"watching; open {relpath(page)}")
            former_sizes = sizes
        time.sleep(SECONDS)


def seed_lines(runs: Sequence[Path]) -> Iterator[str]:
    """One line for each group of runs that differ only in the seed: mean ± standard error, as on the page."""
    from fedloom_apps.report import groups
    from fedloom_apps.report.runs import RunData
    from fedloom_apps.report.tables import FORMATS, per_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the page says what is left out
        members = [member for member in groups.read(runs) if len(member.runs) > 1]
    metric = common_metric(run.summary for member in members for run in member.runs)  # as in the table above
    for member in members:
        summary = member.runs[0].summary
        headline = str(summary.get("headline") or HEADLINES[0])
        words, lines = first_metrics(summary.get("final") or {}, metric), []
        adds_headline = headline not in words or "accuracy" not in headline.split("/")
        for key, word in (({headline: headline.replace("/", " ")} if adds_headline else {}) | words).items():
            share = in_percent(key)
            if (share or key == headline) and groups.has([member], key):
                (stats,) = per_run([member], partial(RunData.result, key=key))
                text = stats.text(FORMATS["percent" if share else "number"])
                lines.append(f"{word} {text}{' %' if share else ''}")
        if lines:
            yield f"{member.label}: {', '.join(lines)} (mean ± s.e., n = {len(member.runs)})"


def after(runs: Sequence[tuple[str, Path]], parent: Path) -> tuple[list[str], list[tuple[str, Path]]]:
    """``seed_lines`` of several runs, and the page of all of them, in their folder."""
    from fedloom_apps.report import build

    directories = [directory for _, directory in runs]
    return [*seed_lines(directories)] if len(runs) > 1 else [], [("page", build(directories, parent))]
