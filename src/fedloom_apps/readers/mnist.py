"""MNIST, Fashion-MNIST and EMNIST: idx files in torchvision's layout."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedloom.base.documentation import bibtex
from fedloom.base.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.arrays import image_arrays
from fedloom.data.sources.files import Files, find, read_npz, reads
from fedloom_apps.readers.formats import read_idx

PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CHECKSUMS = {  # md5 of the published gzipped files, in the order of PARTS
    "MNIST": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "FashionMNIST": (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
}


def idx_files(folder: str, origin: str) -> Files:
    """The four files of a data set in MNIST's layout."""
    sums = {f"{file}.gz": f"md5 {md5}" for file, md5 in zip(PARTS, CHECKSUMS[folder], strict=True)}
    return Files(folder, (tuple(f"{folder}/raw/{file}" for file in PARTS),), origin, sums, torchvision=folder)


def idx_pair(files: Files, root: str | Path | None, download: bool, *settings: Any) -> tuple[Arrays, Arrays]:
    """Training and test split of a data set in MNIST's layout; ``settings`` are those of ``image_arrays``."""
    paths = files.obtain(root, download)
    train, test = (
        image_arrays(read_idx(images, 3), read_idx(labels, 1), *settings) for images, labels in (paths[:2], paths[2:])
    )
    return train, test


MNIST = idx_files("MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist")
FASHION = idx_files("FashionMNIST", "https://github.com/zalandoresearch/fashion-mnist")


@sources.register
@reads(MNIST)
def mnist(root: str | Path | None = None, download: bool = False, normalise: bool = True) -> Source:
    """MNIST: 60 000 + 10 000 handwritten digits, 28x28, optionally by writer.

    Reads ``MNIST/raw/*-ubyte[.gz]``. With ``mnist_writers.npz`` beside it (``writer_train``, ``writer_test``: the NIST
    writer of every image, from QMNIST), the 539 writers of the training images are natural clients; the 297 writers of
    the test images are other people. Normalisation is (x - .1307) / .3081.
    """
    train, test = idx_pair(MNIST, root, download, tuple(string.digits), normalise, (0.1307,), (0.3081,))
    settings = {"normalise": normalise}
    writers = find(["mnist_writers.npz"], root)
    if not writers:
        return Source("mnist", train, test, "CC BY-SA 3.0", bibtex("lecun1998gradient"), settings=settings)
    train_writers, test_writers = read_npz(writers[0], ["writer_train", "writer_test"]).values()
    if (len(train_writers), len(test_writers)) != (len(train), len(test)):
        raise DataError(f"{writers[0]} does not list as many writers as MNIST has images.")
    licence = "CC BY-SA 3.0 (images), BSD-style (writers, from QMNIST)"
    citation = bibtex("lecun1998gradient, yadav2019cold")
    return Source(
        "mnist",
        train,
        test,
        licence,
        citation,
        **natural_clients(train_writers, test_writers, "writer "),
        settings=settings,
    )


@sources.register
@reads(FASHION)
def fashion_mnist(root: str | Path | None = None, download: bool = False, normalise: bool = True) -> Source:
    """Fashion-MNIST: 60 000 + 10 000 images of clothes, 28x28, 10 classes.

    Reads ``FashionMNIST/raw/*-ubyte[.gz]``. Normalisation is (x - .2860) / .3530.
    """
    train, test = idx_pair(FASHION, root, download, GARMENTS, normalise, (0.2860,), (0.3530,))
    return Source("fashion_mnist", train, test, "MIT", bibtex("xiao2017fashion"), settings={"normalise": normalise})


LICENCE = "public domain (NIST Special Database 19, a work of the US Government)"
CLASSES = {
    "letters": tuple(string.ascii_lowercase),  # numbered from 1 in the files
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "balanced": tuple(string.digits + string.ascii_uppercase + "abdefghnqrt"),
    "digits": tuple(string.digits),
}
SCALE = (0.1722,), (0.3309,)


def emnist_files(split: str, *layouts: tuple[str, ...], title: str = "") -> Files:
    """The files of one split in torchvision's layout, after the alternative ``layouts``."""
    parts = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    layout = tuple(f"EMNIST/raw/emnist-{split}-{part}-ubyte" for part in parts)
    origin = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
    sums = {"gzip.zip": "md5 58c8d27c78d21e728a6bc7b3cc06412e"}
    return Files(title or f"EMNIST {split}", (*layouts, layout), origin, sums, "EMNIST", {"split": split})


TEN = emnist_files("letters", ("emnist_l.npz",), title="EMNIST-L")


@sources.register
@reads(emnist_files("letters"))
def emnist(
    split: Literal["letters", "byclass", "balanced", "digits"] = "letters",
    root: str | Path | None = None,
    download: bool = False,
    normalise: bool = True,
) -> Source:
    """EMNIST: handwritten letters and digits, 28x28, upright.

    Reads ``EMNIST/raw/emnist-<split>-{train,test}-{images-idx3,labels-idx1}-ubyte[.gz]``. The official files hold
    transposed images; here they are upright, like MNIST's. Normalisation is (x - .1722) / .3309.

    Args:
        split: letters (26 classes, both cases together), byclass (62), balanced (47) or digits (10).
    """
    train, test = (image_arrays(x, y, CLASSES[split], normalise, *SCALE) for x, y in read_split(split, root, download))
    settings = {"split": split, "normalise": normalise}
    return Source(f"emnist_{split}", train, test, LICENCE, bibtex("cohen2017emnist"), settings=settings)


@sources.register
@reads(TEN)
def emnist_l(root: str | Path | None = None, download: bool = False, normalise: bool = True) -> Source:
    """EMNIST-L: the first ten letters of EMNIST (48 000 + 8000), as used by FedDyn.

    Reads ``emnist_l.npz`` (``x_train`` uint8 [N, 28, 28] upright, ``y_train`` 0..9 for a..j, ``x_test``, ``y_test``) or
    EMNIST's letters. Normalisation is (x - .1722) / .3309.
    """
    paths = TEN.obtain(root, download)
    if len(paths) == 1:
        pairs = [read_npz(paths[0], [f"x_{p}", f"y_{p}"]).values() for p in ("train", "test")]
    else:
        pairs = [(x[y < 10], y[y < 10]) for x, y in read_split("letters", root, download=False)]
    train, test = (image_arrays(x, y, CLASSES["letters"][:10], normalise, *SCALE) for x, y in pairs)
    return Source("emnist_l", train, test, LICENCE, bibtex("cohen2017emnist"), settings={"normalise": normalise})


def read_split(split: str, root: str | Path | None, download: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Upright images and labels counted from 0, of the training and the test set."""
    paths = emnist_files(split).obtain(root, download)
    first = 1 if split == "letters" else 0
    return [
        (read_idx(images, 3).transpose(0, 2, 1), read_idx(labels, 1).astype(np.int64) - first)
        for images, labels in (paths[:2], paths[2:])
    ]
