"""Folders of images with one sub-folder per class, larger than memory if need be."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.arrays import inputs
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import with_progress
from fedloom.data.sources.formats import stamp_of
from fedloom.data.sources.images import by_class, read_image


@sources.register
def folder(path: str, size: int = 64, crop: bool = True) -> Source:
    """Images by class in folders: ``train/CLASS/*.png`` and ``test/CLASS/*.png``, or ``CLASS/*.png`` for no test set.

    Images are decoded once, one after the other, to float32 in 0..1, and kept beside the originals in a memory-mapped
    ``fedloom-*.npy`` (12 · size² bytes each); only what is used is read, so that the set may be larger than memory.

    Args:
        path: the folder.
        size: height and width in pixels.
        crop: whether to keep the aspect ratio and cut out the centre; otherwise both sides are scaled to ``size``.
    """
    home = Path(path).expanduser().resolve()
    if not home.is_dir():
        raise DataError(f"there is no folder {home}.")
    if size < 1:
        raise DataError(f"images need a size of at least 1 pixel, not {size}.")
    pools = [home / part for part in ("train", "test") if (home / part).is_dir()]
    if not pools or pools[0].name != "train":
        pools = [home]
    found = [by_class(pool) for pool in pools]
    names = found[0][2]
    if len(found) > 1 and found[1][2] != names:
        raise DataError(f"{home}: train and test have different classes.")
    arrays = []
    for pool, (paths, labels, _) in zip(pools, found, strict=True):
        x = decoded(paths, pool, size, crop)
        arrays.append(Arrays(x, torch.from_numpy(np.asarray(labels, np.int64)), len(names), tuple(names)))
    train = arrays[0]
    empty = Arrays(train.x[:0], train.y[:0], len(names), tuple(names))
    test = arrays[1] if len(arrays) > 1 else empty
    return Source(home.name, train, test, "not stated", "", settings={"path": str(home), "size": size, "crop": crop})


def decoded(paths: list[Path], pool: Path, size: int, crop: bool) -> Tensor:
    """Images as float32 [N, 3, size, size] in a memory-mapped file, which is made if it does not exist.

    Raises:
        DataError: if an image is damaged, or the file cannot be written.
    """
    target = pool / f"fedloom-{stamp_of(paths, size, crop)}.npy"
    if not target.is_file():
        part = target.with_name(f".{target.name}.part")
        try:
            array = np.lib.format.open_memmap(part, "w+", np.float32, (len(paths), 3, size, size))
            for row, path in enumerate(with_progress(paths, pool.name)):
                array[row] = read_image(path, size, crop).transpose(2, 0, 1) / np.float32(255)
            array.flush()
            del array
            os.replace(part, target)
        except OSError as error:
            raise DataError(f"{target} cannot be written ({error.strerror or error}).") from error
        finally:
            part.unlink(missing_ok=True)
    return inputs(np.load(target, mmap_mode="r"))
