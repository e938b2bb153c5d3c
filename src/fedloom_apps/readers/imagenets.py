"""TinyImageNet and miniImageNet, small subsets of ImageNet."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.base.documentation import bibtex
from fedloom.base.errors import DataError
from fedloom.base.ranges import Count
from fedloom.data.sources import Source, sources
from fedloom.data.sources.arrays import by_class, image_arrays, read_images
from fedloom.data.sources.files import Files, reads
from fedloom.data.split import rank_within
from fedloom_apps.readers.formats import read_table

LICENCE = "ImageNet's terms of access: research and education, not commercial"
FOLDER = "tiny-imagenet-200"
TINY = Files(
    "TinyImageNet",
    (tuple(f"{FOLDER}/{part}" for part in ("train/", "val/images/", "val/val_annotations.txt", "words.txt")),),
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    {"tiny-imagenet-200.zip": "md5 90528d7ca1a48142e341f4ef8d21d0de"},
)
MINI = Files(
    "miniImageNet",
    (tuple(f"mini-imagenet/{part}" for part in ("images/", "train.csv", "val.csv", "test.csv")),),
    "ImageNet, with the lists of https://github.com/twitter-research/meta-learning-lstm",
)
SCALE_TINY = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


@sources.register
@reads(TINY)
def tiny_imagenet(root: str | Path | None = None, normalise: bool = True) -> Source:
    """TinyImageNet: 100 000 + 10 000 colour photographs, 64x64, 200 classes.

    Reads ``tiny-imagenet-200/train/<class>/images/*.JPEG``, ``val/images/*.JPEG`` with ``val/val_annotations.txt``, and
    ``words.txt`` for the class names. The validation images are the test set, since the labels of the test images are
    not published. Decoded images are cached beside them in ``fedloom-*.npz``. The full set takes 5.4 GB of memory.
    """
    train, val, annotations, words = TINY.obtain(root)
    paths, y, ids = by_class(train, "images")
    words = dict(row[:2] for row in read_table(words, header=False, separator="\t", width=2))
    numbers = {name: number for number, name in enumerate(ids)}
    rows = [row[:2] for row in read_table(annotations, header=False, separator="\t", width=6)]
    if strange := next((name for _, name in rows if name not in numbers), None):
        raise DataError(f"{annotations} names the class {strange}, which has no training images.")
    y_test = np.array([numbers[name] for _, name in rows])
    names = [words.get(name, name).partition(",")[0] for name in ids]
    home = train.parent
    x = read_images("TinyImageNet", paths, 64, home / "fedloom-train.npz", resize=False)
    x_test = read_images("TinyImageNet", [val / name for name, _ in rows], 64, home / "fedloom-val.npz", resize=False)
    return Source(
        name="tiny_imagenet",
        train=image_arrays(x, y, names, normalise, *SCALE_TINY),
        test=image_arrays(x_test, y_test, names, normalise, *SCALE_TINY),
        licence=LICENCE,
        citation=bibtex("le2015tiny"),
        settings={"normalise": normalise},
    )


@sources.register
@reads(MINI)
def mini_imagenet(
    root: str | Path | None = None,
    split: Literal["images", "classes"] = "images",
    size: Count = 84,
    normalise: bool = True,
) -> Source:
    """miniImageNet: 60 000 colour photographs, 84x84, 100 classes of 600.

    Reads ``mini-imagenet/images/*.jpg`` and ``{train,val,test}.csv`` (columns ``filename``, ``label``), the lists of
    Ravi and Larochelle. Decoded images are cached beside them in ``fedloom-*.npz``. The full set takes 6.4 GB of
    memory.

    Args:
        split: ``images`` (every sixth image of each class is for testing: 50 000 + 10 000) or ``classes`` (the 64 + 16
            classes of train.csv and val.csv for training, the other 20 for testing, as in few-shot learning).
        size: height and width; images of another shape are first cropped to the central square.
        normalise: whether to normalise by ImageNet's mean and deviation per channel; otherwise 0..1.
    """
    folder, *lists = MINI.obtain(root)
    listed = [read_table(path, ["filename", "label"]) for path in lists]
    rows = [(folder / name, label, part) for part, table in enumerate(listed) for name, label in table]
    names = sorted({label for _, label, _ in rows})
    numbers = {name: number for number, name in enumerate(names)}
    y = np.array([numbers[label] for _, label, _ in rows])
    if split == "classes":
        test = np.array([part == 2 for _, _, part in rows])
    else:
        test = rank_within(y) % 6 == 5
    cache = folder.parent / f"fedloom-{size}.npz"
    x = read_images("miniImageNet", [path for path, _, _ in rows], size, cache, crop=True)
    return Source(
        name="mini_imagenet",
        train=image_arrays(x[~test], y[~test], names, normalise, *SCALE),
        test=image_arrays(x[test], y[test], names, normalise, *SCALE),
        licence=LICENCE,
        citation=bibtex("vinyals2016matching, ravi2017optimization"),
        settings={"split": split, "size": size, "normalise": normalise},
    )
