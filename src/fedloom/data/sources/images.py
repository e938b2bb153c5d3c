"""From bytes to the images that models see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays


def to_images(raw: np.ndarray, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """uint8 [N, H, W] or [N, H, W, C] to float32 [N, C, H, W]: scaled to 0..1, then (x - mean) / std per channel.

    The only memory asked for is the result's. Without ``mean`` and ``std`` images stay in 0..1.

    >>> to_images(np.array([[[0, 255]]], np.uint8)).tolist()
    [[[[0.0, 1.0]]]]
    >>> to_images(np.array([[[0, 255]]], np.uint8), mean=[0.5], std=[0.5]).tolist()
    [[[[-1.0, 1.0]]]]
    """
    if raw.dtype != np.uint8 or raw.ndim not in (3, 4):
        raise DataError(f"images must be uint8 [N, H, W] or [N, H, W, C], not {raw.dtype} {list(raw.shape)}.")
    planes = raw[..., None] if raw.ndim == 3 else raw
    n, h, w, channels = planes.shape
    x = torch.empty(n, channels, h, w)
    for c in range(channels):
        np.copyto(x[:, c].numpy(), planes[..., c], casting="unsafe")
    x.div_(255)
    if mean:
        x.sub_(torch.tensor(mean)[:, None, None]).div_(torch.tensor(std)[:, None, None])
    return x


def image_arrays(
    raw: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    normalise: bool,
    mean: Sequence[float],
    std: Sequence[float],
) -> Arrays:
    """One split of labelled images; ``names`` are the classes."""
    x = to_images(raw, mean, std) if normalise else to_images(raw)
    constants = (tuple(mean), tuple(std)) if normalise else ((), ())
    return Arrays(x, torch.from_numpy(np.asarray(labels, dtype=np.int64)), len(names), tuple(names), *constants)
