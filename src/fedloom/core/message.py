"""What a client sends in a round: its slices, and how much of a channel each one takes."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from torch import Tensor

from fedloom.core.tree import Tree


class Slice(NamedTuple):
    """One tensor of a message, as the server will read it, and what is really sent for it.

    Attributes:
        value: the tensor; its shape is that of the slice as a part uploaded it.
        numbers: how many numbers are sent.
        bits: of each of them.
        extra: bits beside them, of positions or a scale.
    """

    value: Tensor
    numbers: int
    bits: int
    extra: int = 0

    @classmethod
    def of(cls, value: Tensor) -> Slice:
        """A tensor sent as it is."""
        return cls(value, value.numel(), 8 * value.element_size())

    @property
    def nbytes(self) -> int:
        """Whole bytes that are sent.

        >>> import torch
        >>> Slice.of(torch.zeros(3)).nbytes, Slice(torch.zeros(100), 10, 4, extra=70).nbytes
        (12, 14)
        """
        return ceil((self.numbers * self.bits + self.extra) / 8)


Message = dict[str, Slice]  # by slot: ``update`` [P], ``buffers``, and ``<place>/<name>`` of what parts upload


class Sent(NamedTuple):
    """What an uplink makes of a message: its new client state, the message, and slices of its own for the server."""

    state: Tree
    message: Message
    uploads: Tree
