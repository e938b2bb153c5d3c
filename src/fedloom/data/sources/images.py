"""Images: decoding of image files, and conversion of bytes to normalised tensors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.core.files import check_memory, readable
from fedloom.data.sources.files import with_progress
from fedloom.data.sources.formats import cached, stamp_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
_BYTES: ContextVar[bool] = ContextVar("images stay bytes", default=False)


@contextmanager
def as_bytes() -> Iterator[None]:
    """Make data sources leave images as bytes, uint8 [N, C, H, W], for readers that convert them by mini-batch.

    ``normalised`` then gives what the source would have given, bit for bit.
    """
    token = _BYTES.set(True)
    try:
        yield
    finally:
        _BYTES.reset(token)


def as_stored(raw: np.ndarray, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """Images as a source keeps them: ``to_images``, or within ``as_bytes`` the same bytes as [N, C, H, W], not copied.

    >>> with as_bytes():
    ...     as_stored(np.array([[[0, 255]]], np.uint8)).tolist()
    [[[[0, 255]]]]
    """
    if not _BYTES.get():
        return to_images(raw, mean, std)
    with warnings.catch_warnings():  # a file that is mapped into memory is only read
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(_planes(raw)).permute(0, 3, 1, 2)


def normalised(x: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """Bytes of images, uint8 [N, C, H, W], as float32 in 0..1, then (x - mean) / std per channel if given.

    >>> normalised(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), [0.5], [0.5]).tolist()
    [[[[-1.0, 1.0]]]]
    """
    return _scaled(x.to(torch.float32), mean, std)


def to_images(raw: np.ndarray, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """uint8 [N, H, W] or [N, H, W, C] to float32 [N, C, H, W] in 0..1, then (x - mean) / std per channel if given.

    No memory beyond the result is allocated.

    Raises:
        DataError: for arrays of another type or shape.

    >>> to_images(np.array([[[0, 255]]], np.uint8)).tolist()
    [[[[0.0, 1.0]]]]
    >>> to_images(np.array([[[0, 255]]], np.uint8), mean=[0.5], std=[0.5]).tolist()
    [[[[-1.0, 1.0]]]]
    """
    planes = _planes(raw)
    n, h, w, channels = planes.shape
    x = torch.empty(n, channels, h, w)
    for c in range(channels):
        np.copyto(x[:, c].numpy(), planes[..., c], casting="unsafe")
    return _scaled(x, mean, std)


def _planes(raw: np.ndarray) -> np.ndarray:
    """Images as uint8 [N, H, W, C]."""
    if raw.dtype != np.uint8 or raw.ndim not in (3, 4):
        raise DataError(f"images must be uint8 [N, H, W] or [N, H, W, C], not {raw.dtype} {list(raw.shape)}.")
    return raw[..., None] if raw.ndim == 3 else raw


def _scaled(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels 0..255 [N, C, H, W] to 0..1, then normalised per channel, in place."""
    x.div_(255)
    if mean:
        x.sub_(x.new_tensor(mean)[:, None, None]).div_(x.new_tensor(std)[:, None, None])
    return x


def image_arrays(
    raw: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    normalise: bool,
    mean: Sequence[float],
    std: Sequence[float],
) -> Arrays:
    """Labelled images of one split; ``names`` are the classes."""
    mean, std = (tuple(mean), tuple(std)) if normalise else ((), ())
    y = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    return Arrays(as_stored(raw, mean, std), y, len(names), tuple(names), mean, std)


def folders_in(folder: Path) -> list[str]:
    """The names of a folder's folders, sorted, without hidden ones.

    Raises:
        DataError: for a name that is not text, with which no class or client could be written down.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"{folder} holds a folder {name!a}, whose name is not in UTF-8; rename it.") from None
    return names


def by_class(folder: Path, inner: str = "") -> tuple[list[Path], np.ndarray, list[str]]:
    """Image paths, class numbers [N] and class names of a folder with one sub-folder per class, in order of names.

    Args:
        folder: contains the classes' folders.
        inner: sub-folder of a class's folder that holds its images, if any.

    Raises:
        DataError: if there are no classes, or a class has no images.
    """
    names = folders_in(folder)
    if not names:
        raise DataError(f"{folder} holds no folders, but there should be one for each class.")
    found = []
    for home in (folder / name / inner for name in names):
        if not home.is_dir():
            raise DataError(f"{home.parent} has no folder {inner!r}.")
        paths = sorted(e.name for e in os.scandir(home) if e.name.lower().endswith(SUFFIXES) and e.name[0] != ".")
        if not paths:
            raise DataError(f"{home} holds no images ({', '.join(SUFFIXES)}).")
        found.append([home / path for path in paths])
    return [path for paths in found for path in paths], np.repeat(np.arange(len(found)), list(map(len, found))), names


def read_images(
    title: str, paths: Sequence[Path], size: int | None, cache: Path, *, crop: bool = False, resize: bool = True
) -> np.ndarray:
    """Image files as one array uint8 [N, size, size, 3], decoded once and cached.

    Args:
        title: name of the data set in the progress bar and in errors.
        paths: the files.
        size: height and width in pixels.
        cache: npz file for the decoded images, renewed if the files or the size change.
        crop: whether to keep the aspect ratio and cut out the centre; otherwise both sides are scaled to ``size``.
        resize: whether images of another size are resized or rejected.

    Raises:
        DataError: if an image is missing, damaged or of a rejected size, or memory cannot hold them.
    """
    if not size or size < 1:
        raise DataError(f"{title}: images need a size of at least 1 pixel, not {size}.")
    check_memory(title, (1 if _BYTES.get() else 5) * len(paths) * size * size * 3)
    if lost := next((path for path in paths if not path.is_file()), None):
        raise DataError(f"{title} is incomplete: there is no file {lost}.")

    def make() -> np.ndarray:
        array = np.empty((len(paths), size, size, 3), np.uint8)
        for row, path in enumerate(with_progress(paths, title)):
            array[row] = read_image(path, size, crop, resize)
        return array

    return cached(cache, stamp_of(paths, size, crop), make)


def in_bytes(picture: Any) -> Any:
    """Convert a PIL image of 16 bits per pixel to 8, where PIL itself would clip; others are unchanged.

    Raises:
        DataError: for pixels that are floats, of which PIL would make black or white.
    """
    from PIL import Image

    if picture.mode == "F":
        which = getattr(picture, "filename", None) or "an image"
        raise DataError(
            f"{which} has floats for pixels, whose range is not known; save it with 8 or 16 bits per pixel."
        )
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.asarray(picture).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))


def read_image(path: Path, size: int, crop: bool = False, resize: bool = True) -> np.ndarray:
    """One image as RGB, uint8 [size, size, 3]."""
    from PIL import Image

    try:
        with Image.open(readable(path)) as file:
            wide, high = file.size
            if (wide, high) != (size, size) and not resize:
                raise DataError(f"{path} is {wide} by {high} pixels, but {size} by {size} are expected.")
            picture = in_bytes(file).convert("RGB")
            if crop and wide != high:
                scale = size / min(wide, high)
                sides = max(size, round(wide * scale)), max(size, round(high * scale))
                left, top = (sides[0] - size) // 2, (sides[1] - size) // 2
                picture = picture.resize(sides).crop((left, top, left + size, top + size))
            elif picture.size != (size, size):
                picture = picture.resize((size, size))
            return np.asarray(picture)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # each decoder fails in its own ways
        raise DataError(f"{path} is damaged or not an image ({error}).") from error
