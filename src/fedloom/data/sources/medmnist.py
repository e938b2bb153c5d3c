"""DermaMNIST and OrganCMNIST, as MedMNIST publishes them."""

from __future__ import annotations

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.archive import read_npz
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import Files, reads
from fedloom.data.sources.images import image_arrays

CITATION = """@article{yang2023medmnist,
  author = {Yang, Jiancheng and Shi, Rui and Wei, Donglai and Liu, Zequan and Zhao, Lin and Ke, Bilian and
            Pfister, Hanspeter and Ni, Bingbing},
  title = {{MedMNIST} v2: a large-scale lightweight benchmark for {2D} and {3D} biomedical image classification},
  journal = {Scientific Data},
  volume = {10}, pages = {41},
  year = {2023}
}"""
LESIONS = (
    "actinic keratoses and intraepithelial carcinoma",
    "basal cell carcinoma",
    "benign keratosis-like lesions",
    "dermatofibroma",
    "melanoma",
    "melanocytic nevi",
    "vascular lesions",
)
ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
CHECKSUMS = {
    "dermamnist.npz": "md5 0744692d530f8e62ec473284d019b0c7",
    "dermamnist_64.npz": "md5 b70a2f5635c6199aeaa28c31d7202e1f",
    "dermamnist_128.npz": "md5 2defd784463fa5243564e855ed717de1",
    "dermamnist_224.npz": "md5 8974907d8e169bef5f5b96bc506ae45d",
    "organcmnist.npz": "md5 b9ceb9546e10131b32923c5bbeaea2b1",
    "organcmnist_64.npz": "md5 3ce34a8724ea6f548e6db4744d03b6a9",
    "organcmnist_128.npz": "md5 773c1f009daa3fe5d9a2a201b2a7ed94",
}
SIZES = (28, 64, 128, 224)
KEYS = [f"{part}_{kind}" for part in ("train", "val", "test") for kind in ("images", "labels")]
HALF = (0.5,)


def medmnist_files(title: str, size: int) -> Files:
    """The file of one set at one size."""
    name = title.lower() + (f"_{size}" if size != SIZES[0] else "") + ".npz"
    sums = {name: CHECKSUMS[name]} if name in CHECKSUMS else {}
    return Files(title, ((name,), (f"medmnist/{name}",)), "https://zenodo.org/records/10519652", sums)


@sources.register
@reads(medmnist_files("DermaMNIST", 28))
def dermamnist(size: int = 28, root: str | None = None, validation: bool = False, normalise: bool = True) -> Source:
    """DermaMNIST: 7007 + 2005 dermatoscopic images of 7 skin lesions, colour.

    Reads ``dermamnist.npz`` or, for larger images, ``dermamnist_<size>.npz``.

    Args:
        size: 28, 64, 128 or 224.
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        validation: whether the 1003 validation images join the training pool; otherwise they are not used.
        normalise: to -1..1, otherwise 0..1.
    """
    return medmnist("DermaMNIST", LESIONS, "CC BY-NC 4.0", size, root, validation, normalise)


@sources.register
@reads(medmnist_files("OrganCMNIST", 28))
def organcmnist(size: int = 28, root: str | None = None, validation: bool = False, normalise: bool = True) -> Source:
    """OrganCMNIST: some 13 000 + 8000 coronal CT images of 11 organs, grey.

    Reads ``organcmnist.npz`` or, for larger images, ``organcmnist_<size>.npz``.

    Args:
        size: 28, 64, 128 or 224.
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        validation: whether the validation images join the training pool; otherwise they are not used.
        normalise: to -1..1, otherwise 0..1.
    """
    return medmnist("OrganCMNIST", ORGANS, "CC BY 4.0", size, root, validation, normalise)


def medmnist(
    title: str, names: tuple[str, ...], licence: str, size: int, root: str | None, validation: bool, normalise: bool
) -> Source:
    """One of MedMNIST's sets of single-label images."""
    if size not in SIZES:
        raise ConfigError(f"{title} comes in sizes {', '.join(map(str, SIZES))}, not {size}.")
    [path] = medmnist_files(title, size).obtain(root)
    held = read_npz(path, KEYS)

    def arrays(x: np.ndarray, y: np.ndarray) -> Arrays:
        if x.shape[1:3] != (size, size) or y.shape != (len(x), 1):
            raise DataError(
                f"{path} holds images {list(x.shape)} and labels {list(y.shape)}, not one label per {size}²."
            )
        channels = x.shape[3] if x.ndim == 4 else 1
        return image_arrays(x, y[:, 0], names, normalise, HALF * channels, HALF * channels)

    x, y = held.pop("train_images"), held.pop("train_labels")
    if validation:
        x, y = np.concatenate([x, held["val_images"]]), np.concatenate([y, held["val_labels"]])
    train = arrays(x, y)
    return Source(
        name=title.lower(),
        train=train,
        test=arrays(held["test_images"], held["test_labels"]),
        licence=licence,
        citation=CITATION,
        settings={"size": size, "validation": validation, "normalise": normalise},
    )
