"""Figures of the differences between clients: distribution of accuracy, and mixing coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedloom.experiment.report.canvas import draw_line, dress, figure, percent, plain
from fedloom.experiment.report.curves import pivot
from fedloom.experiment.report.groups import RunGroup
from fedloom.experiment.report.style import Theme

CLIENTS_DRAWN = 100
"""Largest number of clients in a heat map; with more, rows would be thinner than a pixel."""

PANELS = 8


def pooled_accuracies(member: RunGroup) -> NDArray[np.float64]:
    """The clients' accuracies in the last evaluated round, sorted, pooled over seeds; missing ones are left out."""
    known = [run.clients["accuracy"].to_numpy(np.float64) for run in member.runs if len(run.clients)]
    values = np.concatenate([np.zeros(0), *known])
    return np.sort(values[np.isfinite(values)])


def client_distribution(groups: Sequence[RunGroup], theme: Theme) -> Figure:
    """Left, the quantile curve of accuracy over clients; right, box plots. Seeds are pooled."""
    shown = [(member, pooled) for member in groups if len(pooled := pooled_accuracies(member))]
    made = figure(10.8, max(3.4, 1.6 + 0.36 * len(shown)), theme)
    left, right = made.subplots(1, 2)
    dress(left, theme, "share of clients", "accuracy at or below")
    dress(right, theme, "accuracy of a client")
    for member, pooled in shown:
        draw_line(left, member.style, (np.arange(len(pooled)) + 0.5) / len(pooled), pooled)
    ink = {"color": theme.muted, "linewidth": 1.1}
    boxes = right.boxplot(
        [pooled for _, pooled in shown],
        orientation="horizontal",
        widths=0.55,
        patch_artist=True,
        whis=(10, 90),
        boxprops={"linewidth": 0},
        medianprops={"color": theme.background, "linewidth": 2},
        whiskerprops=ink,
        capprops=ink,
        flierprops={"marker": "o", "markersize": 2.5, "markerfacecolor": theme.muted, "markeredgewidth": 0},
    )
    for patch, (member, _) in zip(boxes["boxes"], shown, strict=True):
        patch.set_facecolor(member.style.colour)
    right.set_yticks(range(1, len(shown) + 1), [plain(member.label, 46) for member, _ in shown])
    right.invert_yaxis()
    right.grid(False, axis="y")
    percent(left)
    percent(left, "x")
    percent(right, "x")
    left.set_xlim(0, 1)
    return made


def mixing_matrices(groups: Sequence[RunGroup]) -> dict[str, pd.DataFrame]:
    """Coefficients [clients, rounds] of one run per group, by label.

    The run is the first with several rounds and at most 100 clients.
    """
    found = {}
    for member in groups:
        for run in member.runs:
            p = pivot(run.mixing, "p") if len(run.mixing) else run.mixing
            if len(p.columns) > 1 and len(p) <= CLIENTS_DRAWN:
                found[member.label + (f" (seed {run.seed})" if len(member.runs) > 1 else "")] = p
                break
    return dict(list(found.items())[:PANELS])


def mixing_heatmap(matrices: dict[str, pd.DataFrame], theme: Theme) -> Figure:
    """Mixing coefficients over rounds, one panel per group, with a common colour scale."""
    columns = min(2, len(matrices))
    lines = ceil(len(matrices) / columns)
    made = figure(5.4 * columns if columns > 1 else 8.2, 3.3 * lines, theme)
    grid = list(made.subplots(lines, columns, squeeze=False).flat)
    finite = np.concatenate([p.to_numpy()[np.isfinite(p.to_numpy())] for p in matrices.values()])
    low, high = min(0.0, *finite), max(0.0, *finite) or 1.0
    image = None
    for axes, (label, p) in zip(grid, matrices.items(), strict=False):
        dress(axes, theme, "round", "client", label)
        axes.grid(False)
        extent = (p.columns[0] - 0.5, p.columns[-1] + 0.5, len(p) - 0.5, -0.5)
        image = axes.imshow(
            p, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high, extent=extent
        )
        chosen = np.linspace(0, len(p) - 1, min(6, len(p))).round().astype(int)
        axes.set_yticks(chosen, [str(p.index[i]) for i in chosen])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    for axes in grid[len(matrices) :]:
        axes.set_visible(False)
    if image is not None:
        bar = made.colorbar(image, ax=grid, shrink=0.85, pad=0.015)
        bar.set_label("mixing coefficient p", color=theme.muted, fontsize=9.5)
        bar.ax.tick_params(colors=theme.muted, labelsize=9)
        bar.outline.set_visible(False)  # type: ignore[operator]
    return made
