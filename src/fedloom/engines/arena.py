"""Client states in shared memory, where they stay from round to round.

A worker writes a state once, the driver keeps a view of it, and the next worker reads it in place: the driver never
copies states.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

ALIGN = 64
NORESERVE = 0x4000 if sys.platform == "linux" else 0  # address space beyond the memory; Python 3.11 has no name for it
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NORESERVE


class Arena:
    """Shared memory for client states, divided into places of equal size; pages are committed on first use.

    The driver reserves a place before the work that fills it; the place is free again when no tensor in it is
    referenced. If no place is free, a state is sent like any other value.

    Args:
        count: number of places.
        nbytes: size of a place in bytes.

    >>> arena = Arena(1, 1000)
    >>> place, owner = arena.take()
    >>> state = arena.put(place, {"drift": {"h": torch.ones(3)}})
    >>> arena.address(state["drift"]["h"]), arena.take()
    (0, None)
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.memory: mmap.mmap | None = mmap.mmap(-1, count * self.nbytes, SHARED) if count else None
        except OSError:  # the system grants no more address space than it has memory
            self.memory = None
        self.free = list(reversed(range(count))) if self.memory else []
        self.owners: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()
        self.base = self.view((1,), torch.uint8, 0).data_ptr() if self.memory else 0

    def take(self) -> tuple[int, memoryview] | None:
        """A free place and its owner, which holds the place while tensors reference it; None if there is none."""
        if not self.free or self.memory is None:
            return None
        place = self.free.pop()
        owner = memoryview(self.memory)[place * self.nbytes : (place + 1) * self.nbytes]
        self.owners[place] = owner
        weakref.finalize(owner, self.free.append, place).atexit = False
        return place, owner

    def put(self, place: int, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """The state with its tensors moved to a place, except those already in the arena and those that do not fit."""
        end = place * self.nbytes
        stop = end + self.nbytes
        moved: dict[str, dict[str, Tensor]] = {}
        for name, tree in state.items():
            moved[name] = dict(tree)
            for key, value in tree.items():
                size = value.numel() * value.element_size()
                if size and self.address(value) is None and end + size <= stop:
                    moved[name][key] = self.view(tuple(value.shape), value.dtype, end).copy_(value)
                    end += -(-size // ALIGN) * ALIGN
        return moved

    def address(self, value: Tensor) -> int | None:
        """The offset of a tensor in bytes; None if it is outside the arena or not contiguous."""
        at = value.data_ptr() - self.base
        inside = self.memory is not None and 0 <= at < len(self.memory)
        return at if inside and value.is_contiguous() else None

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> Tensor:
        """The tensor at an address; it keeps its place reserved."""
        place, offset = divmod(at, self.nbytes)
        owner = self.owners.get(place)
        memory, offset = (self.memory, at) if owner is None else (owner, offset)
        assert memory is not None
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)
