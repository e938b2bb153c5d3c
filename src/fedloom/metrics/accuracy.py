"""Accuracy, kept as counts until the end so that any pooling of clients is exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedloom.metrics.values import Values, vector


def hits(logits: Tensor, y: Tensor) -> Tensor:
    """How many samples the largest logit names rightly.

    Args:
        logits: [..., B, classes]; leading axes (clients) are kept.
        y: labels [..., B]; a negative label marks padding and counts nowhere.

    Returns:
        Counts [...], int64.

    Example:
        >>> import torch
        >>> hits(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.0, 1.0]]), torch.tensor([1, 1, -1])).item()
        1
    """
    return (logits.argmax(-1) == y).sum(-1)


def accuracy(correct: Values, samples: Values) -> NDArray[np.float64]:
    """Accuracy of each client from counts: correct / samples, NaN where a client has no samples.

    Args:
        correct: rightly classified samples of each client [K].
        samples: samples of each client [K].

    Example:
        >>> accuracy([3, 0, 2], [4, 0, 2])
        array([0.75,  nan, 1.  ])
    """
    right, total = vector(correct), vector(samples)
    return np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)


def pooled(correct: Values, samples: Values) -> float:
    """Accuracy over everyone's samples together, which weighs each client by its number of samples.

    Example:
        >>> pooled([3, 0, 2], [4, 0, 2])
        0.8333333333333334
    """
    total = vector(samples).sum()
    return float(vector(correct).sum() / total) if total > 0 else float("nan")
