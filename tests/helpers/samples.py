"""Random numbers and real images, as tensors."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


def normal(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def digits(shuffled: bool = False) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in 0..1 and labels [N]; as they come, neighbours are of one writer."""
    data = load_digits()
    x = torch.from_numpy(np.asarray(data.images, dtype=np.float32) / 16)[:, None]  # pyright: ignore
    y = torch.from_numpy(np.asarray(data.target, dtype=np.int64))  # pyright: ignore
    order = np.random.default_rng(0).permutation(len(x)) if shuffled else slice(None)
    return x[order], y[order]
