"""What every figure shares: theme, legend, safe text, PNG bytes. No pyplot, no global state."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from math import ceil

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.palette import LIGHT, Theme

DPI = 144


def plain(text: str, length: int = 60) -> str:
    r"""Text that matplotlib draws as it stands: one line, no mathematics, not hidden from legends, not endless.

    >>> print(plain("_cost\n$5"))
     _cost \$5
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = line if len(line) <= length else line[: length - 1] + "…"
    return (" " if line.startswith("_") else "") + line.replace("$", r"\$")


def figure(width: float, height: float, theme: Theme) -> Figure:
    """An empty figure (inches) on the theme's background, that draws with Agg."""
    made = Figure(figsize=(width, height), dpi=DPI, facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(made)
    return made


def dress(axes: Axes, theme: Theme, xlabel: str = "", ylabel: str = "") -> None:
    """Light grid, no box, labels in the theme's colours."""
    axes.set_facecolor(theme.background)
    axes.grid(True, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)
    axes.tick_params(which="both", colors=theme.muted, labelsize=9, length=3, color=theme.grid)
    axes.set_xlabel(xlabel, color=theme.muted, fontsize=9.5)
    axes.set_ylabel(ylabel, color=theme.muted, fontsize=9.5)


def title(axes: Axes, text: str, theme: Theme) -> None:
    """A title at the left, above the axes."""
    axes.set_title(text, loc="left", color=theme.text, fontsize=10.5, fontweight="bold")


def percent(axes: Axes, which: str = "y") -> None:
    """Show shares as percentages."""
    (axes.yaxis if which == "y" else axes.xaxis).set_major_formatter(PercentFormatter(xmax=1, decimals=None))


def thousands(axes: Axes) -> None:
    """Show large counts on the horizontal axis with k, M, G."""
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def logarithmic(axes: Axes) -> None:
    """A logarithmic vertical axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(made: Figure, groups: Sequence[Group], theme: Theme) -> None:
    """One legend below all panels, with every group's line."""
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


def png(made: Figure) -> bytes:
    """The figure as PNG; letters that the font lacks become boxes, silently."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        made.savefig(buffer, format="png", dpi=DPI, facecolor=made.get_facecolor())
    return buffer.getvalue()


Drawing = Callable[[Theme], Figure]
"""A figure that is still to be drawn, in whichever theme."""


def draw(drawing: Drawing, theme: Theme = LIGHT) -> bytes:
    """The drawing as PNG in the given theme."""
    return png(drawing(theme))
