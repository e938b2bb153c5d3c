"""FEMNIST: handwritten digits and letters by writer, as LEAF makes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources import leaf
from fedloom.data.sources.base import Source, numbered, sources
from fedloom.data.sources.emnist import CITATION, CLASSES, LICENCE
from fedloom.data.sources.files import reads

FILES = leaf.leaf_files("FEMNIST", "femnist")


@sources.register
@reads(FILES)
def femnist(root: str | None = None) -> Source:
    """FEMNIST (LEAF): handwritten digits and letters, 28x28, 62 classes, by writer.

    Reads LEAF's ``femnist/data/{train,test}/*.json`` or, not yet split, ``femnist/data/all_data/*.json``. Pixels are
    0..1 as LEAF leaves them: 1 is paper, 0 is ink. Writers are the natural clients; if LEAF has split by sample, a
    client's own test samples are ``held_out=natural``. Without a split there is no common test set.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
    """
    folders = FILES.obtain(root)
    train, writers = read_writers(folders[0])
    test, writers_test = read_writers(folders[1]) if len(folders) > 1 else (train.take(np.zeros(0, np.int64)), [])
    groups, groups_test, names = numbered(np.array(writers), np.array(writers_test, dtype=str))
    return Source(
        name="femnist",
        train=train,
        test=test,
        licence=f"{LICENCE}; {leaf.LICENCE}",
        citation=f"{CITATION}\n{leaf.CITATION}",
        groups=groups,
        groups_test=groups_test if len(test) else None,
        group_names=tuple(f"writer {name}" for name in names),
    )


def read_writers(folder: Path) -> tuple[Arrays, list[str]]:
    """Images, labels and writers of a folder of LEAF's files."""
    images, labels, writers = [], [], []
    for user, x, y in leaf.read_leaf(folder, "FEMNIST"):
        if not x:
            continue
        try:
            rows = np.array(x, dtype=np.float32)
            labels.append(np.array(y, dtype=np.int64))
        except (TypeError, ValueError) as error:
            raise DataError(f"{folder}: writer {user!r} has an image that is not 784 numbers ({error}).") from error
        if rows.ndim != 2 or rows.shape[1] != 784:
            raise DataError(f"{folder}: writer {user!r} has images of {rows[0].size} numbers, not 784.")
        images.append(rows.reshape(-1, 1, 28, 28))
        writers += [user] * len(rows)
    if not images:
        raise DataError(f"{folder} holds no images.")
    x, y = torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels))
    return Arrays(x, y, 62, CLASSES["byclass"]), writers
