"""A picture of runs: test accuracy against student passes, and the guide's g on right and wrong samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.experiment.atomic import write_whole
from fedloom.experiment.report.canvas import dress, figure, percent, plain, png, title
from fedloom.experiment.report.palette import LIGHT, styles
from fedloom.experiment.rundir import RunDirectory

BINS = 20


def picture(runs: Sequence[tuple[str, Path]], path: Path) -> Path:
    """Draw run directories into a PNG: a panel of curves, and one for each guide.

    Args:
        runs: a label and the directory of each.
        path: where it goes; its folder is made.
    """
    helped = [(label, found) for label, where in runs if (found := guidance(where)) is not None]
    made = figure(6.4 + 3.8 * len(helped), 3.8, LIGHT)
    panels = made.subplots(1, 1 + len(helped), squeeze=False, width_ratios=[1.6, *[1.0] * len(helped)])[0]
    curves = panels[0]
    dress(curves, LIGHT, "student passes over the data", "test accuracy")
    title(curves, "Accuracy", LIGHT)
    percent(curves)
    looks = styles([label.partition(",")[0] for label, _ in runs])
    taught: float | None = None
    for (label, where), style in zip(runs, looks, strict=True):
        points = [(r["passes"], r["global/accuracy"]) for r in RunDirectory(where).metrics() if "global/accuracy" in r]
        dashes: Any = style.dash or (None, None)
        curves.plot(*zip(*points, strict=True), color=style.colour, dashes=dashes, label=plain(label), linewidth=1.6)
        taught = taught or (RunDirectory(where).summary().get("teacher") or {}).get("accuracy")
        chosen = RunDirectory(where).summary().get("selected")
        if chosen:
            curves.plot([chosen["passes"]], [chosen["accuracy"]], "o", color=style.colour, markersize=5)
    if taught is not None:
        curves.axhline(taught, color=LIGHT.muted, linewidth=1, linestyle=":", label="teacher")
    curves.legend(frameon=False, fontsize=8.5, labelcolor=LIGHT.text, loc="lower right")
    for (label, (g, right)), panel in zip(helped, panels[1:], strict=True):
        dress(panel, LIGHT, "g", "share of samples")
        title(panel, plain(f"Guide of {label}"), LIGHT)
        percent(panel)
        for mask, name, colour in ((right, "student is right", "#0072B2"), (~right, "student is wrong", "#D55E00")):
            if mask.any():
                share = np.full(mask.sum(), 1 / mask.sum())
                panel.hist(g[mask], bins=BINS, range=(0, 1), weights=share, alpha=0.6, color=colour, label=name)
        panel.legend(frameon=False, fontsize=8.5, labelcolor=LIGHT.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, png(made))
    return path


def guidance(where: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """g [N] of a run's guide, and whether the student is right [N], if it has a guide."""
    table = RunDirectory(where).table("guide")
    return (table["g"], table["right"]) if table else None
