"""Compression of some slices of a message, with or without error feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.core.context import Context
from fedloom.core.message import Message, SendResult, Slice
from fedloom.core.parts import UPDATE, Uplink

Compressor = Callable[[Slice], Slice]


def compressed(message: Message, slices: Sequence[str], compress: Compressor) -> Message:
    """The message with the named slices compressed; empty ones are unchanged."""
    return message | {slot: compress(message[slot]) for slot in slices if message[slot].value.numel()}


class Compression(Uplink, ABC):
    """Base class of compressors C of some ``slices``."""

    slices: tuple[str, ...]

    @property
    def covered(self) -> tuple[str, ...]:
        return self.slices


class Random(Compression):
    """Base class of compressors that draw random numbers."""

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        """The compressed slices."""
        return SendResult({}, compressed(message, self.slices, lambda x: self.compress(x, draws)), {})

    @abstractmethod
    def compress(self, x: Slice, draws: np.random.Generator) -> Slice:
        """C(x)."""


class WithFeedback(Compression):
    """Base class of compressors that may remember what they did not send: with ``feedback``.

    With memory e and a slice x, C(x + e) is sent and e ← x + e - C(x + e). Seide et al. 2014; Karimireddy et al., ICML
    2019, algorithm 1.
    """

    feedback: bool

    def init_client(self, theta: Tensor) -> Tree:
        """e = 0 for the update."""
        return {UPDATE: torch.zeros_like(theta)} if self.feedback and UPDATE in self.slices else {}

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        """The compressed slices, and the new memory."""
        if not self.feedback:
            return SendResult({}, compressed(message, self.slices, self.compress), {})
        keys = {slot: slot.replace("/", " ") for slot in self.slices}  # a state's names are parts of paths
        for slot, key in keys.items():
            if (before := ctx.state.get(key)) is not None:
                message = message | {slot: message[slot]._replace(value=message[slot].value + before)}
        sent = compressed(message, self.slices, self.compress)
        return SendResult({key: message[slot].value - sent[slot].value for slot, key in keys.items()}, sent, {})

    @abstractmethod
    def compress(self, x: Slice) -> Slice:
        """C(x)."""
