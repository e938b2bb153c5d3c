"""How clients differ: the distribution of their accuracy, and the coefficients with which they were mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedloom.experiment.report.canvas import dress, figure, percent, plain, title
from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.palette import Theme
from fedloom.experiment.report.rundir import Run

CLIENTS_DRAWN = 100
"""With more clients than this, a heat picture has rows thinner than its pixels."""

PANELS = 8


def client_accuracies(run: Run) -> NDArray[np.float64]:
    """Each client's accuracy in the last evaluated round, without the clients that have none."""
    values = np.asarray(run.clients.get("accuracy", ()), dtype=np.float64)
    return values[np.isfinite(values)]


def distribution(groups: Sequence[Group], theme: Theme) -> Figure:
    """Left, the quantile curve (which accuracy a share of the clients stays below); right, boxes. Seeds are pooled."""
    shown = [
        (member, pooled)
        for member in groups
        if len(pooled := np.concatenate([client_accuracies(run) for run in member.runs]))
    ]
    made = figure(10.8, max(3.4, 1.6 + 0.36 * len(shown)), theme)
    left, right = made.subplots(1, 2)
    dress(left, theme, "share of clients", "accuracy at or below")
    dress(right, theme, "accuracy of a client")
    for member, pooled in shown:
        look, ordered = member.style, np.sort(pooled)
        shares = (np.arange(len(ordered)) + 0.5) / len(ordered)
        left.plot(
            shares,
            ordered,
            color=look.colour,
            dashes=look.dash or (None, None),
            linewidth=1.7,
            marker=look.marker,
            markersize=4.5,
            markevery=max(1, len(ordered) // 8),
        )
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


@dataclass(frozen=True)
class Mixing:
    """The coefficients of one run: rows are clients, columns rounds, NaN where a client did not take part."""

    label: str
    clients: NDArray[np.int64]
    rounds: NDArray[np.int64]
    p: NDArray[np.float64]


def mixings(groups: Sequence[Group]) -> list[Mixing]:
    """For each group, the first run whose coefficients can be drawn: several rounds, at most 100 clients."""
    found = []
    for member in groups:
        for run in member.runs:
            if not run.mixing:
                continue
            clients, row = np.unique(run.mixing["client"].astype(np.int64), return_inverse=True)
            rounds, column = np.unique(run.mixing["round"].astype(np.int64), return_inverse=True)
            if len(rounds) > 1 and len(clients) <= CLIENTS_DRAWN:
                p = np.full((len(clients), len(rounds)), np.nan)
                p[row, column] = run.mixing["p"]
                seed = f" (seed {run.seed})" if len(member.runs) > 1 else ""
                found.append(Mixing(member.label + seed, clients, rounds, p))
                break
    return found[:PANELS]


def heat(pictures: Sequence[Mixing], theme: Theme) -> Figure:
    """Mixing coefficients over rounds, one panel a group, all on one scale of colours."""
    columns = min(2, len(pictures))
    lines = ceil(len(pictures) / columns)
    made = figure(5.4 * columns if columns > 1 else 8.2, 3.3 * lines, theme)
    grid = made.subplots(lines, columns, squeeze=False)
    finite = np.concatenate([m.p[np.isfinite(m.p)] for m in pictures])
    top = float(finite.max()) if len(finite) and finite.max() > 0 else 1.0
    image = None
    for axes, picture in zip(grid.flat, pictures, strict=False):
        dress(axes, theme, "round", "client")
        axes.grid(False)
        first, last = picture.rounds[0], picture.rounds[-1]
        image = axes.imshow(
            picture.p,
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=min(0.0, float(finite.min()) if len(finite) else 0.0),
            vmax=top,
            extent=(first - 0.5, last + 0.5, len(picture.clients) - 0.5, -0.5),
        )
        chosen = np.linspace(0, len(picture.clients) - 1, min(6, len(picture.clients))).round().astype(int)
        axes.set_yticks(chosen, [str(picture.clients[i]) for i in chosen])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        title(axes, plain(picture.label, 52), theme)
    for axes in list(grid.flat)[len(pictures) :]:
        axes.set_visible(False)
    if image is not None:
        bar = made.colorbar(image, ax=list(grid.flat), shrink=0.85, pad=0.015)
        bar.set_label("mixing coefficient p", color=theme.muted, fontsize=9.5)
        bar.ax.tick_params(colors=theme.muted, labelsize=9)
        bar.outline.set_visible(False)  # type: ignore[operator]
    return made
