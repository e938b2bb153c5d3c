"""Sparsification: only some coordinates are sent."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Annotated

import numpy as np
import torch

from fedloom.base.ranges import Range
from fedloom.core.message import Slice
from fedloom.core.parts import UPDATE
from fedloom.parts.uplink.feedback import Random, WithFeedback

SEED_BITS = 64


def _count(fraction: float, size: int) -> int:
    """k = ⌈fraction · P⌉."""
    return min(max(ceil(fraction * size - 1e-9), 1), size)


@dataclass(frozen=True)
class TopK(WithFeedback):
    """Only the k = ⌈fraction · P⌉ coordinates of largest magnitude are sent; the others are 0.

    A contraction: ‖x - C(x)‖² ≤ (1 - k/P) ‖x‖². With ``feedback`` a client remembers what was not sent, e, and adds it
    to its next upload: C(x + e) is sent and e ← x + e - C(x + e). k numbers are sent with their positions, as ⌈log₂ P⌉
    bits each or one bit per coordinate, whichever is smaller. fraction = 1 is the identity. Ties go to the first
    positions. Stich, Cordonnier & Jaggi, NeurIPS 2018, definition 2.1 and algorithm 1.

    Args:
        fraction: k/P, in (0, 1].
        feedback: use error feedback.
        slices: the slices to compress: ``update``, and other uploads of parts as slot/name, like ``drift/control``.
    """

    fraction: Annotated[float, Range(0, 1, above=True)] = 0.01
    feedback: bool = True
    slices: tuple[str, ...] = (UPDATE,)

    citation = "stich2018sparsified"

    def compress(self, x: Slice) -> Slice:
        """C(x)."""
        flat = x.value.flatten()
        size = len(flat)
        k = _count(self.fraction, size)
        if k == size:
            return x
        positions = flat.abs().sort(descending=True, stable=True).indices[:k]
        sparse = torch.zeros_like(flat)
        sparse[positions] = flat[positions]
        position_bits = min(k * ceil(log2(size)), size)
        return x._replace(value=sparse.view_as(x.value), numbers=k, extra=x.extra + position_bits)


@dataclass(frozen=True)
class RandomK(Random):
    """k = ⌈fraction · P⌉ random coordinates are sent, multiplied by P/k; the others are 0.

    Unbiased: E C(x) = x and E ‖C(x) - x‖² = (P/k - 1) ‖x‖². Positions are derived from a 64-bit seed that is sent with
    the k numbers. fraction = 1 is the identity. Wangni, Wang, Liu & Zhang, NeurIPS 2018, with equal probabilities.

    Args:
        fraction: k/P, in (0, 1].
        slices: the slices to compress: ``update``, and other uploads of parts as slot/name, like ``drift/control``.
    """

    fraction: Annotated[float, Range(0, 1, above=True)] = 0.1
    slices: tuple[str, ...] = (UPDATE,)

    citation = "wangni2018sparsification"

    def compress(self, x: Slice, draws: np.random.Generator) -> Slice:
        """C(x)."""
        flat = x.value.flatten()
        size = len(flat)
        k = _count(self.fraction, size)
        if k == size:
            return x
        positions = torch.from_numpy(draws.choice(size, k, replace=False)).to(flat.device)
        sparse = torch.zeros_like(flat)
        sparse[positions] = flat[positions] * (size / k)
        return x._replace(value=sparse.view_as(x.value), numbers=k, extra=x.extra + SEED_BITS)
