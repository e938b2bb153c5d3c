"""``fedloom run``: one run, a sweep, or the default comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.cli.command import Command
from fedloom.cli.jobs import Job, RunPlan
from fedloom.config.federated import RUN, build, build_method
from fedloom.experiment.console import results
from fedloom.experiment.federated import run
from fedloom.experiment.report import build as build_report
from fedloom.experiment.report import comparison_picture


def train(experiment: Any, job: Job, batch: RunPlan, **settings: Any) -> None:
    """Run one experiment in its directory."""
    run(experiment, job.directory, **settings)


def files(batch: RunPlan, runs: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Draw each run's curves; for a sweep also all curves in one figure, and the page."""
    directories = [directory for _, directory in runs]
    curves = [comparison_picture([directory], directory / "figures" / "curves.png") for directory in directories]
    if not batch.is_sweep:
        return [("figure", path) for path in curves]
    if not runs:
        return []
    picture = comparison_picture(directories, batch.parent / "comparison.png")
    return [("figure", picture), ("page", build_report(directories, batch.parent))]


command = Command(RUN, lambda config: build_method(config).name, build, train, results, files)
