"""Figures of synthetic images, one row per class, and the value range of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.core.targets import one_class_each
from fedloom.data.plots import plot_samples

Range = tuple[tuple[float, ...], tuple[float, ...]]
"""The smallest and the largest pixel value, one number per channel."""

SLACK = 0.05  # of the range, by which values may lie outside


def value_range(arrays: Arrays) -> Range:
    """The value range of images: 0 and 1, normalised as the images are.

    low = (0 - mean) / std and high = (1 - mean) / std for each channel. Synthetic images are clipped to this range,
    which is also ``low`` and ``high`` of ``ConditionalVAE`` and ``ConditionalGAN``.

    Example:
        >>> y = torch.zeros(1, dtype=torch.int64)
        >>> value_range(Arrays(torch.zeros(1, 1, 2, 2), y, classes=1, mean=(0.5,), std=(0.25,)))
        ((-2.0,), (2.0,))
        >>> value_range(Arrays(torch.zeros(1, 3, 2, 2), y, classes=1))
        ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    """
    if arrays.x.ndim != 4:
        raise DataError(f"only images have a value range; a sample here has shape {list(arrays.x.shape[1:])}.")
    if not arrays.std:
        colours = arrays.x.shape[1]
        return (0.0,) * colours, (1.0,) * colours
    pairs = tuple(zip(arrays.mean, arrays.std, strict=True))
    return tuple(-m / s for m, s in pairs), tuple((1 - m) / s for m, s in pairs)


def grid(
    images: Tensor,
    labels: Tensor,
    path: str | Path,
    *,
    low: float | Sequence[float] = 0.0,
    high: float | Sequence[float] = 1.0,
    classes: int | None = None,
    names: Sequence[str] = (),
    title: str = "",
    each: int = 10,
) -> Path:
    """Draw images into ``path``, one row per class, with ``low`` as black and ``high`` as white.

    Figures with equal bounds share one scale; values are not stretched to the range of a particular set.

    Args:
        images: [M, 1 or 3, H, W].
        labels: class numbers [M].
        path: the file; its suffix is the format, png if it has none.
        low: smallest pixel value, one number or one per channel; see ``value_range``.
        high: largest pixel value, likewise.
        classes: number of rows; by default up to the largest label.
        names: names of the classes; by default their numbers.
        title: title of the figure.
        each: number of images per class, from the first on.

    Raises:
        DataError: for samples that are not images, labels that do not fit, or values outside the bounds by more than a
            twentieth of their width.
    """
    path = Path(path)
    path = path if path.suffix else path.with_suffix(".png")
    images, labels = images.detach().float().cpu(), labels.detach().cpu()
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise DataError(f"a figure needs images [M, 1 or 3, H, W], at least one, not {list(images.shape)}.")
    if not one_class_each(labels):
        raise DataError(f"a figure by class needs class numbers [M], not {labels.dtype} {list(labels.shape)}.")
    least, greatest = (_channels(value, images.shape[1]) for value in (low, high))
    width = greatest - least
    if not bool((width > 0).all()):
        raise DataError(f"low must be below high, not {low} and {high}.")
    shown = (images - least[:, None, None]) / width[:, None, None]
    a, b = (float(v) for v in shown.aminmax())
    if a < -SLACK or b > 1 + SLACK:
        limits = ", ".join(f"{float(v):.3g}" for v in images.aminmax())
        raise DataError(f"images must lie between {low} and {high}, but their extremes are {limits}.")
    count = classes or max(len(names), int(labels.max()) + 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    return plot_samples(Arrays(shown.clamp(0, 1), labels, count, tuple(names)), title, path, each)


def _channels(value: float | Sequence[float], colours: int) -> Tensor:
    values = torch.as_tensor(value, dtype=torch.float32).reshape(-1)
    if len(values) not in (1, colours):
        raise DataError(f"low and high are one number, or one for each of the {colours} channels.")
    return values.expand(colours)
