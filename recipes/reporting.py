"""Shared code of all recipes: tables, excluded updates, notes, the machine, and files of results."""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import torch

from fedloom.base.errors import FedLoomError
from fedloom_apps.claims.rule import MOST

P = ParamSpec("P")
GENERAL = ("runs", "cells", "curves", "data", "columns", "settings", "draws")
"""Keys of stored results that name no run."""


def rounded(value: float | None) -> float | None:
    """Six significant digits: enough to tell on which side of a target a value lies."""
    return None if value is None else float(f"{value:.6g}")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def excluded_share(history: Sequence[Mapping[str, Any]]) -> float:
    """The share of client updates that were excluded from a run because they were not finite or their client failed.

    >>> excluded_share([{"cohort": 4, "failures": 0}, {"cohort": 4, "failures": 1}])
    0.125
    """
    return sum(record["failures"] for record in history) / max(sum(record["cohort"] for record in history), 1)


def excluded_shares(results: Mapping[str, Any], *path: str) -> Iterator[tuple[str, float]]:
    """Every ``left_out`` in stored results, with the names above it; 0 for runs that store only 0 ``failures``.

    >>> list(excluded_shares({"runs": {"FedAvg": {"seed0": {"left_out": 0.5}, "seed1": {"failures": 0}}}}))
    [('FedAvg, seed0', 0.5), ('FedAvg, seed1', 0.0)]
    """
    if results.get("failures") == 0 and "left_out" not in results:
        yield ", ".join(name for name in path if name not in GENERAL), 0.0
    for key, value in results.items():
        if key == "left_out":
            yield ", ".join(name for name in path if name not in GENERAL), float(value)
        elif isinstance(value, Mapping):
            yield from excluded_shares(value, *path, key)


def exit_code(results: Mapping[str, Any]) -> int:
    """A recipe's exit code: 1, with a sentence for each such run, if more than 5 % of a run's updates were excluded."""
    wrong = [(name, share) for name, share in excluded_shares(results) if share > MOST]
    for name, share in wrong:
        print(f"{name}: {share:.1%} of the client updates were excluded; take a smaller step size.", file=sys.stderr)
    return int(bool(wrong))


def reports_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Wraps a recipe's ``main``: refused data or settings end it with one sentence and exit code 2."""

    @wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except FedLoomError as error:
            print(error, file=sys.stderr)
            return 2

    return wrapped


def notes(results: dict[str, Any], count: int = 0) -> list[str]:
    """The end of a page: the runs that excluded updates, with their shares, and the hand-written ``notes``.

    ``count`` is the number of all runs, where a recipe knows it: those without a count are reported, too.
    """
    text, runs = [], list(excluded_shares(results))
    if runs or count:
        text += ["", "## Excluded client updates", ""]
    if count > len(runs):
        text += [f"Not recorded in {count - len(runs)} of {count} runs.", *([""] if runs else [])]
    if runs:
        wrong = [run for run in runs if run[1]]
        text += [f"Of {len(runs)} runs in which they were counted, {len(wrong) or 'none'} excluded an update."]
        if wrong:
            text += ["", table(["run", "updates excluded"], [[name, f"{share:.2%}"] for name, share in wrong])]
    handwritten = [f"- {note}" for note in results.get("notes", [])]
    return text + (["", "## What holds and what does not", "", *handwritten] if handwritten else [])


def cpu_seconds() -> float:
    """CPU seconds used so far by this process and by its finished workers."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def add_core_seconds(results: dict[str, Any], seconds_by_key: Mapping[str, float]) -> None:
    """Add the CPU seconds of some runs to those of the results."""
    for key, seconds in seconds_by_key.items():
        total = results.setdefault("core_seconds", {})
        total[key] = round(total.get(key, 0.0) + seconds, 1)


def machine() -> str:
    """The machine and the date of a run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    which = f"{cores} core{'s' * (cores != 1)} ({platform.machine()})"
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return f"{which}, torch {torch.__version__}, Python {platform.python_version()}, {day}"


def options(
    description: str | None, out: Path | None = None, seeds: Sequence[int] = (), runs: str = ""
) -> ArgumentParser:
    """The options that recipes have in common; ``seeds`` are the usual ones, ``out`` and ``runs`` the usual folders."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    if runs:
        parser.add_argument("--runs", type=Path, default=Path(runs), help="run directories")
    if out:
        parser.add_argument("--out", type=Path, default=out, help="results, tables and pictures")
    parser.add_argument("--table", action="store_true", help="run nothing, only write tables and pictures again")
    return parser


def subplots(rows: int = 1, columns: int = 1, **settings: Any) -> tuple[Any, Any]:
    """A picture and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, layout="constrained", **settings)


def save(figure: Any, path: Path) -> None:
    """Write a picture into a file, and close it."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(path: Path, content: Any) -> None:
    """Write text, or JSON with one line per innermost list, atomically: a kill leaves the old or the new file."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":")).replace("},", "},\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(text.rstrip() + "\n")
    path.with_suffix(".tmp").replace(path)


def publish(path: Path, results: Mapping[str, Any], page: str) -> None:
    """Write results into a JSON file, and their page beside it."""
    write(path, results)
    write(path.with_suffix(".md"), page)


def read(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it does not exist yet."""
    return json.loads(path.read_text()) if path.exists() else {}


class ResultsFile:
    """Figures of runs by name, in a JSON file; runs that it has are not repeated."""

    def __init__(self, path: Path, command: str) -> None:
        self.path = path
        self.results: dict[str, Any] = {"command": command, "machine": machine(), "notes": [], "runs": {}}
        if path.exists():
            self.results |= json.loads(path.read_text())

    @property
    def runs(self) -> dict[str, Any]:
        """Figures by name."""
        return self.results["runs"]

    def __call__(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures of a run, which is made if they are missing."""
        if name not in self.runs:
            self.runs[name] = make()
            self.save()
            print(name, self.runs[name], flush=True)
        return self.runs[name]

    def save(self) -> None:
        """Write the file, one run per line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({key: value for key, value in self.results.items() if key != "runs"}, indent=1)
        runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in sorted(self.runs.items()))
        text = head[: head.rindex("}")].rstrip() + f',\n "runs": {{\n{runs}\n }}\n}}\n'
        self.path.write_text(text)
