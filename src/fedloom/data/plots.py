"""Plots of a federation's labels by client, and of samples by class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from fedloom.base.errors import DataError, import_extra
from fedloom.base.files import whole_file
from fedloom.core.federation import Arrays, Federation
from fedloom.data.augment import Scale
from fedloom.data.federate import label_counts, statistics

import_extra("plots", "matplotlib", "a picture")

from matplotlib import rc_context  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import StrMethodFormatter  # noqa: E402

MAX_CIRCLES = 40  # clients with a column of circles each; more are drawn as a heat map
MAX_COLUMNS = 1000  # of a heat map; more would be finer than its pixels
MAX_ROWS = 40  # classes in a plot of samples
INK, SOFT, GRID, ACCENT, QUIET = "#1f2a37", "#5b6776", "#e6e9ee", "#1f6f8b", "#a9cad5"
PLAIN_TEXT = rc_context({"text.parse_math": False})  # names may hold dollar signs
SHADES = LinearSegmentedColormap.from_list("share", ["#f7f8fa", "#c5dde4", "#6fb0c2", ACCENT, "#0d3a4c"])


@PLAIN_TEXT
def plot_labels(federation: Federation, path: str | Path) -> Path:
    """Plot which client holds which labels, with the clients' sizes above; the suffix of ``path`` sets the format.

    Up to 40 clients are columns of circles whose area is the number of samples. More clients are columns of a heat map
    of label shares, ordered by label; beyond 1000, neighbours are averaged.

    Raises:
        DataError: if the targets are not class numbers.
        OSError: if the file cannot be written; none is left behind.
    """
    if not federation.train.arrays.has_classes:
        raise DataError("the plot of labels needs class numbers, which this federation does not have.")
    clients, classes = len(federation), federation.classes
    figure = Figure(figsize=(10.5, min(2.6 + max(0.26 * classes, 2.2), 11)), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(2, 1, height_ratios=[1, max(0.26 * classes, 2.2) / 0.8])
    below = figure.add_subplot(rows[1])
    above = figure.add_subplot(rows[0], sharex=below)
    if clients <= MAX_CIRCLES:
        circles(federation, above, below)
    else:
        heatmap(federation, above, below, figure)
    label_axis(federation, below)
    for axes in (above, below):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8, colors=SOFT)
    above.tick_params(labelbottom=False)
    above.set_ylabel("samples", fontsize=8, color=SOFT)
    figure.align_ylabels()
    figure.suptitle(caption(federation), x=0.01, ha="left", fontsize=11, color=INK)
    return save(figure, path, dpi=150)


def save(figure: Figure, path: str | Path, dpi: int) -> Path:
    """Write a figure into a file whole; its suffix sets the format, png if it has none."""
    path = Path(path)
    with whole_file(path) as file:
        figure.savefig(file, dpi=dpi, format=path.suffix.lstrip(".") or "png")
    return path


def circles(federation: Federation, above: Axes, below: Axes) -> None:
    """Draw one column per client and one circle per label, with its area proportional to the number of samples."""
    client, label, count = label_counts(federation.train)
    clients, classes = len(federation), federation.classes
    widest = min(620 / clients, 0.7 * 72 * 0.26 * max(1.0, 8.5 / classes)) if clients > 1 else 18.0  # points
    below.scatter(client, label, s=widest**2 * count / count.max(), color=ACCENT, alpha=0.85, linewidths=0)
    below.set_xlim(-0.6, clients - 0.4)
    has_names = bool(federation.names) and max(map(len, federation.names)) <= 12
    ticks = list(federation.names) if has_names else [str(client) for client in range(clients)]
    below.set_xticks(range(clients), ticks, rotation=90 if has_names and clients > 8 else 0)
    below.grid(color=GRID, linewidth=0.7)
    below.set_axisbelow(True)
    below.set_xlabel(f"client   (largest circle: {count.max()} samples)", fontsize=9, color=SOFT)
    above.bar(range(clients), federation.train.index.sizes, width=0.6, color=QUIET)


def heatmap(federation: Federation, above: Axes, below: Axes, figure: Figure) -> None:
    """Draw one column of label shares per client or group of neighbours, ordered by label."""
    client, label, count = label_counts(federation.train)
    sizes = federation.train.index.sizes
    clients, classes = len(sizes), federation.classes
    order = order_by_label(client, label, count, sizes)
    column = np.empty(clients, dtype=np.int64)
    columns = min(clients, MAX_COLUMNS)
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


def order_by_label(client: np.ndarray, label: np.ndarray, count: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Clients sorted by their main label, its share (in tenths) and their second label; int [K]."""
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
    """Label the rows with class names or numbers, at most 30 of them."""
    classes, names = federation.classes, federation.train.arrays.names
    step = math.ceil(classes / 30)
    ticks = range(0, classes, step)
    axes.set_ylim(classes - 0.4, -0.6)
    axes.set_yticks(list(ticks), [names[c] if names else str(c) for c in ticks])
    axes.set_ylabel("label", fontsize=9, color=SOFT)


def caption(federation: Federation) -> str:
    """A title of two lines: data and partition, and their statistics."""
    about, numbers = federation.provenance, statistics(federation)
    source, partition = about.get("source", {}).get("name", "federation"), about.get("partition", {})
    sizes, kinds, entropy = numbers["samples"], numbers["classes_per_client"], numbers["label_entropy"]
    least, most = sizes["min"], sizes["max"]
    per_client = f"{least}" if least == most else f"{least} to {most} (mean {sizes['mean']:.4g})"
    return (
        f"{source}, {partition.get('name', 'given')}{settings(partition)}: {numbers['clients']:,} clients\n"
        f"{per_client} training samples each, {kinds['mean']:.3g} of {numbers['classes']} labels, "
        f"label entropy {entropy['mean']:.2f} (all together {numbers['entropy_of_all']:.2f})"
    )


def settings(partition: Mapping[str, Any]) -> str:
    """The settings of a partition in parentheses.

    >>> settings({"name": "dirichlet", "alpha": 0.3})
    ' (alpha=0.3)'
    """
    words = [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in partition.items()
    ]
    return f" ({', '.join(words[1:])})" if words[1:] else ""


@PLAIN_TEXT
def plot_samples(arrays: Arrays, title: str, path: str | Path, per_class: int = 10) -> Path:
    """Plot the first samples of each class into ``path``, one row per class; its suffix sets the format.

    Images are shown before normalisation, sound as a waveform, and text (where classes are characters) as a line. Of
    more than 40 classes, 40 evenly spaced ones are shown.

    Args:
        arrays: the samples.
        title: the figure's title.
        path: the file to write.
        per_class: samples per class; text gets one.

    Raises:
        DataError: if samples cannot be drawn (rows of a table), or targets are not one class number each.
        OSError: if the file cannot be written; none is left behind.
    """
    kind, y = kind_of(arrays), arrays.y.numpy()
    labels = np.unique(np.linspace(0, arrays.classes - 1, min(arrays.classes, MAX_ROWS)).round().astype(int))
    count = 1 if kind == "text" else per_class
    width = 8.5 if kind == "text" else 0.62 * count + 1.6
    figure = Figure(figsize=(width, 0.62 * len(labels) * (0.5 if kind == "text" else 1) + 0.7), facecolor="white")
    FigureCanvasAgg(figure)
    for axes, label in zip(figure.subplots(len(labels), squeeze=False)[:, 0], labels, strict=True):
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        draw_samples(axes, arrays.x[np.flatnonzero(y == label)[:count]], count, kind, arrays)
        name = arrays.names[label] if arrays.names else str(label)
        axes.set_ylabel(truncate(repr(name)[1:-1]), rotation=0, ha="right", va="center", fontsize=8, color=SOFT)
    figure.suptitle(title, fontsize=10, color=INK, x=0.02, ha="left")
    figure.subplots_adjust(left=1.5 / width, right=0.995, bottom=0.005, top=1 - 0.45 / figure.get_figheight())
    return save(figure, path, dpi=110)


def kind_of(arrays: Arrays) -> str:
    """The kind of one sample: image, sound or text."""
    shape = tuple(arrays.x.shape[1:])
    if not arrays.has_classes:
        raise DataError("samples cannot be drawn by class: the targets are not one class number each.")
    if len(shape) == 3 and shape[0] in (1, 3):
        return "image"
    if len(shape) == 2 and shape[0] == 1:
        return "sound"
    if len(shape) == 1 and not arrays.x.is_floating_point() and arrays.names and max(map(len, arrays.names)) == 1:
        return "text"
    raise DataError(f"samples of shape {list(shape)} cannot be drawn.")


def draw_samples(axes: Axes, x: Tensor, places: int, kind: str, arrays: Arrays) -> None:
    """Draw samples [N, ...] of one class side by side, N ≤ places."""
    if kind == "text":
        lines = ["".join(arrays.names[token] for token in tokens).replace("\n", "⏎") for tokens in x.tolist()]
        axes.text(0, 0.5, "".join(lines), family="monospace", fontsize=7, va="center", color=INK)
    elif kind == "sound":
        for place, wave in enumerate(x[:, 0, :: math.ceil(x.shape[2] / 2000)].numpy()):
            axes.plot(np.linspace(place, place + 0.95, len(wave)), wave, linewidth=0.4, color=ACCENT)
        axes.set(xlim=(0, places), ylim=(-1, 1))
    else:
        x = Scale.of(x, arrays.mean, arrays.std).pixels(x)
        strip = pad(x.clamp(0, 1), (0, math.ceil(x.shape[3] / 20), 0, 0, 0, 0, 0, places - len(x)), value=1.0)
        pixels = strip.permute(2, 0, 3, 1).flatten(1, 2).expand(-1, -1, 3).numpy()  # [H, N·W, 3], white between
        axes.imshow(pixels, interpolation="nearest")


def truncate(name: str, most: int = 18) -> str:
    """The beginning of a long name.

    >>> truncate("actinic keratoses and intraepithelial carcinoma")
    'actinic keratoses…'
    """
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"
