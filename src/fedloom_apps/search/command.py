"""``fedloom search``: find the composition of parts that suits the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.cli.command import Command, Rows, RunPlan, in_directory
from fedloom.experiment.callbacks import Callback, NullProgress, RunInfo
from fedloom.experiment.console import ABSENT, numeric_table
from fedloom_apps.search.config import SEARCH, build
from fedloom_apps.search.task import RUNS, search


def table(rows: Rows) -> Table:
    """The ranking on held-out seeds, and what each part of the winner contributes."""
    result = numeric_table("composition", ("settings", "mean", "s.e.", "gain over FedAvg", "95 % interval"))
    for label, summary in rows:
        for row in summary.get("ranking", ()):
            gain = row["gain"] or {}
            result.add_row(
                Text(f"{label}: {row['label']}" if len(rows) > 1 else row["label"]),
                Text(row["settings"]),
                *(ABSENT if row[key] is None else f"{row[key]:.4f}" for key in ("mean", "se")),
                ABSENT if gain.get("mean") is None else f"{gain['mean']:+.4f}",
                ABSENT if gain.get("low") is None else f"{gain['low']:+.4f} … {gain['high']:+.4f}",
            )
    return result


class BudgetProgress(Callback):
    """Shows every run with its score, and the part of the budget that is spent."""

    def __init__(self, progress: NullProgress) -> None:
        self.on_finish, self.progress = progress.on_finish, progress

    def on_start(self, run: RunInfo) -> None:
        self.progress.on_start(replace(run, rounds=100, start=0, unit="% of budget"))

    def on_round(self, record: Mapping[str, Any]) -> None:
        self.progress.label = ", ".join(dict.fromkeys((record["role"], record["label"])))
        shown = {} if record["score"] is None else {"score": record["score"]}
        self.progress.on_round({"round": record["percent"], "seconds": record["seconds"], **shown})


def remarks(rows: Rows) -> list[str]:
    """The verdict, and what each part of the winner contributes."""
    lines = []
    for label, summary in rows:
        which = f"{label}: " if len(rows) > 1 else ""
        lines += [f"{which}{summary['verdict']}"] if summary.get("verdict") else []
        for part in summary.get("parts", ()):
            if part["mean"] is not None and part["se"] is not None:
                lines.append(f"{which}its {part['without']} contributes {part['mean']:+.4f} ± {part['se']:.4f} (s.e.).")
        if summary.get("misfits"):
            lines.append(f"{which}not tried, since they do not fit: {', '.join(summary['misfits'])}.")
    return lines


def files(batch: RunPlan, runs: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The recipe of the winner, the picture, the tables and the runs that were compared."""
    names = {"recipe": "winner.yaml", "figure": "figures/pareto.svg", "ranking": "ranking.csv", "runs": RUNS}
    paths = [(word, directory / name) for _, directory in runs for word, name in names.items()]
    return [(word, path) for word, path in paths if path.exists()]


command = Command(
    SEARCH,
    lambda config: "search",
    build,
    in_directory(search),
    table,
    files=files,
    remarks=remarks,
    progress=BudgetProgress,
)
