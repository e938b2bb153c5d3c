"""EMNIST: handwritten letters and digits, and the ten letters that FedDyn uses."""

from __future__ import annotations

import string

import numpy as np

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.federation import Arrays
from fedloom.data.sources.archive import read_npz
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import Files, reads
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
PARTS = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
ORIGIN = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
CHECKSUMS = {"gzip.zip": "md5 58c8d27c78d21e728a6bc7b3cc06412e"}


def emnist_files(split: str, *others: tuple[str, ...], title: str = "") -> Files:
    """The files of one split, in torchvision's layout; or, first, ``others``."""
    layout = tuple(f"EMNIST/raw/emnist-{split}-{part}-ubyte" for part in PARTS)
    return Files(title or f"EMNIST {split}", (*others, layout), ORIGIN, CHECKSUMS, "EMNIST", {"split": split})


LETTERS = emnist_files("letters")
TEN = emnist_files("letters", ("emnist_l.npz",), title="EMNIST-L")


@sources.register
@reads(LETTERS)
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


@sources.register
@reads(TEN)
def emnist_l(root: str | None = None, download: bool = False, normalise: bool = True) -> Source:
    """EMNIST-L: the first ten letters of EMNIST (48 000 + 8000), as FedDyn uses them.

    Reads ``emnist_l.npz`` (``x_train`` uint8 [N, 28, 28] upright, ``y_train`` 0..9 for a..j, ``x_test``, ``y_test``),
    or takes them from EMNIST's letters.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        download: let torchvision fetch EMNIST if both are missing.
        normalise: (x - .1722) / .3309, otherwise 0..1.
    """
    paths = TEN.obtain(root, download)
    names = CLASSES["letters"][:10]

    def arrays(x: np.ndarray, y: np.ndarray) -> Arrays:
        return image_arrays(x, y, names, normalise, MEAN, STD)

    if len(paths) == 1:
        train, test = (arrays(*read_npz(paths[0], [f"x_{p}", f"y_{p}"]).values()) for p in ("train", "test"))
    else:
        train, test = (arrays(x[y < 10], y[y < 10]) for x, y in read_split("letters", root, download=False))
    return Source("emnist_l", train, test, LICENCE, CITATION, settings={"normalise": normalise})


def read_split(split: str, root: str | None, download: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Upright images and labels from 0, for training and for testing."""
    paths = emnist_files(split).obtain(root, download)
    first = 1 if split == "letters" else 0
    return [
        (read_idx(images, 3).transpose(0, 2, 1), read_idx(labels, 1).astype(np.int64) - first)
        for images, labels in (paths[:2], paths[2:])
    ]
