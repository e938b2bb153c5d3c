"""Quantisation: few bits per number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from fedloom.base.ranges import Range
from fedloom.core.message import Slice
from fedloom.core.parts import UPDATE
from fedloom.parts.uplink.feedback import Random, WithFeedback


@dataclass(frozen=True)
class QSGD(Random):
    """C(x)_j = ‖x‖ sign(x_j) ξ_j/s, with ξ_j one of the two integers next to s|x_j|/‖x‖, at random.

    s = 2^{b-1} - 1, so that a number and its sign fit into b bits; the norm is sent in addition. Unbiased, and E ‖C(x)
    - x‖² ≤ min(P/s², √P/s) ‖x‖². Alistarh, Grubic, Li, Tomioka & Vojnovic, NeurIPS 2017, section 3.1, lemma 3.1,
    without their Elias coding: every number takes b bits.

    Args:
        bits: b ≥ 2, bits per number.
        slices: the slices to compress: ``update``, and other uploads of parts as slot/name, like ``drift/control``.
    """

    bits: Annotated[int, Range(2, 24)] = 8
    slices: tuple[str, ...] = (UPDATE,)

    citation = "alistarh2017qsgd"

    def compress(self, x: Slice, draws: np.random.Generator) -> Slice:
        """C(x)."""
        value = x.value.double()
        norm, s = torch.linalg.vector_norm(value), 2 ** (self.bits - 1) - 1
        sent = x._replace(bits=self.bits, extra=x.extra + 8 * x.value.element_size())
        if not (0 < norm < float("inf")):  # a message that is not finite is refused later
            return sent
        scaled = value.abs() * (s / norm)
        low = scaled.floor()
        coin = torch.from_numpy(draws.random(tuple(value.shape))).to(value.device)
        level = low + (coin < scaled - low)
        return sent._replace(value=(value.sign() * level * (norm / s)).to(x.value.dtype))


@dataclass(frozen=True)
class SignCompression(WithFeedback):
    """C(x)_j = (‖x‖₁/P) sign(x_j): one bit per number, and one scale.

    A contraction: ‖x - C(x)‖² = (1 - ‖x‖₁²/(P‖x‖²)) ‖x‖². With ``feedback`` a client remembers what was not sent, e,
    and adds it to its next upload: C(x + e) is sent and e ← x + e - C(x + e); without it, the scaled sign does not
    converge in general. The sign of 0 is 1, so that coordinates dropped by a preceding sparsifier are sent as well.
    Karimireddy, Rebjock, Stich & Jaggi, ICML 2019, algorithm 1.

    Args:
        feedback: use error feedback.
        slices: the slices to compress: ``update``, and other uploads of parts as slot/name, like ``drift/control``.
    """

    feedback: bool = True
    slices: tuple[str, ...] = (UPDATE,)

    citation = "karimireddy2019feedback"

    def compress(self, x: Slice) -> Slice:
        """C(x)."""
        ones = torch.ones_like(x.value)
        value = x.value.abs().mean() * torch.where(x.value < 0, -ones, ones)
        return x._replace(value=value, numbers=value.numel(), bits=1, extra=8 * value.element_size())
