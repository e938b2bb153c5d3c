"""LEAF's JSON format, and FEMNIST in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.arrays import class_labels
from fedloom.data.sources.files import Files, reads, with_progress
from fedloom_apps.readers.mnist import CLASSES
from fedloom_apps.readers.mnist import LICENCE as EMNIST_LICENCE

ORIGIN = "https://leaf.cmu.edu"
LICENCE = "BSD 2-clause (LEAF's processing)"


def leaf_files(title: str, name: str, *layouts: tuple[str, ...]) -> Files:
    """The output of LEAF's scripts, split into train and test or not, after the alternative ``layouts``."""
    split = (f"{name}/data/train/", f"{name}/data/test/")
    return Files(title, (*layouts, split, (f"{name}/data/all_data/",)), ORIGIN)


def read_leaf(folder: Path, title: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Every user of a folder of LEAF's files, with inputs and targets; one file is in memory at a time."""
    paths = sorted(path for path in folder.glob("*.json") if path.name[0] != ".")
    if not paths:
        raise DataError(f"{folder} holds no LEAF files (*.json).")
    users_read: set[str] = set()
    for path in with_progress(paths, title, few=1):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is truncated or not JSON ({error}).") from error
        data_by_user = content.get("user_data") if isinstance(content, dict) else None
        if not isinstance(data_by_user, dict):
            raise DataError(f"{path} is not in LEAF's format: it has no user_data.")
        users = content.get("users", [*data_by_user])
        if not isinstance(users, list):
            raise DataError(f"{path} is not in LEAF's format: its users are not a list.")
        for user in map(str, users):
            if user in users_read:
                raise DataError(f"{path}: user {user!r} is listed twice in the files of {folder}; join the two.")
            users_read.add(user)
            data = data_by_user.get(user)
            x, y = (data.get("x"), data.get("y")) if isinstance(data, dict) else (None, None)
            if not isinstance(x, list) or not isinstance(y, list):
                raise DataError(f"{path}: user {user!r} has no lists x and y.")
            if len(x) != len(y):
                raise DataError(f"{path}: user {user!r} has {len(x)} inputs but {len(y)} targets.")
            yield user, x, y


FEMNIST = leaf_files("FEMNIST", "femnist")


@sources.register
@reads(FEMNIST)
def femnist(root: str | Path | None = None) -> Source:
    """FEMNIST (LEAF): handwritten digits and letters, 28x28, 62 classes, by writer.

    Reads LEAF's ``femnist/data/{train,test}/*.json`` or, unsplit, ``femnist/data/all_data/*.json``. Pixels are 0..1 as
    LEAF leaves them: 1 is paper, 0 is ink. Writers are the natural clients; if LEAF has split by sample, a client's own
    test samples are ``held_out=natural``. Unsplit data have no common test set.
    """
    folders = FEMNIST.obtain(root)
    train, writers = read_writers(folders[0])
    test, writers_test = read_writers(folders[1]) if len(folders) > 1 else (train.take(np.zeros(0, np.int64)), None)
    licence, citation = f"{EMNIST_LICENCE}; {LICENCE}", bibtex("cohen2017emnist, caldas2018leaf")
    return Source("femnist", train, test, licence, citation, **natural_clients(writers, writers_test, "writer "))


def read_writers(folder: Path) -> tuple[Arrays, list[str]]:
    """Images, labels and writers of a folder of LEAF's files."""
    images, labels, writers = [], [], []
    for user, x, y in read_leaf(folder, "FEMNIST"):
        if not x:
            continue
        what = f"{folder}: labels of writer {user!r}"
        try:
            rows = np.array(x, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"{folder}: writer {user!r} has an image that is not 784 numbers ({error}).") from error
        if rows.ndim != 2 or rows.shape[1] != 784:
            raise DataError(f"{folder}: writer {user!r} has images of {rows[0].size} numbers, not 784.")
        images.append(rows.reshape(-1, 1, 28, 28))
        labels.append(class_labels(y, what))
        writers += [user] * len(rows)
    if not images:
        raise DataError(f"{folder} holds no images.")
    return Arrays(torch.from_numpy(np.concatenate(images)), torch.cat(labels), 62, CLASSES["byclass"]), writers
