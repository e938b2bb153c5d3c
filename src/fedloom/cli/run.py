"""``fedloom run``: one run, a sweep, or the default comparison."""

from __future__ import annotations

import numpy as np

from fedloom.cli.command import Command, Rows, in_directory
from fedloom.config.keys import DATA, RUN, Shared, build, build_method
from fedloom.config.schema import Config
from fedloom.experiment.console import results
from fedloom.experiment.federated import FederatedTask, run


def remarks(rows: Rows) -> list[str]:
    """The number of natural clients, for data that have them."""
    counts = {summary["clients"] for _, summary in rows if summary.get("partition") == "natural"}
    return [f"clients: the {count} natural ones of the data (partition=natural)." for count in sorted(counts)]


def hints(keys: set[str], config: Config, shared: Shared) -> list[str]:
    """How to use the natural clients, for data that have them when no partition was set."""
    if "partition" in keys or config["partition.name"] == "natural":
        return []
    source = shared("source", config["data"], DATA.instantiate)
    if source.groups is None:
        return []
    count = len(np.unique(source.groups[source.groups >= 0]))
    return [f"{source.name} has {count} natural clients; partition=natural uses them."]


command = Command(
    RUN, lambda config: build_method(config).name, build, in_directory(run), results,
    remarks=remarks, check=FederatedTask, hints=hints,
)  # fmt: skip
