"""``fedloom run``: one run, a sweep, or the default comparison."""

from __future__ import annotations

from fedloom.cli.command import Command, Rows, in_directory
from fedloom.cli.report import page
from fedloom.config.federated import RUN, build, build_method
from fedloom.experiment.console import results
from fedloom.experiment.federated import FederatedTask, run


def remarks(rows: Rows) -> list[str]:
    """Where the data have clients of their own, how many they are."""
    counts = {summary["clients"] for _, summary in rows if summary.get("partition") == "natural"}
    return [f"clients: the {count} natural ones of the data (partition=natural)." for count in sorted(counts)]


command = Command(
    RUN, lambda config: build_method(config).name, build, in_directory(run), results, page, remarks, check=FederatedTask
)
