"""Trees in memory that several processes see: packed into a buffer, read back as views without copying."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

Spec = list[tuple[tuple[str, ...], tuple[int, ...], torch.dtype, int]]  # path, shape, type, offset in bytes
ALIGN = 64


class Segment:
    """A piece of anonymous shared memory, inherited by forked processes; the system commits only what is touched."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, max(nbytes, ALIGN))
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def pack(self, leaves: Iterable[tuple[tuple[str, ...], Tensor]], start: int = 0) -> tuple[Spec, int]:
        """Copy tensors in, one after the other; returns where each lies and the end.

        Raises:
            MemoryError: if they do not fit.
        """
        spec: Spec = []
        at = start
        for path, value in leaves:
            size = value.numel() * value.element_size()
            if at + size > len(self.bytes):
                raise MemoryError(f"shared segment of {len(self.bytes)} bytes is full")
            self._view(tuple(value.shape), value.dtype, at).copy_(value)
            spec.append((path, tuple(value.shape), value.dtype, at))
            at += -(-size // ALIGN) * ALIGN
        return spec, at

    def unpack(self, spec: Spec) -> dict[tuple[str, ...], Tensor]:
        """Views of packed tensors by their paths."""
        return {path: self._view(shape, dtype, at) for path, shape, dtype, at in spec}

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        return self.bytes[at : at + size].view(dtype).view(shape)


def flatten(tree: Mapping, prefix: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Tensor]]:
    """The leaves of nested dictionaries with their paths.

    >>> [path for path, _ in flatten({"a": {"b": torch.zeros(1)}, "c": torch.zeros(1)})]
    [('a', 'b'), ('c',)]
    """
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield (*prefix, key), value
        else:
            yield from flatten(value, (*prefix, key))


def nest(leaves: Mapping[tuple[str, ...], Tensor]) -> dict:
    """The nested dictionaries that ``flatten`` came from."""
    tree: dict = {}
    for path, value in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
