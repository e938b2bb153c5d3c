"""Masks of dropout as functions of keys: the same for a client alone and among others, on every device.

A client's keys come from its stream of the round, one for each mask that it draws, so that the mask of a layer in a
step is a function of (seed, round, client) and of how many were drawn before. PyTorch's own masks depend on the device
and the size of a call, and have to be drawn client by client.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from fedloom.base.tree import Float, Int

WEYL, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64
LANES, LEVELS = 4, 1 << 16  # numbers of 16 bits in one of 64
CACHED = 1 << 18  # values whose masks are drawn in one go on a CPU


def keys(count: int, generator: torch.Generator | None = None) -> Int[Tensor, "count"]:
    """The next keys of a generator on the CPU, by default of PyTorch's own; one by one they are the same."""
    return torch.empty(count, dtype=torch.int64).random_(generator=generator)


def masks(keys: Int[Tensor, "c"], x: Float[Tensor, "c B ..."], p: float) -> Float[Tensor, "c B ..."]:
    """0 with probability p, else 1/(1 - p), for every value of c clients.

    A value's number is the output of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 16) at its place, from the
    client's key: 16 bits, so that p is rounded to a multiple of 2⁻¹⁶, and the mean stays 1. Images [c, B, channels,
    height, width] are numbered channels-last, as they are stored.

    Args:
        keys: the clients' keys, on the device of x.
        x: values whose shape, type and device the masks have; of half precision, they are in float32.
        p: the probability in (0, 1).
    """
    order = x.movedim(2, -1) if x.ndim == 5 else x
    size = prod(order.shape[1:])
    level = min(max(round(p * LEVELS), 1), LEVELS - 1)
    result = torch.empty(len(keys), size, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    places = torch.arange(1, 1 - (-size // LANES), device=x.device).mul_(WEYL)
    together = max(CACHED // max(size, 1), 1) if x.is_cpu else len(keys)
    for part, some in zip(result.split(together), keys.split(together), strict=True):
        bits = _mixed(places + some[:, None]).view(torch.int16)[:, :size]
        part.copy_(bits >= level - LEVELS // 2).mul_(LEVELS / (LEVELS - level))
    result = result.view(order.shape)
    return result.movedim(-1, 2) if x.ndim == 5 else result


def _mixed(state: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The outputs of SplitMix64 at these states, which are overwritten; shifts fill with zeros."""
    state.bitwise_xor_((state >> 30).bitwise_and_((1 << 34) - 1)).mul_(FIRST)
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(SECOND)
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))


class KeyedDropout(nn.Dropout):
    """``nn.Dropout`` whose masks are those of keys from PyTorch's generator on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        if self.p == 1:  # nothing is drawn, and there is no 0 / 0
            mask = torch.zeros_like(input)
        else:
            mask = masks(keys(1).to(input.device), input[None], self.p)[0]
        return input.mul_(mask) if self.inplace else (input * mask).to(input.dtype)


def keyed(module: nn.Module) -> nn.Module:
    """The module, whose layers of dropout take their masks from keys from now on."""
    for layer in module.modules():
        if type(layer) is nn.Dropout:
            layer.__class__ = KeyedDropout
    return module
