"""Folders of picture files, read into one array."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.sources.archive import kept, stamp_of
from fedloom.data.sources.progress import with_progress

SUFFIXES = (".png", ".jpg", ".jpeg")


def pictures(folder: Path) -> list[Path]:
    """The picture files in a folder, by name; files that a desktop leaves behind are passed over.

    Raises:
        DataError: if there are none.
    """
    names = sorted(e.name for e in os.scandir(folder) if e.name.lower().endswith(SUFFIXES) and e.name[0] != ".")
    if not names:
        raise DataError(f"{folder} holds no pictures ({', '.join(SUFFIXES)}).")
    return [folder / name for name in names]


def by_class(folder: Path, inner: str = "") -> tuple[list[Path], np.ndarray, list[str]]:
    """Pictures of a folder that has a folder for each class: paths, class numbers and the classes' names.

    Args:
        folder: what holds the classes' folders.
        inner: where in a class's folder its pictures lie, if not directly.

    Raises:
        DataError: if there are no classes, or one without pictures.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder} holds no folders, but there should be one for each class.")
    for name in names:
        if not (folder / name / inner).is_dir():
            raise DataError(f"{folder / name} has no folder {inner!r}.")
    found = [pictures(folder / name / inner) for name in names]
    return [path for paths in found for path in paths], np.repeat(np.arange(len(found)), list(map(len, found))), names


def read_pictures(
    title: str, paths: Sequence[Path], size: int | None, cache: Path, *, crop: bool = False, resize: bool = True
) -> np.ndarray:
    """Pictures as one array uint8 [N, size, size, 3], decoded once and kept in ``cache``.

    Args:
        title: what the bar and errors call them.
        paths: the files.
        size: height and width.
        cache: an npz file, written in one step; made again when the files or the size change.
        crop: keep the aspect ratio: the shorter side becomes ``size``, and the middle is cut out. Otherwise both sides
            become ``size``.
        resize: whether pictures of another size are resized, or refused.

    Raises:
        DataError: for a picture that is missing, damaged or of a size that is refused; or if memory cannot hold them.
    """
    if not size or size < 1:
        raise DataError(f"{title}: pictures need a size of at least 1 pixel, not {size}.")
    fits(title, 5 * len(paths) * size * size * 3)
    if lost := next((path for path in paths if not path.is_file()), None):
        raise DataError(f"{title} is not whole: there is no file {lost}.")

    def make() -> np.ndarray:
        array = np.empty((len(paths), size, size, 3), np.uint8)
        for row, path in enumerate(with_progress(paths, title)):
            array[row] = read_picture(path, size, crop, resize)
        return array

    return kept(cache, stamp_of(paths, size, crop), make)


def read_picture(path: Path, size: int, crop: bool = False, resize: bool = True) -> np.ndarray:
    """One picture, uint8 [size, size, 3]; grey ones get three equal channels."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            wide, high = file.size
            if (wide, high) != (size, size) and not resize:
                raise DataError(f"{path} is {wide} by {high} pixels, but {size} by {size} are expected.")
            picture = file.convert("RGB")
            if crop and wide != high:
                scale = size / min(wide, high)
                sides = max(size, round(wide * scale)), max(size, round(high * scale))
                left, top = (sides[0] - size) // 2, (sides[1] - size) // 2
                picture = picture.resize(sides).crop((left, top, left + size, top + size))
            elif picture.size != (size, size):
                picture = picture.resize((size, size))
            return np.asarray(picture)
    except DataError:
        raise
    except Exception as error:  # each decoder fails in its own ways
        raise DataError(f"{path} is damaged or not a picture ({error}).") from error


def fits(title: str, needed: int) -> None:
    """Refuse what this machine's memory cannot hold, before any of it is read.

    Raises:
        DataError: how much is needed, and how much there is.
    """
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no way to know here
        return
    if needed > there:
        raise DataError(
            f"{title} needs {needed / 1e9:.1f} GB of memory, but there are {there / 1e9:.1f} GB; "
            "choose smaller pictures or fewer of them."
        )
