"""scikit-learn's embedded digits: real handwriting, nothing to download."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from fedloom.core.federation import Arrays
from fedloom.data.sources.base import Source, sources

CITATION = """@misc{alpaydin1998optical,
  author = {Alpaydin, Ethem and Kaynak, Cenk},
  title = {Optical Recognition of Handwritten Digits},
  howpublished = {UCI Machine Learning Repository},
  year = {1998},
  doi = {10.24432/C50P49}
}"""


@sources.register
def digits() -> Source:
    """1797 real handwritten digits, 8x8, embedded in scikit-learn.

    Pixels are 0..1 in steps of 1/16. Of each class, every fifth image is a test image (1442 for training, 355 for
    testing), whatever the seed.

    >>> source = digits()
    >>> tuple(source.train.x.shape), len(source.test), source.train.classes
    ((1442, 1, 8, 8), 355, 10)
    """
    from sklearn.datasets import load_digits

    data = cast(Any, load_digits())
    x = torch.from_numpy(data.images.astype(np.float32) / 16).unsqueeze(1)  # [N, 1, 8, 8]
    y = torch.from_numpy(data.target.astype(np.int64))
    rank = np.zeros(len(y), dtype=np.int64)  # place of an image within its class
    for c in range(10):
        rank[data.target == c] = np.arange((data.target == c).sum())
    test = torch.from_numpy(rank % 5 == 4)
    names = tuple("0123456789")
    return Source(
        name="digits",
        train=Arrays(x[~test], y[~test], 10, names),
        test=Arrays(x[test], y[test], 10, names),
        licence="CC BY 4.0",
        citation=CITATION,
    )
