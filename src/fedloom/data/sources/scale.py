"""Columns of very different scale, and images of large values: warnings about them; standardisation of columns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError, outside
from fedloom.core.federation import Arrays
from fedloom.data.sources.base import Source
from fedloom.data.sources.formats import moments

LARGE, APART = 10, 100
"""Root mean square of a column, and the ratio of two columns' deviations, above which training suffers."""
MILD, ENOUGH = 3, 16
"""Root mean square of images up to which single large values are outliers, and the number of images looked at."""


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
    numbers = {"columns": chosen, "mean": mean.tolist(), "deviation": deviation.tolist()}

    def scaled(arrays: Arrays) -> Arrays:
        return replace(arrays, x=torch.from_numpy(rescaled(arrays.x.numpy(), numbers)))

    settings = {**source.settings, "standardised": numbers}
    return replace(source, train=scaled(source.train), test=scaled(source.test), settings=settings)


def rescaled(table: np.ndarray, numbers: Mapping[str, Any]) -> np.ndarray:
    """A table [N, D] with some ``columns`` scaled by their ``mean`` and ``deviation``, as float32.

    >>> rescaled(np.array([[5.0, 1.0]]), {"columns": [0], "mean": [3.0], "deviation": [2.0]}).tolist()
    [[1.0, 1.0]]
    """
    table, columns = table.astype(np.float64), list(numbers["columns"])
    table[:, columns] = (table[:, columns] - numbers["mean"]) / numbers["deviation"]
    return table.astype(np.float32)


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


def warn_of_pixels(x: Tensor, name: str) -> None:
    """Warn if inputs of two or more axes, such as images [N, C, H, W], hold large values; only some are read.

    Args:
        x: inputs [N, ...].
        name: name of the source.
    """
    if x.ndim < 3 or not x.is_floating_point() or not x.numel():
        return
    seen = x[:: -(-len(x) // ENOUGH)]
    if float(seen.abs().max()) > LARGE and float(seen.square().mean()) > MILD**2:
        warnings.warn(
            f"{name}: samples of shape {list(x.shape[1:])} hold values up to {float(seen.max()):.3g}, with which "
            "models train poorly; give images as 8-bit pixels (uint8), or scale them to 0..1, as dividing by 255 does.",
            stacklevel=outside(),
        )
