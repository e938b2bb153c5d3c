"""CIFAR-10 and CIFAR-100, from an npz file or the official Python batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.archive import read_npz
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import obtain
from fedloom.data.sources.images import image_arrays
from fedloom.data.sources.pickles import read_pickle

LICENCE = "none stated by the authors; used for research"
CITATION = """@techreport{krizhevsky2009learning,
  author = {Krizhevsky, Alex},
  title = {Learning multiple layers of features from tiny images},
  institution = {University of Toronto},
  year = {2009}
}"""
MEAN_10, STD_10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MEAN_100, STD_100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


@sources.register
def cifar10(root: str | None = None, download: bool = False, normalise: bool = True) -> Source:
    """CIFAR-10: 50 000 + 10 000 colour photographs, 32x32, 10 classes.

    Reads ``cifar10.npz`` (``x_train`` uint8 [N, 32, 32, 3], ``y_train``, ``x_test``, ``y_test``, optionally ``names``),
    or the official ``cifar-10-batches-py``.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        download: let torchvision fetch missing files.
        normalise: by the training set's mean and deviation per channel, otherwise 0..1.
    """
    folder = "cifar-10-batches-py"
    batches = [*(f"{folder}/data_batch_{k}" for k in range(1, 6)), f"{folder}/test_batch", f"{folder}/batches.meta"]
    paths = obtain("CIFAR-10", ["cifar10.npz"], batches, root=root, download=download, torchvision="CIFAR10")
    if len(paths) == 1:
        parts = from_npz(paths[0], "y_train", "y_test")
    else:
        names = read_pickle(paths[-1], ["label_names"])["label_names"]
        parts = (*from_batches(paths[:5], "labels"), *from_batches(paths[5:6], "labels"), names)
    train, test = normalised(parts, normalise, MEAN_10, STD_10)
    return Source("cifar10", train, test, LICENCE, CITATION, settings={"normalise": normalise})


@sources.register
def cifar100(root: str | None = None, download: bool = False, normalise: bool = True, labels: str = "fine") -> Source:
    """CIFAR-100: 50 000 + 10 000 colour photographs, 32x32, 100 classes.

    Reads ``cifar100.npz`` (as ``cifar10.npz``), or the official ``cifar-100-python``.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        download: let torchvision fetch missing files.
        normalise: by the training set's mean and deviation per channel, otherwise 0..1.
        labels: fine (100 classes) or coarse (20 superclasses, in the official batches only).
    """
    if labels not in ("fine", "coarse"):
        raise ConfigError(f"CIFAR-100 has fine and coarse labels, not {labels!r}.")
    batches = [f"cifar-100-python/{part}" for part in ("train", "test", "meta")]
    layouts = [["cifar100.npz"], batches] if labels == "fine" else [batches]
    paths = obtain("CIFAR-100", *layouts, root=root, download=download, torchvision="CIFAR100")
    if len(paths) == 1:
        parts = from_npz(paths[0], "y_train", "y_test")
    else:
        names = read_pickle(paths[2], [f"{labels}_label_names"])[f"{labels}_label_names"]
        parts = (*from_batches(paths[:1], f"{labels}_labels"), *from_batches(paths[1:2], f"{labels}_labels"), names)
    train, test = normalised(parts, normalise, MEAN_100, STD_100)
    return Source("cifar100", train, test, LICENCE, CITATION, settings={"normalise": normalise, "labels": labels})


Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Sequence[str]]  # x, y, x_test, y_test, names


def from_npz(path: Path, y_train: str, y_test: str) -> Parts:
    """Images [N, 32, 32, 3], labels and class names of an npz file."""
    found = read_npz(path, ["x_train", y_train, "x_test", y_test], optional=["names"])
    names = found.get("names", np.arange(int(found[y_train].max(initial=0)) + 1))
    return found["x_train"], found[y_train], found["x_test"], found[y_test], [str(name) for name in names]


def from_batches(paths: Sequence[Path], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 32, 32, 3] (a view of planes [N, 3, 32, 32]) and labels of the official batches."""
    batches = [read_pickle(path, ["data", key]) for path in paths]
    for path, batch in zip(paths, batches, strict=True):
        data = batch["data"]
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(batch[key]), 3072):
            raise DataError(f"{path} does not hold one uint8 row of 3072 pixels for each label.")
    x = batches[0]["data"] if len(batches) == 1 else np.concatenate([batch["data"] for batch in batches])
    y = np.concatenate([np.asarray(batch[key], dtype=np.int64) for batch in batches])
    return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y


def normalised(parts: Parts, normalise: bool, mean: Sequence[float], std: Sequence[float]) -> tuple[Arrays, Arrays]:
    """Training and test arrays."""
    x, y, u, v, names = parts
    return image_arrays(x, y, names, normalise, mean, std), image_arrays(u, v, names, normalise, mean, std)
