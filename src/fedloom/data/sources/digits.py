"""scikit-learn's digits, which need no download."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from fedloom.core.federation import Arrays
from fedloom.data.grouping import rank_within
from fedloom.data.sources.base import Source, cite, sources


@sources.register
def digits() -> Source:
    """scikit-learn's digits: 1797 handwritten digits, 8x8, included.

    Pixels are 0..1 in steps of 1/16. Every fifth image of each class is a test image (1442 for training, 355 for
    testing).

    >>> source = digits()
    >>> tuple(source.train.x.shape), len(source.test), source.train.classes
    ((1442, 1, 8, 8), 355, 10)
    """
    from sklearn.datasets import load_digits

    data = cast(Any, load_digits())
    x = torch.from_numpy(data.images.astype(np.float32) / 16).unsqueeze(1)  # [N, 1, 8, 8]
    y = torch.from_numpy(data.target.astype(np.int64))
    test = torch.from_numpy(rank_within(y.numpy()) % 5 == 4)
    train, test = (Arrays(x[part], y[part], 10, tuple("0123456789")) for part in (~test, test))
    return Source("digits", train, test, "CC BY 4.0", cite("alpaydin1998optical"))
