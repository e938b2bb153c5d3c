"""CINIC-10: CIFAR-10's classes, with as many images again from ImageNet."""

from __future__ import annotations

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import Files, reads
from fedloom.data.sources.folders import by_class, read_pictures
from fedloom.data.sources.images import image_arrays

LICENCE = "CC BY 4.0 (the collection; its images are ImageNet's and CIFAR-10's)"
CITATION = """@article{darlow2018cinic,
  author = {Darlow, Luke N. and Crowley, Elliot J. and Antoniou, Antreas and Storkey, Amos J.},
  title = {{CINIC-10} is not {ImageNet} or {CIFAR-10}},
  journal = {arXiv preprint arXiv:1810.03505},
  year = {2018}
}"""
FILES = Files(
    "CINIC-10",
    (("CINIC-10/train/", "CINIC-10/valid/", "CINIC-10/test/"),),
    "https://datashare.ed.ac.uk/handle/10283/3192",
    {"CINIC-10.tar.gz": "md5 6ee4d0c996905fe93221de577967a372"},
)
MEAN, STD = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)  # of the training images


@sources.register
@reads(FILES)
def cinic10(root: str | None = None, validation: bool = False, normalise: bool = True) -> Source:
    """CINIC-10: 90 000 + 90 000 colour photographs, 32x32, 10 classes.

    Reads ``CINIC-10/{train,valid,test}/<class>/*.png``. Decoded images are kept beside them in ``fedloom-*.npz``.

    Args:
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        validation: whether the 90 000 validation images join the training pool; otherwise they are not used.
        normalise: by the training set's mean and deviation per channel, otherwise 0..1.
    """
    train, valid, test = FILES.obtain(root)
    names: list[str] | None = None
    read = []
    for folder in (train, valid, test) if validation else (train, test):
        paths, y, found = by_class(folder)
        if names not in (None, found):
            raise DataError(f"{folder} has other classes than the training images: {', '.join(found)}.")
        names = found
        read.append(
            (read_pictures("CINIC-10", paths, 32, folder.parent / f"fedloom-{folder.name}.npz", resize=False), y)
        )
    assert names is not None
    if validation:
        read[:2] = [tuple(np.concatenate(both) for both in zip(*read[:2], strict=True))]
    settings = {"validation": validation, "normalise": normalise}
    arrays = [image_arrays(x, y, names, normalise, MEAN, STD) for x, y in read]
    return Source("cinic10", arrays[0], arrays[1], LICENCE, CITATION, settings=settings)
