"""Distances between sets of images or features: Fréchet (FID), kernel (KID), and nearest neighbours.

Nearest neighbours, balls and mean distances are computed in blocks. Distances are Euclidean over all values of a
sample. ‖a - b‖² = ‖a‖² + ‖b‖² - 2⟨a, b⟩ is computed in float64 after subtraction of the mean of ``b``, since
cancellation in float32 would hide how close a near copy is. Only one block of the distance matrix is in memory; 60 000
images of 784 pixels against 100 take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.base.checks import at_least
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.rng import stream


def _matrices(real: Tensor, synthetic: Tensor) -> tuple[Tensor, Tensor]:
    if real.ndim != 2 or synthetic.ndim != 2 or min(len(real), len(synthetic)) < 2:
        shapes = f"{list(real.shape)} and {list(synthetic.shape)}"
        raise DataError(f"this distance is between features [N, d] of at least two samples each, not {shapes}.")
    alike(real, synthetic)
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
        ConfigError: if m is below 2.
        DataError: for images, features of different dimension, or fewer than two samples of either set.

    Example:
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> kid(x, x + 1)  # k = (ab + 1)³: 1 + 27 - 2 (1 + 1 + 8 + 27) / 4
        Kid(mean=9.5, std=0.0)
    """
    at_least(2, "kid: ", size=size)
    a, b = _matrices(real, synthetic)
    m = min(size, len(a), len(b))
    if m == len(a) == len(b):
        subsets = 1
    values, draws = [], stream(seed, "kid")
    for _ in range(subsets):
        u, v = (x if m == len(x) else x[torch.from_numpy(draws.permutation(len(x))[:m])] for x in (a, b))
        values.append(_mmd(u, v))
    estimates = torch.stack(values)
    return Kid(float(estimates.mean()), float(estimates.std(correction=0)))


def _mmd(a: Tensor, b: Tensor) -> Tensor:
    m, d = a.shape
    aa, bb, ab = ((u @ v.T / d + 1) ** 3 for u, v in ((a, a), (b, b), (a, b)))
    within_each = (aa.sum() - aa.diagonal().sum() + bb.sum() - bb.diagonal().sum()) / (m * (m - 1))
    return within_each - 2 * ab.mean()


ROWS = 2048  # rows of either set per block
SLACK = 0.05  # tolerance of values outside the real images' range, as a fraction of it


def alike(real: Tensor, synthetic: Tensor, names: tuple[str, str] = ("real", "synthetic")) -> None:
    """Raise a ``DataError`` unless two sets [N, ...] and [M, ...] have samples of one shape and values in one range.

    Ranges differ if synthetic values lie outside the real images' range by more than a twentieth of its width, if real
    images are bytes and synthetic ones fractions, or if real images have negative values and synthetic ones have none.
    The range of real images within 0..1 is 0..1, even if none of them is black or white.
    Features [N, d] are compared by shape alone. Empty sets, NaN and infinity are errors too; ``names`` are the names of
    the two sets in error sentences.

    Example:
        >>> alike(torch.rand(9, 1, 4, 4), 255 * torch.rand(5, 1, 4, 4))
        Traceback (most recent call last):
        ...
        fedloom.base.errors.DataError: the synthetic images hold values from ... to ..., the real ones from 0... to ...
    """
    for name, values in zip(names, (real, synthetic), strict=True):
        if values.ndim < 2 or not len(values):
            raise DataError(f"the {name} set must be samples [N, ...] with at least one, not {list(values.shape)}.")
        if not torch.isfinite(values.sum()) and not bool(torch.isfinite(values).all()):
            raise DataError(f"the {name} set holds NaN or infinity.")
    if real.shape[1:] != synthetic.shape[1:]:
        shapes = f"{list(synthetic.shape[1:])} and {list(real.shape[1:])}"
        raise DataError(f"a {names[1]} and a {names[0]} sample must have one shape, but they have {shapes}.")
    if real.ndim < 3:
        return
    (a, b), (low, high) = ([float(v) for v in values.aminmax()] for values in (real, synthetic))
    if a >= 0 and b <= 1:
        a, b = 0.0, 1.0
    margin = SLACK * (b - a)
    outside = low < a - margin or high > b + margin
    fractions = b - a >= 100 and 0 < high <= 1
    one_signed = a < -margin and low >= 0
    if outside or fractions or one_signed:
        raise DataError(
            f"the {names[1]} images hold values from {low:.3g} to {high:.3g}, "
            f"the {names[0]} ones from {a:.3g} to {b:.3g}: bring both into the same range."
        )


@dataclass(frozen=True)
class Nearest:
    """The k nearest neighbours of each sample, nearest first: distances [N, k], float64, and row numbers [N, k]."""

    distance: Tensor
    index: Tensor


def _flat(x: Tensor, centre: Tensor | float = 0.0) -> Tensor:
    return x.flatten(1).double() - centre


def nearest(queries: Tensor, references: Tensor, k: int = 1, *, exclude_self: bool = False) -> Nearest:
    """The k nearest references of every query.

    Args:
        queries: samples [N, ...].
        references: samples [M, ...] of the same shape.
        k: number of neighbours.
        exclude_self: whether the references are the queries themselves, which are then not their own neighbours.

    Raises:
        ConfigError: if there are fewer than k references.
        DataError: if samples differ in shape.

    Example:
        >>> nearest(torch.tensor([[0.0], [5.0]]), torch.tensor([[1.0], [7.0], [4.0]]), k=2).distance.tolist()
        [[1.0, 4.0], [1.0, 2.0]]
    """
    if queries.shape[1:] != references.shape[1:]:  # equally long ones would be compared, and short ones broadcast
        raise DataError(f"samples have one shape, not {list(queries.shape[1:])} and {list(references.shape[1:])}.")
    if k < 1 or k > len(references) - exclude_self:
        raise ConfigError(f"there are {len(references) - exclude_self} neighbours to choose from, so k cannot be {k}.")
    centre = _mean(references)
    chunks: list[Nearest] = []
    for start in range(0, len(queries), ROWS):
        a = _flat(queries[start : start + ROWS], centre)
        best = Nearest(a.new_empty(len(a), 0), torch.empty(len(a), 0, dtype=torch.int64, device=a.device))
        for begin in range(0, len(references), ROWS):
            b = _flat(references[begin : begin + ROWS], centre)
            squares = torch.addmm(b.square().sum(1), a, b.T, alpha=-2)  # [A, B], without ‖a‖², which keeps the order
            if exclude_self and start == begin:
                squares.diagonal().fill_(torch.inf)
            least = squares.topk(min(k, len(b)), largest=False)
            values = torch.cat([best.distance, least.values], 1)
            places = torch.cat([best.index, least.indices + begin], 1)
            closest = values.topk(min(k, values.shape[1]), largest=False)
            best = Nearest(closest.values, places.gather(1, closest.indices))
        exact = torch.stack([(a - _flat(references[column], centre)).norm(dim=1) for column in best.index.T], 1)
        order = exact.sort(1)
        chunks.append(Nearest(order.values, best.index.gather(1, order.indices)))
    return Nearest(torch.cat([f.distance for f in chunks]), torch.cat([f.index for f in chunks]))


def _mean(x: Tensor) -> Tensor:
    return torch.stack([part.flatten(1).double().sum(0) for part in x.split(ROWS)]).sum(0) / len(x)


def within(queries: Tensor, centres: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
    """Number of balls that contain each query, int64 [N], and whether each ball contains any query, bool [M].

    Args:
        queries: samples [N, ...].
        centres: centres of the balls [M, ...].
        radii: radii of the balls [M].

    Example:
        >>> counts, hit = within(torch.tensor([[0.0], [9.0]]), torch.tensor([[1.0], [5.0]]), torch.tensor([1.0, 2.0]))
        >>> counts.tolist(), hit.tolist()
        ([1, 0], [True, False])
    """
    origin = _mean(centres)
    counts = torch.zeros(len(queries), dtype=torch.int64, device=centres.device)
    is_hit = torch.zeros(len(centres), dtype=torch.bool, device=centres.device)
    for begin in range(0, len(centres), ROWS):
        b, r = _flat(centres[begin : begin + ROWS], origin), radii[begin : begin + ROWS].double()
        reach = (r * (1 + 1e-9)).square() - b.square().sum(1)  # rounding must not lose a sample on the sphere
        for start in range(0, len(queries), ROWS):
            a = _flat(queries[start : start + ROWS], origin)
            inside = torch.addmm(a.square().sum(1, keepdim=True), a, b.T, alpha=-2) <= reach + 1e-12
            counts[start : start + ROWS] += inside.sum(1)
            is_hit[begin : begin + ROWS] |= inside.any(0)
    return counts, is_hit


def spread(x: Tensor) -> float:
    """Mean pairwise distance 2 / (N(N - 1)) Σ_{i<j} ‖x_i - x_j‖; NaN for fewer than two samples.

    >>> spread(torch.tensor([[0.0], [1.0], [3.0]]))
    2.0
    """
    if len(x) < 2:
        return float("nan")
    flat, total = _flat(x, _mean(x)), 0.0
    squares = flat.square().sum(1)
    for start in range(0, len(flat), ROWS):
        a = flat[start : start + ROWS]
        between = torch.addmm(squares, a, flat.T, alpha=-2) + a.square().sum(1, keepdim=True)
        between.diagonal(start).zero_()
        total += float(between.clamp_min(0).sqrt().sum())
    return total / (len(x) * (len(x) - 1))
