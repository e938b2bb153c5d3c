"""MNIST and Fashion-MNIST, in torchvision's layout of idx files."""

from __future__ import annotations

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.archive import read_npz
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import Files, find, reads
from fedloom.data.sources.idx import read_idx
from fedloom.data.sources.images import image_arrays

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
GARMENTS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
CHECKSUMS = {  # md5 of the published gzipped files, in the order of FILES
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
MNIST = """@article{lecun1998gradient,
  author = {LeCun, Yann and Bottou, L{\\'e}on and Bengio, Yoshua and Haffner, Patrick},
  title = {Gradient-based learning applied to document recognition},
  journal = {Proceedings of the IEEE},
  volume = {86}, number = {11}, pages = {2278--2324},
  year = {1998}
}"""
QMNIST = """@inproceedings{yadav2019cold,
  author = {Yadav, Chhavi and Bottou, L{\\'e}on},
  title = {Cold case: the lost {MNIST} digits},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2019}
}"""
FASHION = """@article{xiao2017fashion,
  author = {Xiao, Han and Rasul, Kashif and Vollgraf, Roland},
  title = {Fashion-{MNIST}: a novel image dataset for benchmarking machine learning algorithms},
  journal = {arXiv preprint arXiv:1708.07747},
  year = {2017}
}"""


def idx_files(folder: str, origin: str) -> Files:
    """The four files of a data set in MNIST's layout."""
    sums = {f"{file}.gz": f"md5 {md5}" for file, md5 in zip(FILES, CHECKSUMS[folder], strict=True)}
    return Files(folder, (tuple(f"{folder}/raw/{file}" for file in FILES),), origin, sums, torchvision=folder)


MNIST_FILES = idx_files("MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist")
FASHION_FILES = idx_files("FashionMNIST", "https://github.com/zalandoresearch/fashion-mnist")


@sources.register
@reads(MNIST_FILES)
def mnist(root: str | None = None, download: bool = False, normalise: bool = True) -> Source:
    """MNIST: 60 000 + 10 000 handwritten digits, 28x28; with writers if known.

    Reads ``MNIST/raw/*-ubyte[.gz]``. If ``mnist_writers.npz`` (``writer_train``, ``writer_test``: the NIST writer of
    every image, from QMNIST) lies beside it, training images carry their 539 writers as natural clients; the 297
    writers of the test images are other people.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        download: let torchvision fetch missing files.
        normalise: (x - .1307) / .3081, otherwise 0..1.
    """
    train, test = idx_pair(MNIST_FILES, tuple("0123456789"), (0.1307,), (0.3081,), root, download, normalise)
    groups, groups_test, names = None, None, ()
    if writers := find(["mnist_writers.npz"], root):
        found = read_npz(writers[0], ["writer_train", "writer_test"])
        if (len(found["writer_train"]), len(found["writer_test"])) != (len(train), len(test)):
            raise DataError(f"{writers[0]} does not list as many writers as MNIST has images.")
        ids, which = np.unique(np.concatenate([found["writer_train"], found["writer_test"]]), return_inverse=True)
        groups, groups_test = which[: len(train)], which[len(train) :]
        names = tuple(f"writer {w}" for w in ids)
    return Source(
        name="mnist",
        train=train,
        test=test,
        licence="CC BY-SA 3.0 (images), BSD-style (writers, from QMNIST)" if names else "CC BY-SA 3.0",
        citation=f"{MNIST}\n{QMNIST}" if names else MNIST,
        groups=groups,
        groups_test=groups_test,
        group_names=names,
        settings={"normalise": normalise},
    )


@sources.register
@reads(FASHION_FILES)
def fashion_mnist(root: str | None = None, download: bool = False, normalise: bool = True) -> Source:
    """Fashion-MNIST: 60 000 + 10 000 pictures of clothes, 28x28, 10 classes.

    Reads ``FashionMNIST/raw/*-ubyte[.gz]``.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        download: let torchvision fetch missing files.
        normalise: (x - .2860) / .3530, otherwise 0..1.
    """
    train, test = idx_pair(FASHION_FILES, GARMENTS, (0.2860,), (0.3530,), root, download, normalise)
    return Source("fashion_mnist", train, test, "MIT", FASHION, settings={"normalise": normalise})


def idx_pair(
    files: Files,
    names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    root: str | None,
    download: bool,
    normalise: bool,
) -> tuple[Arrays, Arrays]:
    """The training and the test split of a data set in MNIST's layout."""
    paths = files.obtain(root, download)
    train, test = (
        image_arrays(read_idx(images, 3), read_idx(labels, 1), names, normalise, mean, std)
        for images, labels in (paths[:2], paths[2:])
    )
    return train, test
