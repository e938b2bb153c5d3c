"""A figure of distillation runs: test accuracy against student passes, and the guide's g on right and wrong samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.experiment.report.canvas import draw_line, dress, figure, legend, mark_level, percent, png
from fedloom.experiment.report.groups import RunGroup, labelled
from fedloom.experiment.report.render import write
from fedloom.experiment.report.style import Theme
from fedloom.experiment.rundir import RunDirectory


def picture(runs: Sequence[tuple[str, Path]], path: Path) -> Path:
    """Draw run directories into a PNG: a panel of accuracies, and a histogram for each guide.

    Args:
        runs: a label and the directory of each.
        path: of the PNG; its folder is created.
    """
    return write(path, png(partial(_drawing, labelled(runs))))


def _drawing(groups: Sequence[RunGroup], theme: Theme) -> Figure:
    guides = [(g.label, table) for g in groups if (table := RunDirectory(g.runs[0].path).table("guide"))]
    made = figure(6.4 + 3.8 * len(guides), 4.1, theme)
    curves, *histograms = made.subplots(1, 1 + len(guides), squeeze=False, width_ratios=[1.6, *[1.0] * len(guides)])[0]
    dress(curves, theme, "student passes over the data", "test accuracy", "Accuracy")
    percent(curves)
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    for member in groups:
        run = member.runs[0]
        accuracy = run.curve("global/accuracy")
        passes = run.curve("passes").reindex(accuracy.index)
        draw_line(curves, member.style, passes.to_numpy(), accuracy.to_numpy())
        if chosen := run.summary.get("selected"):
            curves.plot(chosen["passes"], chosen["accuracy"], "*", color=member.style.colour, markersize=11)
    teachers = [g.runs[0].summary["teacher"]["accuracy"] for g in groups if g.runs[0].summary.get("teacher")]
    if teachers:
        mark_level(curves, teachers[0], "teacher", theme)
    for (label, table), axes in zip(guides, histograms, strict=True):
        dress(axes, theme, "g", "share of samples", f"Guide of {label}")
        percent(axes)
        g, right = table["g"], table["right"]
        for mask, name, colour in ((right, "student is right", "#0072B2"), (~right, "student is wrong", "#D55E00")):
            if mask.any():
                share = np.full(mask.sum(), 1 / mask.sum())
                axes.hist(g[mask], bins=20, range=(0, 1), weights=share, alpha=0.6, color=colour, label=name)
        axes.legend(frameon=False, fontsize=8.5, labelcolor=theme.text)
    legend(made, groups, theme)
    return made
