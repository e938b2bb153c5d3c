"""Pictures of online runs: CTM and LTM against tasks, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.experiment.atomic import write_whole
from fedloom.experiment.report.canvas import dress, figure, percent, plain, png, title
from fedloom.experiment.report.palette import LIGHT, styles
from fedloom.experiment.rundir import RunDirectory
from fedloom.tasks.online.metrics import smoothed


def picture(runs: Sequence[tuple[str, Path]], path: Path) -> Path:
    """Draw run directories into a PNG: CTM (a moving mean of a tenth of the tasks), LTM, and bytes of task data kept.

    Args:
        runs: a label and the directory of each.
        path: where it goes; its folder is made.
    """
    found = [(label, RunDirectory(directory).metrics()) for label, directory in runs]
    window = max(1, max((len(records) for _, records in found), default=1) // 10)
    made = figure(12.5, 3.6, LIGHT)
    current, long, kept = made.subplots(1, 3)
    dress(current, LIGHT, "tasks", "accuracy")
    title(current, f"New task, before it is learnt (CTM, mean of {window})", LIGHT)
    dress(long, LIGHT, "tasks", "accuracy")
    title(long, "All tasks so far (LTM)", LIGHT)
    dress(kept, LIGHT, "tasks", "MB")
    title(kept, "Task data kept", LIGHT)
    percent(current)
    percent(long)
    for (label, records), style in zip(found, styles([label for label, _ in runs]), strict=True):
        look: dict[str, Any] = {"color": style.colour, "dashes": style.dash or (None, None), "linewidth": 1.6}
        places = [record["round"] for record in records]
        current.plot(places, smoothed([r["ctm/accuracy"] for r in records], window), **look, label=plain(label))
        measured = [(r["round"], r["ltm/accuracy"]) for r in records if r.get("ltm/accuracy") is not None]
        if measured:
            long.plot(*zip(*measured, strict=True), **look, marker=style.marker, markersize=4)
        kept.plot(places, [r["memory/task_bytes"] / 1e6 for r in records], **look)
    current.legend(frameon=False, fontsize=8.5, labelcolor=LIGHT.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, png(made))
    return path
