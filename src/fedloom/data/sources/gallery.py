"""A picture of some samples of each class."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays

MOST = 40  # rows that can be seen
INK, SOFT = "#1f2a37", "#5b6776"


def gallery(arrays: Arrays, title: str, path: str | Path, each: int = 10) -> Path:
    """Draw the first samples of each class into ``path`` (its suffix says the format), one row a class.

    Images are shown as they were before they were normalised, sound as its wave, and text (where classes are
    characters) as a line. Of more than 40 classes, as many are shown, evenly spaced.

    Args:
        arrays: the samples.
        title: what stands above.
        path: where to.
        each: samples of a class.

    Raises:
        DataError: if there is nothing to see: rows of a table, or targets that are not one class each.
    """
    kind, y = kind_of(arrays), arrays.y.numpy()
    shown = np.unique(np.linspace(0, arrays.classes - 1, min(arrays.classes, MOST)).round().astype(int))
    each = 1 if kind == "text" else each
    wide = 8.5 if kind == "text" else 0.62 * each + 1.6
    figure = Figure(figsize=(wide, 0.62 * len(shown) * (0.5 if kind == "text" else 1) + 0.7), facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(shown), each, squeeze=False)
    for row, label in zip(grid, shown, strict=True):
        found = np.flatnonzero(y == label)[:each]
        for place, axes in enumerate(row):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if place < len(found):
                draw(axes, arrays.x[found[place]], kind, arrays)
        name = arrays.names[label] if arrays.names else str(label)
        row[0].set_ylabel(short(repr(name)[1:-1]), rotation=0, ha="right", va="center", fontsize=8, color=SOFT)
    figure.suptitle(title, fontsize=10, color=INK, x=0.02, ha="left")
    figure.subplots_adjust(left=1.5 / wide, right=0.995, bottom=0.005, top=1 - 0.45 / figure.get_figheight())
    figure.savefig(path, dpi=110)
    return Path(path)


def kind_of(arrays: Arrays) -> str:
    """What one sample is: image, sound or text."""
    shape = tuple(arrays.x.shape[1:])
    if arrays.y.is_floating_point() or arrays.y.ndim != 1:
        raise DataError("there is no picture of samples by class: the targets are not one class each.")
    if len(shape) == 3 and shape[0] in (1, 3):
        return "image"
    if len(shape) == 2 and shape[0] == 1:
        return "sound"
    if len(shape) == 1 and not arrays.x.is_floating_point() and arrays.names and max(map(len, arrays.names)) == 1:
        return "text"
    raise DataError(f"there is no picture of samples of shape {list(shape)}.")


def draw(axes: Axes, x: Tensor, kind: str, arrays: Arrays) -> None:
    """One sample."""
    if kind == "text":
        line = "".join(arrays.names[token] for token in x.tolist()).replace("\n", "⏎")
        axes.text(0, 0.5, line, family="monospace", fontsize=7, va="center", color=INK, parse_math=False)
    elif kind == "sound":
        axes.plot(x[0].numpy()[:: math.ceil(x.shape[1] / 2000)], linewidth=0.4, color="#1f6f8b")
        axes.set_ylim(-1, 1)
    else:
        if arrays.std:
            x = x * torch.tensor(arrays.std)[:, None, None] + torch.tensor(arrays.mean)[:, None, None]
        pixels = x.clamp(0, 1).permute(1, 2, 0).numpy()
        axes.imshow(pixels[..., 0] if len(x) == 1 else pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def short(name: str, most: int = 18) -> str:
    """A name that fits.

    >>> short("actinic keratoses and intraepithelial carcinoma")
    'actinic keratoses…'
    """
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"
