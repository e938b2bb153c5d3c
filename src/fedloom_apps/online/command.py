"""``fedloom online``: learners on a stream of tasks, each of which is predicted before it is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.cli.command import Command, Rows, in_directory
from fedloom.experiment.callbacks import Callback, LineProgress, NullProgress, RunInfo
from fedloom.experiment.console import ABSENT, duration, format_size, number, numeric_table
from fedloom_apps.online.config import ONLINE, build
from fedloom_apps.online.task import run


class EveryNth(Callback):
    """Forwards every n-th record and the last one, since with one line per record a long stream floods a log."""

    def __init__(self, inner: NullProgress) -> None:
        self.inner, self.on_finish = inner, inner.on_finish
        self.total, self.every = 0, 1

    def on_start(self, run: RunInfo) -> None:
        """Show about twenty lines per run."""
        self.total = run.rounds
        self.every = max(1, run.rounds // 20) if isinstance(self.inner, LineProgress) else 1
        self.inner.on_start(run)

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] % self.every == 0 or record["round"] == self.total:
            self.inner.on_round(record)


def table(rows: Rows) -> Table:
    """A table of learners with accuracies, stored data and the expert of largest weight."""
    shown = numeric_table("learner", ("CTM", "LTM", "stored data", "tasks", "time"))
    hedged = any(len(summary["hedge"]["p"]) > 1 for _, summary in rows)
    if hedged:
        shown.add_column("best expert", overflow="fold")
    for label, summary in rows:
        long, several = summary.get("ltm") or {}, len(summary["hedge"]["p"]) > 1
        shown.add_row(
            Text(label),
            number("accuracy", summary["ctm"]["accuracy"]),
            number("accuracy", long.get("accuracy")),
            format_size(summary["memory"]["task_bytes"]),
            str(summary["rounds"]),
            duration(summary["seconds"]),
            *([Text(summary["hedge"]["best"] if several else ABSENT)] if hedged else []),
        )
    return shown


command = Command(ONLINE, lambda config: config["learner.name"], build, in_directory(run), table, progress=EveryNth)
