"""Shared memory for tensors that several processes read without copying.

Messages through a pipe are pickles in which every tensor, wherever it is nested (a broadcast, a state, a fold), is
replaced by its address in the segment. A tensor that no longer fits is pickled itself. Client states stay in an arena
from round to round: a worker writes a state once, the driver keeps a view of it, and the next worker reads it in place.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
import weakref
from collections.abc import Mapping
from math import prod
from typing import Any

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


Address = tuple[tuple[int, ...], torch.dtype, int, bool]  # shape, dtype, offset in bytes, whether in the arena
MARK = 8  # bytes of the integer at the start


class Segment:
    """A block of anonymous shared memory, inherited by forked processes; pages are committed on first use.

    >>> segment = Segment(1000)
    >>> message, end = segment.dump({"state": [torch.ones(2), "and so on"]})
    >>> segment.load(message), end
    ({'state': [tensor([1., 1.]), 'and so on']}, 128)
    """

    def __init__(self, nbytes: int, arena: Arena | None = None) -> None:
        self.memory = mmap.mmap(-1, ALIGN + nbytes, SHARED)
        self.arena = arena or Arena(0, 0)

    @property
    def mark(self) -> int:
        """An integer outside the stored values that every process may read and write at any time."""
        return int.from_bytes(self.memory[:MARK], "little")

    @mark.setter
    def mark(self, number: int) -> None:
        self.memory[:MARK] = number.to_bytes(MARK, "little")

    def dump(self, value: Any, start: int = ALIGN) -> tuple[bytes, int]:
        """Copy the tensors of ``value`` into the segment; return the message for ``load`` and the end offset."""
        file = io.BytesIO()
        packer = _Packer(file, self, start)
        packer.dump(value)
        return file.getvalue(), packer.end

    def load(self, message: bytes, copy: bool = False) -> Any:
        """The value; its tensors are views of this memory or, with ``copy``, copies; those in the arena stay there."""
        unpacker = _Unpacker(io.BytesIO(message))
        unpacker.segment, unpacker.copy = self, copy
        return unpacker.load()

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> Tensor:
        """The non-empty tensor at an address."""
        return torch.frombuffer(self.memory, dtype=dtype, count=prod(shape), offset=at).view(shape)


def segments(count: int, nbytes: int, arena: Arena | None = None) -> list[Segment]:
    """So many segments; empty ones, past which all tensors are pickled, if the system grants no such address space."""
    try:
        return [Segment(nbytes, arena) for _ in range(count)]
    except OSError:
        return [Segment(0, arena) for _ in range(count)]


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, segment: Segment, start: int) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.segment, self.end = segment, start
        self.stored: dict[int, tuple[Tensor, Address]] = {}  # by identity: what occurs again is not copied again

    def persistent_id(self, obj: Any) -> Address | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) in self.stored:
            return self.stored[id(obj)][1]
        size = obj.numel() * obj.element_size()
        if size and (at := self.segment.arena.address(obj)) is not None:
            return tuple(obj.shape), obj.dtype, at, True
        address = tuple(obj.shape), obj.dtype, self.end, False
        if self.end + size > len(self.segment.memory):
            return None
        if size:
            self.segment.view(*address[:3]).copy_(obj)
        self.end += -(-size // ALIGN) * ALIGN
        self.stored[id(obj)] = obj, address
        return address


class _Unpacker(pickle.Unpickler):
    segment: Segment
    copy: bool

    def persistent_load(self, pid: Address) -> Tensor:
        shape, dtype, at, kept = pid
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        if kept:
            return self.segment.arena.view(shape, dtype, at)
        array = self.segment.view(shape, dtype, at)
        return array.clone() if self.copy else array
