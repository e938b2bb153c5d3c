"""Omniglot: many handwritten characters with few drawings each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.ranges import Count
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.arrays import image_arrays
from fedloom.data.sources.files import Files, read_npz, reads

FILES = Files("Omniglot", (("omniglot.npz",),), "https://github.com/brendenlake/omniglot")
BACKGROUND, SIDE = 964, 105


@sources.register
@reads(FILES)
def omniglot(
    clients: Literal["alphabets", "drawers"] = "alphabets",
    subset: Literal["all", "background", "evaluation"] = "all",
    alphabets: Count | None = None,
    size: int = 28,
    test: int = 4,
    root: str | Path | None = None,
) -> Source:
    """Omniglot: 1623 characters of 50 alphabets, 20 drawings of each.

    Reads ``omniglot.npz``: ``x`` bool [characters, 20, 105, 105] (true: paper) and ``alphabet``, the alphabet of each
    character; the first 964 characters are the background set. A pixel is its fraction of ink, 0..1. Reading takes half
    a GB of memory.

    Args:
        clients: natural clients: ``alphabets``, or ``drawers`` (one person's drawings of one alphabet; people cannot be
            identified across alphabets).
        subset: all, background (30 alphabets) or evaluation (20 alphabets).
        alphabets: number of alphabets to keep, in the order of the file; by default all.
        size: height and width; the original drawings have 105.
        test: number of drawers whose drawings of each character are the common test set; with ``clients=drawers`` they
            have no training drawings.
    """
    [path] = FILES.obtain(root)
    arrays = read_npz(path, ["x", "alphabet"])
    x, spoken = arrays["x"], arrays["alphabet"].astype(str)
    if x.dtype != bool or x.ndim != 4 or x.shape[2:] != (SIDE, SIDE) or spoken.shape != x.shape[:1]:
        raise DataError(f"{path} does not hold drawings bool [characters, drawings, 105, 105] and their alphabets.")
    drawings = x.shape[1]
    if not 0 <= test < drawings or not 1 <= size <= SIDE:
        raise ConfigError(f"test must be 0 to {drawings - 1} and size 1 to {SIDE}, not {test} and {size}.")
    part = {"all": slice(None), "background": slice(BACKGROUND), "evaluation": slice(BACKGROUND, None)}[subset]
    x, spoken = x[part], spoken[part]
    if alphabets is not None:
        first = list(dict.fromkeys(spoken))[:alphabets]
        x, spoken = x[np.isin(spoken, first)], spoken[np.isin(spoken, first)]
    names = [f"{name} {np.count_nonzero(spoken[:row] == name) + 1}" for row, name in enumerate(spoken)]
    y = np.repeat(np.arange(len(x)), drawings)
    who = np.repeat(spoken, drawings)
    drawer = np.tile(np.arange(drawings), len(x))
    if clients == "drawers":
        who = np.array([f"{name}, drawer {d + 1:02}" for name, d in zip(who, drawer, strict=True)])
    tests = drawer >= drawings - test
    ink = downscale(x.reshape(-1, SIDE, SIDE), size)
    settings = {"clients": clients, "subset": subset, "alphabets": alphabets, "size": size, "test": test}
    return Source(
        name="omniglot",
        train=image_arrays(ink[~tests], y[~tests], names, False, (), ()),
        test=image_arrays(ink[tests], y[tests], names, False, (), ()),
        licence="MIT",
        citation=bibtex("lake2015human"),
        **natural_clients(who[~tests], who[tests]),
        settings=settings,
    )


def downscale(paper: np.ndarray, size: int) -> np.ndarray:
    """Drawings bool [N, 105, 105] (true: paper) as ink uint8 [N, size, size], by area averaging.

    >>> downscale(np.zeros((1, 105, 105), bool), 28).min()
    np.uint8(255)
    """
    edge = np.linspace(0, SIDE, size + 1)
    place = np.arange(SIDE)
    cover = np.minimum(edge[1:, None], place + 1) - np.maximum(edge[:-1, None], place)
    cover = (cover.clip(0) * size / SIDE).astype(np.float32)  # [size, 105], rows add up to 1
    out = np.empty((len(paper), size, size), np.uint8)
    for start in range(0, len(paper), 1000):
        ink = 1 - paper[start : start + 1000].astype(np.float32)
        out[start : start + 1000] = np.rint(255 * (cover @ ink @ cover.T)).clip(0, 255)
    return out
