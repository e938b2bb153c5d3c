"""Distances between distributions of features: Fréchet (FID) and kernel (KID)."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.rng import stream
from fedloom.metrics.neighbours import alike


def _matrices(real: Tensor, synthetic: Tensor) -> tuple[Tensor, Tensor]:
    if real.ndim != 2 or synthetic.ndim != 2:
        shapes = f"{list(real.shape)} and {list(synthetic.shape)}"
        raise DataError(f"this distance is between features [N, d], but there are {shapes}: extract features first.")
    alike(real, synthetic)
    if min(len(real), len(synthetic)) < 2:
        raise DataError("a distance of distributions needs at least two samples of each.")
    return real.double(), synthetic.double()


def fid(real: Tensor, synthetic: Tensor) -> float:
    """Fréchet distance of real [N, d] and synthetic [M, d] features, taken as Gaussian (Heusel et al., 2017).

    FID = ‖μ - μ'‖² + tr(Σ + Σ' - 2 (ΣΣ')^½) with unbiased covariances. For centred features A [N, d] and B [M, d] the
    trace of the root is the sum of the singular values of ABᵀ / ((N - 1)(M - 1))^½, computed from triangular factors of
    A and B, which works for rank-deficient covariances of few samples. Few samples bias it upwards: compare at equal
    numbers, or use ``kid``.

    Raises:
        DataError: for images, features of different dimension, or fewer than two samples of either set.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
        >>> round(fid(x, x + torch.tensor([3.0, 4.0])), 6)
        25.0
    """
    factors, spreads, means = [], [], []
    for x in _matrices(real, synthetic):
        means.append(x.mean(0))
        centred = (x - means[-1]) / sqrt(len(x) - 1)
        spreads.append(centred.square().sum())
        factors.append(torch.linalg.qr(centred, mode="r").R if len(x) > x.shape[1] else centred)  # RᵀR = Σ
    root = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    return float(((means[0] - means[1]).square().sum() + spreads[0] + spreads[1] - 2 * root).clamp_min(0))


class Kid(NamedTuple):
    """Mean and standard deviation of the kernel distance over subsets."""

    mean: float
    std: float


def kid(real: Tensor, synthetic: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> Kid:
    """Unbiased kernel distance of features with k(a, b) = (⟨a, b⟩ / d + 1)³ (Bińkowski et al., 2018).

    KID = Σ_{i≠j} k(a_i, a_j) / (m(m - 1)) + Σ_{i≠j} k(b_i, b_j) / (m(m - 1)) - 2 Σ_{i,j} k(a_i, b_j) / m², averaged
    over subsets of m samples of each set, drawn without replacement. Its expectation is 0 for equal distributions,
    whatever the number of samples; values may be negative.

    Args:
        real: features [N, d].
        synthetic: features [M, d].
        subsets: number of subsets; a single one is used if both sets have m samples.
        size: m, at most N and M.
        seed: seed of the draws.

    Raises:
        ConfigError: for fewer than one subset, or a size below 2.
        DataError: for images, features of different dimension, or fewer than two samples of either set.

    Example:
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> kid(x, x + 1)  # k = (ab + 1)³: 1 + 27 - 2 (1 + 1 + 8 + 27) / 4
        Kid(mean=9.5, std=0.0)
    """
    if subsets < 1 or size < 2:
        raise ConfigError(f"KID needs at least 1 subset of at least 2 samples, not {subsets} of {size}.")
    a, b = _matrices(real, synthetic)
    m = min(size, len(a), len(b))
    if m == len(a) == len(b):
        subsets = 1
    values, draws = [], stream(seed, "kid")
    for _ in range(subsets):
        u, v = (x if m == len(x) else x[torch.from_numpy(draws.permutation(len(x))[:m])] for x in (a, b))
        values.append(_mmd(u, v))
    found = torch.stack(values)
    return Kid(float(found.mean()), float(found.std(correction=0)))


def _mmd(a: Tensor, b: Tensor) -> Tensor:
    m, d = a.shape
    aa, bb, ab = ((u @ v.T / d + 1) ** 3 for u, v in ((a, a), (b, b), (a, b)))
    within_each = (aa.sum() - aa.diagonal().sum() + bb.sum() - bb.diagonal().sum()) / (m * (m - 1))
    return within_each - 2 * ab.mean()
