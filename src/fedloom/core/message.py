"""The message that a client sends in a round: its slices, and the channel capacity that each one uses."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from torch import Tensor

from fedloom.base.tree import Float, Tree


class Slice(NamedTuple):
    """One tensor of a message as the server reads it, and the size of its encoding.

    Attributes:
        value: the tensor, in the shape in which a part uploaded it.
        numbers: number of scalars sent.
        bits: bits per scalar.
        extra: further bits, for positions or a scale.
        boundable: whether it may be clipped to a norm bound; flags, counts and functions of the update may not.
    """

    value: Tensor
    numbers: int
    bits: int
    extra: int = 0
    boundable: bool = True

    @classmethod
    def of(cls, value: Tensor, boundable: bool = True) -> Slice:
        """A tensor sent without encoding."""
        return cls(value, value.numel(), 8 * value.element_size(), boundable=boundable)

    @property
    def nbytes(self) -> int:
        """Size of the encoding in whole bytes.

        >>> import torch
        >>> Slice.of(torch.zeros(3)).nbytes, Slice(torch.zeros(100), 10, 4, extra=70).nbytes
        (12, 14)
        """
        return ceil((self.numbers * self.bits + self.extra) / 8)


Message = dict[str, Slice]  # by slot: ``update`` [P], ``buffers``, and ``<place>/<name>`` of what parts upload


class ClientEnd(NamedTuple):
    """What a part returns after local work: its new client state, its uploads and the update Δ_i."""

    state: Tree
    uploads: Tree
    update: Float[Tensor, "P"]


class SendResult(NamedTuple):
    """The result of an uplink: its new client state, the message, and slices of its own for the server."""

    state: Tree
    message: Message
    uploads: Tree
