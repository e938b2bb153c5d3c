"""Shared memory for tensors that several processes read without copying.

Messages through a pipe are pickles in which every tensor, wherever it is nested (a broadcast, a state, a fold), is
replaced by its address in the segment. A tensor that no longer fits is pickled itself. Client states stay in an arena
from round to round: a worker writes a state once, the driver keeps a view of it, and the next worker reads it in place.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import sys
import tempfile
import uuid
import weakref
from collections import ChainMap
from collections.abc import Collection, Mapping
from functools import cache
from math import inf, prod
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

ALIGN = 64
NORESERVE = 0x4000 if sys.platform == "linux" else 0  # address space beyond the memory; Python 3.11 has no name for it


class TransferableMemory(mmap.mmap):
    """Shared memory that can be handed to processes not forked from this one; pages are committed on first use.

    It is a file without a name, whose descriptor a process receives when it is started, so that nothing is left however
    processes end. Windows has memory with a name instead, which ends with the last process that uses it.
    """

    handle: int | str

    @classmethod
    def of(cls, nbytes: int) -> TransferableMemory:
        """New memory of this size."""
        if sys.platform == "win32":
            return cls.at(f"fedloom-{uuid.uuid4()}", nbytes)
        if sys.platform == "linux":
            number = os.memfd_create("fedloom")
        else:
            with tempfile.TemporaryFile() as file:
                number = os.dup(file.fileno())
        try:
            os.ftruncate(number, nbytes)
            return cls.at(number, nbytes)
        except OSError:
            os.close(number)
            raise

    @classmethod
    def at(cls, handle: int | str, nbytes: int) -> TransferableMemory:
        """The memory of a name or a descriptor, which is closed with it."""
        if isinstance(handle, str):
            memory = cls(-1, nbytes, tagname=handle)  # pyright: ignore[reportCallIssue]
        else:
            memory = cls(handle, nbytes, mmap.MAP_SHARED | NORESERVE)
            weakref.finalize(memory, os.close, handle).atexit = False
        memory.handle = handle
        return memory

    def __reduce__(self) -> tuple[Any, ...]:
        handle = self.handle if isinstance(self.handle, str) else reduction.DupFd(self.handle)
        return _open_memory, (handle, len(self))


def _open_memory(handle: Any, nbytes: int) -> TransferableMemory:
    return TransferableMemory.at(handle if isinstance(handle, str) else handle.detach(), nbytes)


def shared(nbytes: int, transferable: bool) -> mmap.mmap:
    """Shared memory, for forked processes alone or, if it is ``transferable``, for others as well."""
    if transferable:
        return TransferableMemory.of(nbytes)
    return mmap.mmap(-1, nbytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NORESERVE)


class Arena:
    """Shared memory for client states, divided into places of equal size; pages are committed on first use.

    The driver reserves a place before the work that fills it; the place is free again when no tensor in it is
    referenced. If no place is free, a state is sent like any other value.

    Args:
        count: number of places.
        nbytes: size of a place in bytes.
        transferable: whether it can be handed to processes that are not forked, which only read what is in it.

    >>> arena = Arena(1, 1000)
    >>> place, owner = arena.take()
    >>> state = arena.put(place, {"drift": {"h": torch.ones(3)}})
    >>> arena.address(state["drift"]["h"]), arena.take()
    (0, None)
    """

    def __init__(self, count: int, nbytes: int, transferable: bool = False) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.memory: mmap.mmap | None = shared(count * self.nbytes, transferable) if count else None
        except OSError:  # the system grants no more address space than it has memory
            self.memory = None
        self._reset(count)

    def _reset(self, count: int) -> None:
        self.free = list(reversed(range(count))) if self.memory else []
        self.owners: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()
        self.base = self.view((1,), torch.uint8, 0).data_ptr() if self.memory else 0

    def __getstate__(self) -> tuple[int, mmap.mmap | None]:
        return self.nbytes, self.memory

    def __setstate__(self, state: tuple[int, mmap.mmap | None]) -> None:
        self.nbytes, self.memory = state
        self._reset(0)

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
        inside = self.memory is not None and value.is_cpu and 0 <= at < len(self.memory)
        return at if inside and value.is_contiguous() else None

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> Tensor:
        """The tensor at an address; it keeps its place reserved."""
        place, offset = divmod(at, self.nbytes)
        owner = self.owners.get(place)
        memory, offset = (self.memory, at) if owner is None else (owner, offset)
        assert memory is not None
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)


Address = tuple[tuple[int, ...], torch.dtype, int, bool]  # shape, dtype, offset in bytes, whether in the arena
Stored = Collection[tuple[Tensor, Address]]
MARK = 8  # bytes of the integer at the start


class Segment:
    """A block of shared memory; pages are committed on first use.

    Args:
        nbytes: its size in bytes.
        arena: the arena in which tensors may be already.
        transferable: whether it can be handed to processes that are not forked.
    """

    def __init__(self, nbytes: int, arena: Arena | None = None, transferable: bool = False) -> None:
        self.memory = shared(ALIGN + nbytes, transferable)
        self.arena = arena or Arena(0, 0)

    @classmethod
    def holding(cls, *values: Any, pickler: type[pickle.Pickler]) -> tuple[Segment, tuple[bytes, ...]]:
        """A segment as large as the tensors of values, which it holds, and the message for ``load`` of each value."""
        end, messages, tensors = ALIGN, [], []
        for value in values:
            message, end, stored = _pickled(value, Arena(0, 0), end, inf, pickler)
            messages.append(message)
            tensors += stored
        segment = cls(end, transferable=True)
        segment._write(tensors)
        return segment, tuple(messages)

    @property
    def mark(self) -> int:
        """An integer outside the stored values that every process may read and write at any time."""
        return int.from_bytes(self.memory[:MARK], "little")

    @mark.setter
    def mark(self, number: int) -> None:
        self.memory[:MARK] = number.to_bytes(MARK, "little")

    def dump(self, value: Any, start: int = ALIGN) -> tuple[bytes, int]:
        """Copy the tensors of ``value`` into the segment; return the message for ``load`` and the end offset."""
        message, end, stored = _pickled(value, self.arena, start, len(self.memory))
        self._write(stored)
        return message, end

    def _write(self, stored: Stored) -> None:
        for tensor, (shape, dtype, at, _) in stored:
            if tensor.numel():
                self.view(shape, dtype, at).copy_(tensor.detach())

    def load(self, message: bytes, copy: bool = False, device: str = "cpu") -> Any:
        """The value; its tensors are views of this memory or, with ``copy``, copies; those in the arena stay there.

        On another device than the CPU they are copies.
        """
        unpacker = _Unpacker(io.BytesIO(message))
        unpacker.segment, unpacker.copy, unpacker.device = self, copy, device
        return unpacker.load()

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> Tensor:
        """The non-empty tensor at an address."""
        return torch.frombuffer(self.memory, dtype=dtype, count=prod(shape), offset=at).view(shape)


def segments(count: int, nbytes: int, arena: Arena | None = None, transferable: bool = False) -> list[Segment]:
    """Segments of this size; if the system grants no such address space, empty ones: all tensors are then pickled."""
    try:
        return [Segment(nbytes, arena, transferable) for _ in range(count)]
    except OSError:
        return [Segment(0, arena, transferable) for _ in range(count)]


def _pickled(
    value: Any, arena: Arena, start: int, room: float, pickler: type[pickle.Pickler] = pickle.Pickler
) -> tuple[bytes, int, Stored]:
    """The pickle of a value, the end of its tensors from ``start`` on, and these with their addresses."""
    file, stored = io.BytesIO(), {}
    packer = _packer(pickler)(file, protocol=pickle.HIGHEST_PROTOCOL)
    packer.arena, packer.end, packer.room, packer.stored = arena, start, room, stored
    packer.dispatch_table = ChainMap({Tensor: _on_host}, getattr(packer, "dispatch_table", copyreg.dispatch_table))
    packer.dump(value)
    return file.getvalue(), packer.end, stored.values()


def _on_host(value: Tensor) -> Any:
    """How a tensor is pickled for which there is no room: other processes do not use this one's device."""
    return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


@cache
def _packer(pickler: type[pickle.Pickler]) -> Any:
    """A pickler that notes an address for each tensor; the tensor of a parameter is inside it."""

    class Packer(pickler):
        arena: Arena
        end: int
        room: float
        stored: dict[int, tuple[Tensor, Address]]  # by identity: what occurs again is not copied again

        def persistent_id(self, obj: Any) -> Address | None:
            if type(obj) is not Tensor:
                return None
            if id(obj) in self.stored:
                return self.stored[id(obj)][1]
            size = obj.numel() * obj.element_size()
            if size and (at := self.arena.address(obj)) is not None:
                return tuple(obj.shape), obj.dtype, at, True
            if self.end + size > self.room:
                return None
            address = tuple(obj.shape), obj.dtype, self.end, False
            self.end += -(-size // ALIGN) * ALIGN
            self.stored[id(obj)] = obj, address
            return address

    return Packer


class _Unpacker(pickle.Unpickler):
    segment: Segment
    copy: bool
    device: str

    def persistent_load(self, pid: Address) -> Tensor:
        shape, dtype, at, in_arena = pid
        if not prod(shape):
            return torch.empty(shape, dtype=dtype, device=self.device)
        array = (self.segment.arena if in_arena else self.segment).view(shape, dtype, at)
        return (array.clone() if self.copy and not in_arena else array).to(self.device)
