"""Coordinate-wise order statistics of the updates: the median and the trimmed mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Range
from fedloom.base.tree import Float, Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Halves, Mixing, Needs


def middle(updates: Float[Tensor, "n P"], cut: int) -> tuple[Float[Tensor, "P"], np.ndarray]:
    """The mean of each coordinate of updates, without its ``cut`` smallest and ``cut`` largest values.

    Returns:
        The means; and the fraction of the averaged values that came from each row, float64 [n].

    >>> middle(torch.tensor([[1.0, 9.0], [2.0, 8.0], [99.0, 7.0]]), cut=1)
    (tensor([2., 8.]), array([0., 1., 0.]))
    """
    n = len(updates)
    values, rows = updates.sort(dim=0, stable=True)
    sources = rows[cut : n - cut].flatten()
    counts = sources.new_zeros(n).scatter_add_(0, sources, torch.ones_like(sources)).double()
    return values[cut : n - cut].mean(dim=0), (counts / counts.sum()).cpu().numpy()


class OrderStatistic(Mixing, ABC):
    """Base class of means of the values in the middle of each coordinate."""

    needs = Needs(updates=True)
    citation = "yin2018byzantine"

    @abstractmethod
    def cut(self, count: int) -> int:
        """The number of values that are left out at either end, of ``count`` values."""

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The fractions of values; the mean itself is kept for ``combine``."""
        mean, p = middle(torch.stack(list(info.updates)), self.cut(len(info.updates)))
        return {"update": mean}, p

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The mean."""
        return {}, state["update"]


@dataclass(frozen=True)
class CoordinateMedian(OrderStatistic):
    """Δ_j = median_i Δ_ij in every coordinate j; the mean of the two middle values if the cohort size is even.

    Breakdown point: with f hostile clients of n, every coordinate stays between the smallest and the largest honest
    value as long as f ≤ ⌈n/2⌉ - 1, whatever the hostile clients send. All clients have equal weight, whatever their
    size. The recorded p_i is the fraction of coordinates whose median client i holds. All updates of the cohort are
    held in memory. Yin, Chen, Ramchandran & Bartlett, ICML 2018, definition 1.
    """

    def cut(self, count: int) -> int:
        return (count - 1) // 2


@dataclass(frozen=True)
class TrimmedMean(OrderStatistic):
    """Δ_j = mean of Δ_ij in every coordinate j without its b smallest and b largest values, b = ⌊βn⌋.

    Breakdown point: with f hostile clients of n, every coordinate stays between the smallest and the largest honest
    value as long as f ≤ b, whatever the hostile clients send. All clients have equal weight, whatever their size; β = 0
    is the unweighted mean. The recorded p_i is the fraction of the averaged values that came from client i. All updates
    of the cohort are held in memory. Yin, Chen, Ramchandran & Bartlett, ICML 2018, definition 2.

    Args:
        trim: β in [0, 1/2), the fraction trimmed at either end.
    """

    trim: Annotated[float, Range(0, 0.5, below=True)] = 0.2

    def cut(self, count: int) -> int:
        return int(self.trim * count + 1e-9)
