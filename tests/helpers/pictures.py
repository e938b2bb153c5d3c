"""Small pictures in the files of MNIST and its like."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

CODES = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    blob = struct.pack(f">4B{array.ndim}I", 0, 0, CODES[array.dtype.name], array.ndim, *array.shape)
    blob += array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(blob) if path.suffix == ".gz" else blob)


def write_split(folder: Path, split: str, images: np.ndarray, labels: np.ndarray, suffix: str = "") -> None:
    """``split`` is train or t10k."""
    write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", images.astype(np.uint8))
    write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", labels.astype(np.uint8))


def look_alike(
    folder: Path, train: int, test: int, stride: int = 1, first: int = 0, columns: slice = slice(None)
) -> None:
    """A folder that looks like MNIST: noise, in which a class has a bright row, ``first + stride * label``."""
    random = np.random.default_rng(0)
    for split, samples in (("train", train), ("t10k", test)):
        labels = np.arange(samples) % 10
        images = random.integers(0, 50, (samples, 28, 28))
        images[np.arange(samples), first + stride * labels, columns] += 200
        write_split(folder, split, images, labels)
