"""LEAF's JSON files: users, and what each of them holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.core.errors import DataError
from fedloom.data.sources.files import Files
from fedloom.data.sources.progress import with_progress

ORIGIN = "https://leaf.cmu.edu"
LICENCE = "BSD 2-clause (LEAF's processing)"
CITATION = """@article{caldas2018leaf,
  author = {Caldas, Sebastian and Duddu, Sai Meher Karthik and Wu, Peter and Li, Tian and Kone{\\v{c}}n{\\'y}, Jakub and
            McMahan, H. Brendan and Smith, Virginia and Talwalkar, Ameet},
  title = {{LEAF}: a benchmark for federated settings},
  journal = {arXiv preprint arXiv:1812.01097},
  year = {2018}
}"""


def leaf_files(title: str, name: str, *others: tuple[str, ...], inner: str = "data") -> Files:
    """Where LEAF's scripts leave a data set: split into train and test, or not; or, first, ``others``."""
    split = (f"{name}/{inner}/train/", f"{name}/{inner}/test/")
    return Files(title, (*others, split, (f"{name}/{inner}/all_data/",)), ORIGIN)


def read_leaf(folder: Path, title: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Every user of a folder of LEAF's files, with inputs and targets; one file is in memory at a time.

    Raises:
        DataError: if there are no files, one is damaged or not in LEAF's format, or a user's inputs and targets differ
            in number.
    """
    paths = sorted(path for path in folder.glob("*.json") if path.name[0] != ".")
    if not paths:
        raise DataError(f"{folder} holds no LEAF files (*.json).")
    for path in with_progress(paths, title, few=1):
        try:
            held = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is truncated or not JSON ({error}).") from error
        if not isinstance(held, dict) or not isinstance(held.get("user_data"), dict):
            raise DataError(f"{path} is not in LEAF's format: it has no user_data.")
        for user in held.get("users", list(held["user_data"])):
            data = held["user_data"].get(user)
            if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
                raise DataError(f"{path}: user {user!r} has no x and y.")
            if len(data["x"]) != len(data["y"]):
                raise DataError(f"{path}: user {user!r} has {len(data['x'])} inputs but {len(data['y'])} targets.")
            yield str(user), data["x"], data["y"]
