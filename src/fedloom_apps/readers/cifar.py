"""CIFAR-10, CIFAR-100 and CINIC-10."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.base.documentation import bibtex
from fedloom.base.errors import DataError
from fedloom.data.sources import Source, sources
from fedloom.data.sources.arrays import as_array, by_class, class_labels, image_arrays, read_images
from fedloom.data.sources.files import Files, read_npz, reads
from fedloom_apps.readers.formats import read_pickle

LICENCE = "none stated by the authors; used for research"
SCALE_10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SCALE_100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
SCALE_CINIC = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar.html"
BATCHES_10 = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta")
BATCHES_100 = tuple(f"cifar-100-python/{part}" for part in ("train", "test", "meta"))
CIFAR10 = Files(
    "CIFAR-10",
    (("cifar10.npz",), tuple(f"cifar-10-batches-py/{batch}" for batch in BATCHES_10)),
    ORIGIN,
    {"cifar-10-python.tar.gz": "md5 c58f30108f718f92721af3b95e74349a"},
    torchvision="CIFAR10",
)
CIFAR100 = Files(
    "CIFAR-100",
    (("cifar100.npz",), BATCHES_100),
    ORIGIN,
    {"cifar-100-python.tar.gz": "md5 eb9058c3a382ffc7106e4002c42a8d85"},
    torchvision="CIFAR100",
)
CINIC = Files(
    "CINIC-10",
    (("CINIC-10/train/", "CINIC-10/valid/", "CINIC-10/test/"),),
    "https://datashare.ed.ac.uk/handle/10283/3192",
    {"CINIC-10.tar.gz": "md5 6ee4d0c996905fe93221de577967a372"},
)


@sources.register
@reads(CIFAR10)
def cifar10(root: str | Path | None = None, download: bool = False, normalise: bool = True) -> Source:
    """CIFAR-10: 50 000 + 10 000 colour photographs, 32x32, 10 classes.

    Reads ``cifar10.npz`` (``x_train`` uint8 [N, 32, 32, 3], ``y_train``, ``x_test``, ``y_test``, optionally ``names``)
    or the official ``cifar-10-batches-py``.
    """
    paths = CIFAR10.obtain(root, download)
    if len(paths) == 1:
        names, train, test = from_npz(paths[0])
    else:
        names = read_pickle(paths[-1], ["label_names"])["label_names"]
        train, test = (partial(from_batches, batches, "labels") for batches in (paths[:5], paths[5:6]))
    train, test = (image_arrays(*read(), names, normalise, *SCALE_10) for read in (train, test))
    citation = bibtex("krizhevsky2009learning")
    return Source("cifar10", train, test, LICENCE, citation, settings={"normalise": normalise})


KEYS = {"fine": ("y_", "names"), "coarse": ("coarse_", "coarse_names")}  # of labels and names in the npz


@sources.register
@reads(CIFAR100)
def cifar100(
    root: str | Path | None = None,
    download: bool = False,
    normalise: bool = True,
    labels: Literal["fine", "coarse"] = "fine",
) -> Source:
    """CIFAR-100: 50 000 + 10 000 colour photographs, 32x32, 100 classes.

    Reads ``cifar100.npz`` (as ``cifar10.npz``, with ``coarse_train``, ``coarse_test`` and optionally ``coarse_names``
    for coarse labels) or the official ``cifar-100-python``.

    Args:
        labels: fine (100 classes) or coarse (20 superclasses).
    """
    paths = CIFAR100.obtain(root, download)
    if len(paths) == 1:
        names, train, test = from_npz(paths[0], *KEYS[labels])
    else:
        names = read_pickle(paths[2], [f"{labels}_label_names"])[f"{labels}_label_names"]
        train, test = (partial(from_batches, [path], f"{labels}_labels") for path in paths[:2])
    train, test = (image_arrays(*read(), names, normalise, *SCALE_100) for read in (train, test))
    settings = {"normalise": normalise, "labels": labels}
    return Source("cifar100", train, test, LICENCE, bibtex("krizhevsky2009learning"), settings=settings)


Read = Callable[[], tuple[np.ndarray, np.ndarray]]  # reads images [N, 32, 32, 3] and labels [N]


def from_npz(path: Path, labels: str = "y_", names_key: str = "names") -> tuple[Sequence[str], Read, Read]:
    """Class names, and readers of the training and the test images of an npz file; labels and names by their keys."""

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        arrays = read_npz(path, [f"x_{part}", f"{labels}{part}"])
        return arrays[f"x_{part}"], arrays[f"{labels}{part}"]

    about = read_npz(path, [f"{labels}train"], optional=[names_key])
    y = class_labels(about[f"{labels}train"], f"{path}: {labels}train")
    names = as_array(about.get(names_key, range(max(y.tolist(), default=0) + 1)), f"{path}: {names_key}")
    return [str(name) for name in names], partial(read, "train"), partial(read, "test")


def from_batches(paths: Sequence[Path], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 32, 32, 3] (a view of planes [N, 3, 32, 32]) and labels [N] of the official batches."""
    batches = [read_pickle(path, ["data", key]) for path in paths]
    labels = [class_labels(batch[key], f"{path}: {key}") for path, batch in zip(paths, batches, strict=True)]
    for path, batch, y in zip(paths, batches, labels, strict=True):
        data = batch["data"]
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(y), 3072):
            raise DataError(f"{path} does not hold one uint8 row of 3072 pixels for each label.")
    x = batches[0]["data"] if len(batches) == 1 else np.concatenate([batch["data"] for batch in batches])
    y = np.concatenate([y.numpy() for y in labels])
    return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y


@sources.register
@reads(CINIC)
def cinic10(
    root: str | Path | None = None, validation: bool | Literal["apart"] = False, normalise: bool = True
) -> Source:
    """CINIC-10: 90 000 + 90 000 colour photographs from ImageNet and CIFAR-10, 32x32, 10 classes.

    Reads ``CINIC-10/{train,valid,test}/<class>/*.png``; decoded images are cached beside them in ``fedloom-*.npz``.
    There are another 90 000 validation images.
    """
    train, valid, test = CINIC.obtain(root)
    names: list[str] | None = None
    read = []
    for folder in (train, valid, test) if validation else (train, test):
        paths, y, classes = by_class(folder)
        if names not in (None, classes):
            raise DataError(f"{folder} has other classes than the training images: {', '.join(classes)}.")
        names = classes
        cache = folder.parent / f"fedloom-{folder.name}.npz"
        read.append((read_images("CINIC-10", paths, 32, cache, resize=False), y))
    assert names is not None
    if validation is True:
        read[:2] = [tuple(np.concatenate(arrays) for arrays in zip(*read[:2], strict=True))]
    train, *validation_arrays, test = (image_arrays(x, y, names, normalise, *SCALE_CINIC) for x, y in read)
    licence = "CC BY 4.0 (the collection; its images are ImageNet's and CIFAR-10's)"
    settings = {"validation": validation, "normalise": normalise}
    valid_split = validation_arrays[0] if validation_arrays else None
    return Source("cinic10", train, test, licence, bibtex("darlow2018cinic"), settings=settings, validation=valid_split)
