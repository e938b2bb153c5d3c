"""EMNIST: handwritten letters and digits, and the ten letters that FedDyn uses."""

from __future__ import annotations

import string

import numpy as np

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.federation import Arrays
from fedloom.data.sources.archive import read_npz
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import obtain
from fedloom.data.sources.idx import read_idx
from fedloom.data.sources.images import image_arrays

LICENCE = "public domain (NIST Special Database 19, a work of the US Government)"
CITATION = """@inproceedings{cohen2017emnist,
  author = {Cohen, Gregory and Afshar, Saeed and Tapson, Jonathan and van Schaik, Andr{\\'e}},
  title = {{EMNIST}: extending {MNIST} to handwritten letters},
  booktitle = {International Joint Conference on Neural Networks},
  pages = {2921--2926},
  year = {2017}
}"""
CLASSES = {
    "letters": tuple(string.ascii_lowercase),  # numbered from 1 in the files
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "balanced": tuple(string.digits + string.ascii_uppercase + "abdefghnqrt"),
    "digits": tuple(string.digits),
}
MEAN, STD = (0.1722,), (0.3309,)


@sources.register
def emnist(split: str = "letters", root: str | None = None, download: bool = False, normalise: bool = True) -> Source:
    """EMNIST: handwritten letters and digits, 28x28, shown upright.

    Reads ``EMNIST/raw/emnist-<split>-{train,test}-{images-idx3,labels-idx1}-ubyte[.gz]``. The official files hold every
    image transposed; here they are upright, like MNIST's.

    Args:
        split: letters (26 classes, both cases together), byclass (62), balanced (47) or digits (10).
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        download: let torchvision fetch missing files.
        normalise: (x - .1722) / .3309, otherwise 0..1.
    """
    if split not in CLASSES:
        raise ConfigError(f"EMNIST has no split {split!r}; {nearest(split, CLASSES)}")
    names = CLASSES[split]
    (x, y), (u, v) = read_split(split, root, download)
    return Source(
        name=f"emnist_{split}",
        train=image_arrays(x, y, names, normalise, MEAN, STD),
        test=image_arrays(u, v, names, normalise, MEAN, STD),
        licence=LICENCE,
        citation=CITATION,
        settings={"split": split, "normalise": normalise},
    )


@sources.register(name="emnist_l")
def emnist_l(root: str | None = None, download: bool = False, normalise: bool = True) -> Source:
    """EMNIST-L: the first ten letters of EMNIST (48 000 + 8000), as FedDyn uses them.

    Reads ``emnist_l.npz`` (``x_train`` uint8 [N, 28, 28] upright, ``y_train`` 0..9 for a..j, ``x_test``, ``y_test``),
    or takes them from EMNIST's letters.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        download: let torchvision fetch EMNIST if both are missing.
        normalise: (x - .1722) / .3309, otherwise 0..1.
    """
    paths = obtain(
        "EMNIST-L",
        ["emnist_l.npz"],
        layout("letters"),
        root=root,
        download=download,
        torchvision="EMNIST",
        split="letters",
    )
    names = CLASSES["letters"][:10]

    def arrays(x: np.ndarray, y: np.ndarray) -> Arrays:
        return image_arrays(x, y, names, normalise, MEAN, STD)

    if len(paths) == 1:
        found = read_npz(paths[0], ["x_train", "y_train", "x_test", "y_test"])
        train, test = arrays(found["x_train"], found["y_train"]), arrays(found["x_test"], found["y_test"])
    else:
        train, test = (arrays(x[y < 10], y[y < 10]) for x, y in read_split("letters", root, download=False))
    return Source("emnist_l", train, test, LICENCE, CITATION, settings={"normalise": normalise})


def layout(split: str) -> list[str]:
    """The files of one split, in torchvision's layout."""
    parts = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    return [f"EMNIST/raw/emnist-{split}-{part}-ubyte" for part in parts]


def read_split(split: str, root: str | None, download: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Upright images and labels from 0, for training and for testing."""
    paths = obtain(f"EMNIST {split}", layout(split), root=root, download=download, torchvision="EMNIST", split=split)
    first = 1 if split == "letters" else 0
    return [
        (read_idx(images, 3).transpose(0, 2, 1), read_idx(labels, 1).astype(np.int64) - first)
        for images, labels in (paths[:2], paths[2:])
    ]
