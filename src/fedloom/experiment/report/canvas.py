"""Common elements of all figures: axes, lines, legend, escaped text, PNG output; without pyplot or global state."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)
from numpy.typing import NDArray

from fedloom.experiment.report.groups import RunGroup
from fedloom.experiment.report.style import LIGHT, LineStyle, Theme

DPI = 144
ROUNDS = "communication rounds"

Floats = NDArray[np.float64]

Drawing = Callable[[Theme], Figure]
"""A figure as a function of the theme to draw it in."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes with a line per group.

    Args:
        curve: returns the ``band`` of a group; empty if it has none.
        y: label of the vertical axis.
        x: label of the horizontal axis.
        title: the title.
        share: whether values are fractions, shown in per cent.
        amounts: whether the horizontal axis holds large counts, shown with k, M, G.
        log: use a logarithmic vertical axis if the values span a large range.
        target: a value to mark.
    """

    curve: Callable[[RunGroup], pd.DataFrame]
    y: str
    x: str = ROUNDS
    title: str = ""
    share: bool = False
    amounts: bool = False
    log: bool = False
    target: float | None = None


def plain(text: str, length: int = 60) -> str:
    r"""Make text safe for matplotlib: one line of limited length, no mathematics, not hidden from legends.

    >>> print(plain("_cost\n$5"))
     _cost \$5
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = line if len(line) <= length else line[: length - 1] + "…"
    return (" " if line.startswith("_") else "") + line.replace("$", r"\$")


def figure(width: float, height: float, theme: Theme) -> Figure:
    """An empty figure (size in inches) on the theme's background, rendered with Agg."""
    made = Figure(figsize=(width, height), dpi=DPI, facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(made)
    return made


def dress(axes: Axes, theme: Theme, x: str = "", y: str = "", title: str = "") -> None:
    """Style axes: a light grid, no box, labels in the theme's colours, and a left-aligned title."""
    axes.set_facecolor(theme.background)
    axes.grid(True, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)
    axes.tick_params(which="both", colors=theme.muted, labelsize=9, length=3, color=theme.grid)
    axes.set_xlabel(x, color=theme.muted, fontsize=9.5)
    axes.set_ylabel(y, color=theme.muted, fontsize=9.5)
    axes.set_title(plain(title, 80), loc="left", color=theme.text, fontsize=10.5, fontweight="bold")


def percent(axes: Axes, which: str = "y") -> None:
    """Format fractions as percentages."""
    (axes.yaxis if which == "y" else axes.xaxis).set_major_formatter(PercentFormatter(xmax=1, decimals=None))


def draw_line(axes: Axes, style: LineStyle, x: Floats, y: Floats) -> None:
    """Draw a group's line, with about eight markers."""
    axes.plot(
        x,
        y,
        color=style.colour,
        dashes=style.dash or (None, None),
        linewidth=1.7,
        marker=style.marker,
        markersize=4.5 if len(x) > 1 else 7,
        markevery=max(1, len(x) // 8),
    )


def mark_level(axes: Axes, value: float, name: str, theme: Theme) -> None:
    """Draw a dashed horizontal line with its name at the left."""
    axes.axhline(value, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (3, 3), "textcoords": "offset points"}
    axes.annotate(name, (0, value), fontsize=8.5, color=theme.muted, **place)


def _fill(axes: Axes, groups: Sequence[RunGroup], panel: Panel, theme: Theme) -> None:
    """Draw every group's mean and, for several seeds, its band; mark the target."""
    dress(axes, theme, panel.x, panel.y, panel.title)
    least, most = float("inf"), 0.0
    for member in groups:
        found = panel.curve(member)
        if found.empty:
            continue
        x, mean, low, high = found[["x", "mean", "low", "high"]].to_numpy().T
        draw_line(axes, member.style, x, mean)
        if len(member.runs) > 1:
            axes.fill_between(x, low, high, color=member.style.colour, alpha=0.16, linewidth=0)
        least, most = min(least, mean.min()), max(most, mean.max())
    if panel.log and 0 < least < most / 30:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.share:
        percent(axes)
    if panel.amounts:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if panel.target is not None:
        mark_level(axes, panel.target, "target", theme)


def panels(
    groups: Sequence[RunGroup], rows: Sequence[Sequence[Panel]], theme: Theme, height: float = 3.1, width: float = 5.4
) -> Figure:
    """Draw a grid of panels with one legend below; panels of a row with the same label share their scale.

    Args:
        groups: one line each.
        rows: the panels of each row, all rows of the same length.
        theme: colours.
        height: height of a row, in inches.
        width: width of a panel, in inches.
    """
    made = figure(width * len(rows[0]), height * len(rows) + 0.35, theme)
    grid = made.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, line in zip(rows, grid, strict=True):
        for panel, axes in zip(row, line, strict=True):
            _fill(axes, groups, panel, theme)
            if axes is not line[0] and panel.y == row[0].y:
                axes.sharey(line[0])
                axes.set_ylabel("")
                axes.tick_params(labelleft=False)
    legend(made, groups, theme)
    return made


def legend(made: Figure, groups: Sequence[RunGroup], theme: Theme) -> None:
    """Draw one legend below all panels."""
    handles = [
        Line2D([], [], color=g.style.colour, dashes=g.style.dash or (None, None), marker=g.style.marker, markersize=5)
        for g in groups
    ]
    labels = [plain(g.label) for g in groups]
    most = max(1, int(12 * made.get_figwidth() / (max(map(len, labels)) + 8)))
    columns = ceil(len(groups) / ceil(len(groups) / most))
    made.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=theme.text,
        fontsize=9.5,
        handlelength=3,
    )


def png(drawing: Drawing, theme: Theme = LIGHT) -> bytes:
    """Render a figure as PNG; characters missing from the font become boxes, without warning."""
    made, buffer = drawing(theme), io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        made.savefig(buffer, format="png", dpi=DPI, facecolor=made.get_facecolor())
    return buffer.getvalue()
