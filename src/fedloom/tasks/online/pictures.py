"""The figure of online runs: CTM, LTM and stored task data against tasks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from fedloom.experiment.report.canvas import Panel, panels, png
from fedloom.experiment.report.groups import RunGroup, band, labelled
from fedloom.experiment.report.render import write
from fedloom.tasks.online.metrics import smoothed


def picture(runs: Sequence[tuple[str, Path]], path: Path) -> Path:
    """Draw run directories into a PNG: CTM (a moving average over a tenth of the tasks), LTM, and stored task data.

    Args:
        runs: a label and the directory of each.
        path: of the PNG; its folder is created.
    """
    groups = labelled(runs)
    window = max(1, *(len(member.runs[0].rows) // 10 for member in groups))

    def curve(member: RunGroup, key: str, window: int = 1, unit: float = 1) -> pd.DataFrame:
        values = member.runs[0].curve(key) / unit
        return band(pd.Series(smoothed(values.tolist(), window), values.index).to_frame())

    row = [
        Panel(
            partial(curve, key="ctm/accuracy", window=window),
            "accuracy",
            "tasks",
            f"New task, before learning it (CTM, mean of {window})",
            share=True,
        ),
        Panel(partial(curve, key="ltm/accuracy"), "accuracy", "tasks", "All tasks so far (LTM)", share=True),
        Panel(partial(curve, key="memory/task_bytes", unit=1e6), "MB", "tasks", "Stored task data"),
    ]
    return write(path, png(partial(panels, groups, [row], height=3.4, width=4.6)))
