"""Client states in shared memory, where they stay from round to round.

A state outlives its round. In an arena a worker writes it once, the driver keeps a view of it, and the next worker
reads it there: the driver never copies a state.
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


class Arena:
    """Shared memory for client states, cut into places of one size; the system commits only pages that are touched.

    The driver takes a place before the work that fills it; the place is free again when no tensor in it is left. If no
    place is free, a state travels like any other value.

    Args:
        count: number of places.
        nbytes: size of a place.

    >>> arena = Arena(1, 1000)
    >>> place, owner = arena.take()
    >>> state = arena.put(place, {"drift": {"h": torch.ones(3)}})
    >>> arena.address(state["drift"]["h"]), arena.take()
    (0, None)
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NORESERVE
        try:
            self.memory: mmap.mmap | None = mmap.mmap(-1, count * self.nbytes, flags) if count else None
        except OSError:  # the system grants no address space beyond its memory
            self.memory = None
        self.free = list(reversed(range(count))) if self.memory else []
        self.owners: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()
        self.base = self.view((1,), torch.uint8, 0).data_ptr() if self.memory else 0

    def take(self) -> tuple[int, memoryview] | None:
        """A free place and its owner, which keeps it until tensors do; None if there is none."""
        if not self.free or self.memory is None:
            return None
        place = self.free.pop()
        owner = memoryview(self.memory)[place * self.nbytes : (place + 1) * self.nbytes]
        self.owners[place] = owner
        weakref.finalize(owner, self.free.append, place).atexit = False
        return place, owner

    def put(self, place: int, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """A state with its tensors moved to a place, but for those that lie in the arena already or find no room."""
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
        """Where a tensor lies, in bytes from the beginning; None if it is elsewhere, or not in one piece."""
        at = value.data_ptr() - self.base
        inside = self.memory is not None and 0 <= at < len(self.memory)
        return at if inside and value.is_contiguous() else None

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> Tensor:
        """The tensor at an address; it keeps its place."""
        place, offset = divmod(at, self.nbytes)
        owner = self.owners.get(place)
        memory, offset = (self.memory, at) if owner is None else (owner, offset)
        assert memory is not None
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)
