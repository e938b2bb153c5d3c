"""Columns of very different scale: a warning about them, and their standardisation."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.base import Source
from fedloom.data.sources.formats import moments

LARGE, APART = 10, 100
"""Root mean square of a column, and the ratio of two columns' deviations, above which training suffers."""


def standardised(source: Source, columns: Sequence[int] | None = None) -> Source:
    """A source with columns scaled by the mean and deviation of the pooled training rows; constant ones become 0.

    Test rows are scaled by the same numbers, which are kept in ``settings["standardised"]`` for later inputs.

    Args:
        source: a source with inputs [N, D].
        columns: the columns to scale; by default all.

    Raises:
        DataError: if the inputs are not a table of numbers.
    """
    x = source.train.x
    if x.ndim != 2:
        raise DataError(
            f"{source.name}: standardise=true is for samples of plain numbers [D], not of shape {list(x.shape[1:])}; "
            "leave it out."
        )
    chosen = list(range(x.shape[1]) if columns is None else columns)
    mean, deviation = moments(x.numpy()[:, chosen].astype(np.float64))

    def scaled(arrays: Arrays) -> Arrays:
        table = arrays.x.numpy().astype(np.float64)
        table[:, chosen] = (table[:, chosen] - mean) / deviation
        return replace(arrays, x=torch.from_numpy(table.astype(np.float32)))

    numbers = {"columns": chosen, "mean": mean.tolist(), "deviation": deviation.tolist()}
    settings = {**source.settings, "standardised": numbers}
    return replace(source, train=scaled(source.train), test=scaled(source.test), settings=settings)


def warn_of_scales(source: Source, names: Sequence[str], columns: Sequence[int]) -> None:
    """Warn if a column of numbers is far from mean 0 and deviation 1, or much wider than another.

    Args:
        source: a source with inputs [N, D].
        names: names of all D columns.
        columns: the columns of numbers.
    """
    table = source.train.x.numpy()[:, list(columns)].astype(np.float64)
    mean, deviation = table.mean(0), table.std(0)
    varied = np.flatnonzero(np.ptp(table, 0) > 0)
    if not len(varied):
        return
    size = np.hypot(mean, deviation)
    largest = int(varied[size[varied].argmax()])
    if size[largest] > LARGE or deviation[varied].max() > APART * deviation[varied].min():
        warnings.warn(
            f"{source.name}: column {names[columns[largest]]!r} has mean {mean[largest]:.3g} and standard deviation "
            f"{deviation[largest]:.3g}, with which models train poorly; data.standardise=true (standardise=True in "
            "Python) scales all columns of numbers.",
            stacklevel=outside(),
        )


def outside() -> int:
    """The ``stacklevel`` of the caller's first caller outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("fedloom."):
        frame, level = frame.f_back, level + 1
    return level
