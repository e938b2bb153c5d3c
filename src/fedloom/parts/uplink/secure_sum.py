"""The arithmetic of secure aggregation: masks that cancel in the sum over the cohort."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.ranges import Range
from fedloom.base.tree import Tree
from fedloom.core.context import Context, RoundInfo
from fedloom.core.message import Message, SendResult, Slice
from fedloom.core.parts import UPDATE, Reduce, Reduced, Uplink

RING = 2**63  # numbers lie in [-2^63, 2^63) and wrap around


@dataclass(frozen=True)
class SecureSum(Uplink):
    """y_i = round(2^f x_i) + Σ_{j>i} m_ij - Σ_{j<i} m_ij mod 2^64, with m_ij uniform, known to i and j alone.

    In the ring the masks cancel exactly: Σ_S y_i = Σ_S round(2^f x_i), which the server divides by 2^f; a sum over n
    clients has an error of at most n 2^{-f-1}. If clients drop out after receiving the model, the others reveal the
    masks that they share with them, and the server subtracts these. Sums need equal weights, so mixing must be
    ``uniform``; parts that need single uploads, and batch statistics, are rejected. It may follow ``clip_noise`` but
    not precede it.

    This is the arithmetic of Bonawitz et al., CCS 2017, section 4, with masks drawn from the run's seed instead of
    agreed keys: the bits are those of the protocol, the secrecy is not. A deployment must use a real protocol; key
    agreement and secret shares are not counted as communication. A client draws |S_t| - 1 masks as long as its upload.

    Args:
        fraction_bits: f.
    """

    fraction_bits: Annotated[int, Range(1, 48)] = 24

    guarantees = frozenset({"sums"})
    citation = "bonawitz2017secure"

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        """The masked message."""
        peers = [int(peer) for peer in ctx.invited if peer != ctx.client]
        masked: Message = {}
        for slot, x in message.items():
            scaled = (x.value.double() * 2.0**self.fraction_bits).round()
            if not bool((scaled.abs() * len(ctx.invited) < RING).all()):
                raise ValueError(f"{slot} is too large for a ring of 64 bits with {self.fraction_bits} fraction_bits")
            value = scaled.long()
            for peer in peers:
                value = value + _mask(ctx.facts.seed, slot, ctx.round, ctx.client, peer, value)
            masked[slot] = Slice.of(value)
        return SendResult({}, masked, {})

    def receive(
        self, state: Tree, received: Mapping[str, Reduced], uploads: Tree, info: RoundInfo
    ) -> tuple[Tree, dict[str, Tensor]]:
        """The unmasked sums, converted to floats and reduced as declared."""
        senders = [int(client) for client in info.cohort]
        dropouts = sorted({int(client) for client in info.invited} - set(senders))
        unmasked: dict[str, Tensor] = {}
        for slot, (value, how) in received.items():
            sent = UPDATE if slot.endswith(f"/{UPDATE}") else slot
            for client in senders:
                for peer in dropouts:
                    value = value - _mask(info.facts.seed, sent, info.t, client, peer, value)
            divisor = {Reduce.SUM: 1, Reduce.SHARE: info.facts.clients}.get(how, len(senders))
            unmasked[slot] = (value.double() / (2.0**self.fraction_bits * divisor)).to(info.received)
        return state, unmasked


def _mask(seed: int, slot: str, round: int, client: int, peer: int, like: Tensor) -> Tensor:
    """The mask that a client adds for a peer, int64 in the shape of ``like``; the peer adds its negative."""
    draws = rng.stream(seed, f"mask of {slot}", round, min(client, peer), max(client, peer))
    mask = np.asarray(draws.integers(-RING, RING, size=tuple(like.shape), dtype=np.int64))
    if client > peer:
        np.negative(mask, out=mask)
    return torch.from_numpy(mask).to(like.device)
