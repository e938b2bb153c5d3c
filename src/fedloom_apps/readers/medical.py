"""Medical images: ISIC 2019 by centre, DermaMNIST and OrganCMNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.ranges import Count
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, sources
from fedloom.data.sources.arrays import image_arrays, read_images
from fedloom.data.sources.files import Files, read_npz, reads
from fedloom_apps.readers.formats import read_table

TABLE = "isic2019/train_test_split"
ISIC = Files(
    "ISIC 2019",
    (
        (TABLE, "isic2019/ISIC_2019_Training_Input_preprocessed/"),
        (TABLE, "isic2019/ISIC_2019_Training_Input/"),
    ),
    "https://challenge.isic-archive.com/data/#2019 (pictures) and FLamby's repository, "
    "flamby/datasets/fed_isic2019/dataset_creation_scripts (train_test_split)",
)
DIAGNOSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES = ("BCN", "HAM vidir_molemax", "HAM vidir_modern", "HAM rosendahl", "MSK4", "HAM vienna_dias")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # for models trained on it


@sources.register
@reads(ISIC)
def isic2019(size: Count = 128, root: str | Path | None = None, normalise: bool = True) -> Source:
    """ISIC 2019 (FLamby): 23 247 dermoscopic images of 8 diagnoses from 6 centres.

    Reads FLamby's table ``isic2019/train_test_split`` (columns ``image``, ``target``, ``center``, ``fold2``) and
    ``isic2019/ISIC_2019_Training_Input_preprocessed/*.jpg`` (the output of FLamby's scripts: colour constancy, shorter
    side 224) or, without those, the original ``isic2019/ISIC_2019_Training_Input/*.jpg``. One hospital's three cameras
    are three centres. FLamby's split by centre gives the training pool and the test set: FLamby's test samples of a
    client are ``held_out=natural``. Decoded images are cached beside them in ``fedloom-*.npz``.

    Args:
        size: height and width; the shorter side is scaled to this length and the centre is cut out. FLamby trains on
            200, which takes 14 GB of memory while reading, then 11 GB; 128 takes 6 GB.
        normalise: whether to normalise by ImageNet's mean and deviation per channel; otherwise 0..1.
    """
    table, folder = ISIC.obtain(root)
    rows = list(read_table(table, ["image", "target", "center", "fold2"]))
    for image, target, centre, fold in rows:
        valid = target in set("01234567") and centre in set("012345") and fold in (f"train_{centre}", f"test_{centre}")
        if not valid:
            raise DataError(f"{table}: {image} has target {target}, centre {centre} and fold {fold}, which cannot be.")
    y = np.array([int(target) for _, target, _, _ in rows])
    centre = np.array([int(centre) for _, _, centre, _ in rows])
    test = np.array([fold.startswith("test") for *_, fold in rows])
    cache = folder.parent / f"fedloom-{folder.name}-{size}.npz"
    x = read_images("ISIC 2019", [folder / f"{row[0]}.jpg" for row in rows], size, cache, crop=True)
    return Source(
        name="isic2019",
        train=image_arrays(x[~test], y[~test], DIAGNOSES, normalise, *IMAGENET),
        test=image_arrays(x[test], y[test], DIAGNOSES, normalise, *IMAGENET),
        licence="CC BY-NC 4.0",
        citation=bibtex("tschandl2018ham10000, codella2018skin, combalia2019bcn20000, ogier2022flamby"),
        groups=centre[~test],
        groups_test=centre[test],
        group_names=CENTRES,
        settings={"size": size, "pictures": folder.name, "normalise": normalise},
    )


LESIONS = (
    "actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions",
    "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions",
)  # fmt: skip
ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left", "lung-right",
    "pancreas", "spleen",
)  # fmt: skip
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


def medmnist_files(title: str, size: int) -> Files:
    """The file of one MedMNIST set at one size."""
    name = title.lower() + (f"_{size}" if size != SIZES[0] else "") + ".npz"
    sums = {name: CHECKSUMS[name]} if name in CHECKSUMS else {}
    return Files(title, ((name,), (f"medmnist/{name}",)), "https://zenodo.org/records/10519652", sums)


@sources.register
@reads(medmnist_files("DermaMNIST", 28))
def dermamnist(
    size: int = 28, root: str | Path | None = None, validation: bool | Literal["apart"] = False, normalise: bool = True
) -> Source:
    """DermaMNIST: 7007 + 2005 dermatoscopic colour images of 7 skin lesions (and 1003 for validation).

    Reads ``dermamnist.npz`` or, for larger images, ``dermamnist_<size>.npz``. Normalisation is to -1..1.

    Args:
        size: 28, 64, 128 or 224.
    """
    return medmnist("DermaMNIST", LESIONS, "CC BY-NC 4.0", size, root, validation, normalise)


@sources.register
@reads(medmnist_files("OrganCMNIST", 28))
def organcmnist(
    size: int = 28, root: str | Path | None = None, validation: bool | Literal["apart"] = False, normalise: bool = True
) -> Source:
    """OrganCMNIST: about 13 000 + 8000 coronal CT images of 11 organs, grey.

    Reads ``organcmnist.npz`` or, for larger images, ``organcmnist_<size>.npz``. Normalisation is to -1..1.

    Args:
        size: 28, 64, 128 or 224.
    """
    return medmnist("OrganCMNIST", ORGANS, "CC BY 4.0", size, root, validation, normalise)


def medmnist(
    title: str,
    names: tuple[str, ...],
    licence: str,
    size: int,
    root: str | Path | None,
    validation: bool | Literal["apart"],
    normalise: bool,
) -> Source:
    """A MedMNIST set of images with one label each (Yang et al., 2023)."""
    if size not in SIZES:
        raise ConfigError(f"{title} comes in sizes {', '.join(map(str, SIZES))}, not {size}.")
    [path] = medmnist_files(title, size).obtain(root)
    content = read_npz(path, KEYS)

    def arrays(x: np.ndarray, y: np.ndarray) -> Arrays:
        if x.shape[1:3] != (size, size) or y.shape != (len(x), 1):
            raise DataError(
                f"{path} holds images {list(x.shape)} and labels {list(y.shape)}, not one label per {size}²."
            )
        half = (0.5,) * (x.shape[3] if x.ndim == 4 else 1)
        return image_arrays(x, y[:, 0], names, normalise, half, half)

    x, y = content.pop("train_images"), content.pop("train_labels")
    if validation is True:
        x, y = np.concatenate([x, content["val_images"]]), np.concatenate([y, content["val_labels"]])
    train, test = arrays(x, y), arrays(content["test_images"], content["test_labels"])
    settings = {"size": size, "validation": validation, "normalise": normalise}
    valid = arrays(content["val_images"], content["val_labels"]) if validation == "apart" else None
    citation = bibtex("yang2023medmnist")
    return Source(title.lower(), train, test, licence, citation, settings=settings, validation=valid)
