"""The label-by-client picture: what a partition did, before anything trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from fedloom.core.errors import DataError
from fedloom.core.federation import Federation
from fedloom.data.statistics import label_counts, statistics

FEW = 40  # up to here every client has its own column of circles
COLUMNS = 1000  # a wider heat map would be finer than its pixels
INK, SOFT, GRID, ACCENT, QUIET = "#1f2a37", "#5b6776", "#e6e9ee", "#1f6f8b", "#a9cad5"
SHADES = LinearSegmentedColormap.from_list("share", ["#f7f8fa", "#c5dde4", "#6fb0c2", ACCENT, "#0d3a4c"])


def label_picture(federation: Federation, path: str | Path) -> Path:
    """Draw who holds which labels, and how much, into ``path`` (its suffix says the format).

    Few clients are columns of circles whose area is the number of samples. Many clients are columns of a heat map of
    label shares, ordered by label so that like clients lie side by side; beyond some hundreds, neighbours are averaged.
    The strip above shows the clients' sizes.

    Raises:
        DataError: if the targets are not class numbers.
    """
    y = federation.train.arrays.y
    if y.is_floating_point() or y.ndim != 1:
        raise DataError("the label picture needs class numbers, which this federation does not have.")
    clients, classes = len(federation), federation.classes
    figure = Figure(figsize=(10.5, min(2.6 + max(0.26 * classes, 2.2), 11)), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(2, 1, height_ratios=[1, max(0.26 * classes, 2.2) / 0.8])
    below = figure.add_subplot(rows[1])
    above = figure.add_subplot(rows[0], sharex=below)
    if clients <= FEW:
        circles(federation, above, below)
    else:
        heat(federation, above, below, figure)
    label_axis(federation, below)
    for axes in (above, below):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8, colors=SOFT)
    above.tick_params(labelbottom=False)
    above.set_ylabel("samples", fontsize=8, color=SOFT)
    figure.align_ylabels()
    figure.suptitle(caption(federation), x=0.01, ha="left", fontsize=11, color=INK)
    figure.savefig(path, dpi=150)
    return Path(path)


def circles(federation: Federation, above: Axes, below: Axes) -> None:
    """One column per client, one circle per label, area by number of samples."""
    client, label, count = label_counts(federation.train)
    clients, classes = len(federation), federation.classes
    widest = min(620 / clients, 0.7 * 72 * 0.26 * max(1.0, 8.5 / classes)) if clients > 1 else 18.0  # points
    below.scatter(client, label, s=widest**2 * count / count.max(), color=ACCENT, alpha=0.85, linewidths=0)
    below.set_xlim(-0.6, clients - 0.4)
    named = bool(federation.names) and max(map(len, federation.names)) <= 12
    ticks = list(federation.names) if named else [str(client) for client in range(clients)]
    below.set_xticks(range(clients), ticks, rotation=90 if named and clients > 8 else 0)
    below.grid(color=GRID, linewidth=0.7)
    below.set_axisbelow(True)
    below.set_xlabel(f"client   (largest circle: {count.max()} samples)", fontsize=9, color=SOFT)
    above.bar(range(clients), federation.train.index.sizes, width=0.6, color=QUIET)


def heat(federation: Federation, above: Axes, below: Axes, figure: Figure) -> None:
    """Columns of label shares, clients ordered by label."""
    client, label, count = label_counts(federation.train)
    sizes = federation.train.index.sizes
    clients, classes = len(sizes), federation.classes
    order = by_likeness(client, label, count, sizes)
    column = np.empty(clients, dtype=np.int64)
    columns = min(clients, COLUMNS)
    column[order] = np.arange(clients) * columns // clients
    width = np.bincount(column, minlength=columns)  # clients per column
    shares = np.zeros((classes, columns))
    np.add.at(shares, (label, column[client]), count / sizes[client])
    shares /= width
    edges = np.arange(columns + 1) * clients / columns
    mesh = below.pcolormesh(edges, np.arange(classes + 1) - 0.5, shares, cmap=SHADES, vmin=0, vmax=1, rasterized=True)
    bar = figure.colorbar(mesh, ax=below, pad=0.01, fraction=0.02, aspect=30)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(length=0, labelsize=8, colors=SOFT)
    bar.set_label("share of the client's samples", fontsize=8, color=SOFT)
    below.set_xlim(0, clients)
    below.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    grouped = ", neighbours averaged" if columns < clients else ""
    below.set_xlabel(f"{clients:,} clients, ordered by label{grouped}", fontsize=9, color=SOFT)
    above.stairs(np.bincount(column, sizes, minlength=columns) / width, edges, fill=True, color=QUIET)


def by_likeness(client: np.ndarray, label: np.ndarray, count: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Clients by their first label, by how much of it they hold (in tenths), and by their second label; int [K]."""
    rank = np.lexsort((label, -count, client))
    start = np.unique(client[rank], return_index=True)[1]
    first, second = rank[start], rank[np.minimum(start + 1, len(rank) - 1)]
    second = np.where(client[second] == client[first], second, first)  # a client with one label has no second
    order = np.lexsort(
        (-count[second], label[second], -np.rint(10 * count[first] / sizes[client[first]]), label[first])
    )
    rest = np.setdiff1d(np.arange(len(sizes)), client[first])  # clients without samples
    return np.concatenate([client[first][order], rest])


def label_axis(federation: Federation, axes: Axes) -> None:
    """Class names, or as many numbers as can be read."""
    classes, names = federation.classes, federation.train.arrays.names
    step = math.ceil(classes / 30)
    ticks = range(0, classes, step)
    axes.set_ylim(classes - 0.4, -0.6)
    axes.set_yticks(list(ticks), [names[c] if names else str(c) for c in ticks])
    axes.set_ylabel("label", fontsize=9, color=SOFT)


def caption(federation: Federation) -> str:
    """Two lines: what it is, and its numbers."""
    said, numbers = federation.provenance, statistics(federation)
    source, partition = said.get("source", {}).get("name", "federation"), said.get("partition", {})
    sizes, kinds, entropy = numbers["samples"], numbers["classes_per_client"], numbers["label_entropy"]
    least, most = sizes["min"], sizes["max"]
    each = f"{least}" if least == most else f"{least} to {most} (mean {sizes['mean']:.4g})"
    return (
        f"{source}, {partition.get('name', 'given')}{settings(partition)}: {numbers['clients']:,} clients\n"
        f"{each} training samples each, {kinds['mean']:.3g} of {numbers['classes']} labels, "
        f"label entropy {entropy['mean']:.2f} (all together {numbers['entropy_of_all']:.2f})"
    )


def settings(partition: Mapping[str, Any]) -> str:
    """The settings of a partition as one would write them.

    >>> settings({"name": "dirichlet", "alpha": 0.3})
    ' (alpha=0.3)'
    """
    given = [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in partition.items()
    ]
    return f" ({', '.join(given[1:])})" if given[1:] else ""
