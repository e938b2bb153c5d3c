"""Folders of images with one sub-folder per class, larger than memory if need be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.core.files import mapped, whole_file
from fedloom.data.sources.arrays import inputs
from fedloom.data.sources.base import Source, natural_clients, sources
from fedloom.data.sources.files import with_progress
from fedloom.data.sources.formats import stamp_of
from fedloom.data.sources.images import by_class, folders_in, read_image


@sources.register
def folder(path: str | Path, size: int = 64, crop: bool = True, by_client: bool = False) -> Source:
    """Images by class in folders: ``train/CLASS/*.png`` and ``test/CLASS/*.png``, or ``CLASS/*.png`` for no test set.

    With ``by_client`` there is a folder of classes for each natural client: ``train/CLIENT/CLASS/*.png`` and, for what
    is tested, ``test/CLIENT/CLASS/*.png``, or ``CLIENT/CLASS/*.png``. A client may lack classes.

    Images are decoded once, one after the other, to float32 in 0..1, and kept beside the originals in a memory-mapped
    ``fedloom-*.npy`` (12 · size² bytes each); only what is used is read, so that the set may be larger than memory.

    Args:
        path: the folder.
        size: height and width in pixels.
        crop: whether to keep the aspect ratio and cut out the centre; otherwise both sides are scaled to ``size``.
        by_client: whether the outer folders are natural clients, and the classes' folders are in these.
    """
    home = Path(path).expanduser().resolve()
    if not home.is_dir():
        raise DataError(f"there is no folder {home}.")
    if size < 1:
        raise DataError(f"images need a size of at least 1 pixel, not {size}.")
    pools = [home / part for part in ("train", "test") if (home / part).is_dir()]
    if not pools or pools[0].name != "train":
        pools = [home]
    found = [listed(pool, by_client) for pool in pools]
    names = sorted(set(found[0].classes))
    if strange := sorted(set(found[-1].classes) - set(names)):
        raise DataError(f"{home}: test has the class {strange[0]!r}, which train has not.")
    splits = []
    for pool, images in zip(pools, found, strict=True):
        y = torch.from_numpy(np.searchsorted(names, images.classes).astype(np.int64))
        splits.append(Arrays(decoded(images.paths, pool, size, crop), y, len(names), tuple(names)))
    train, ids = splits[0], [images.clients for images in found]
    test = splits[1] if len(splits) > 1 else Arrays(train.x[:0], train.y[:0], len(names), tuple(names))
    settings = {"path": str(home), "size": size, "crop": crop} | ({"by_client": True} if by_client else {})
    clients = natural_clients(ids[0], ids[1] if len(ids) > 1 else None) if by_client else {}
    return Source(home.name, train, test, "not stated", "", settings=settings, **clients)


class Listed(NamedTuple):
    """Image files, with the names of each one's class and client."""

    paths: list[Path]
    classes: list[str]
    clients: list[str]


def listed(pool: Path, by_client: bool) -> Listed:
    """The images of a folder, in order of names, client by client.

    Raises:
        DataError: if a class has no images, or the folders of classes are in others, or not, against ``by_client``.
    """
    outer = folders_in(pool)
    if not by_client and any(entry.is_dir() for name in outer for entry in os.scandir(pool / name)):
        raise DataError(
            f"{pool}: the folders in it hold folders; if they are those of clients, with one for each class, set "
            "data.by_client=true."
        )
    found = Listed([], [], [])
    for client in outer if by_client else ("",):
        paths, labels, names = by_class(pool / client)
        found.paths.extend(paths)
        found.classes.extend(names[label] for label in labels)
        found.clients.extend([client] * len(paths))
    return found


def decoded(paths: list[Path], pool: Path, size: int, crop: bool) -> Tensor:
    """Images as float32 [N, 3, size, size] in a memory-mapped file, which is made if it does not exist.

    Raises:
        DataError: if an image is damaged, or the file cannot be written.
    """
    target = pool / f"fedloom-{stamp_of(paths, size, crop)}.npy"
    if not target.is_file():
        try:
            with whole_file(target) as file:
                array = mapped(file, np.float32, (len(paths), 3, size, size))
                for row, path in enumerate(with_progress(paths, pool.name)):
                    array[row] = read_image(path, size, crop).transpose(2, 0, 1) / np.float32(255)
                array.flush()
                del array
        except OSError as error:
            raise DataError(f"{target} cannot be written ({error.strerror or error}).") from error
    return inputs(np.load(target, mmap_mode="r"))
