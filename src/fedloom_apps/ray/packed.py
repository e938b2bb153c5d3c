"""Messages between processes: a pickle in which tensors and arrays, wherever they are nested, are replaced by numbers.

Their content travels alongside as arrays, which a transport may put into shared memory without copying. It is copied
into freshly allocated memory before use, because the summation order of some kernels depends on alignment.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Packed = tuple[bytes, Sequence[np.ndarray]]
LARGE = 1 << 20  # bytes from which an array may be used in place


def pack(value: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> Packed:
    """The message for a value; its tensors on the CPU are not copied.

    >>> message = pack({"state": [torch.ones(2), "and so on"]})
    >>> len(message[1]), unpack(message)
    (1, {'state': [tensor([1., 1.]), 'and so on']})
    """
    file = io.BytesIO()
    packer = _packer(pickler)(file, protocol=pickle.HIGHEST_PROTOCOL)
    packer.sent = {}
    packer.dump(value)
    return file.getvalue(), [_array(obj) for _, obj in packer.sent.values()]


def unpack(packed: Packed, device: str = "cpu", *, in_place: bool = False) -> Any:
    """The value, with its tensors on a device; ``in_place`` leaves large ones, read only, in the message's memory."""
    message, arrays = packed
    unpickler = pickle.Unpickler(io.BytesIO(message))
    tensors = [_read_only(array) if in_place and array.nbytes >= LARGE else _copied(array) for array in arrays]

    def persistent_load(pid: tuple[int, bool]) -> Tensor | np.ndarray:
        number, is_tensor = pid
        if not is_tensor:
            return arrays[number] if in_place else tensors[number].numpy()
        return tensors[number].to(device)

    unpickler.persistent_load = persistent_load
    return unpickler.load()


def nbytes(packed: Packed) -> int:
    """Size of a message in bytes."""
    return len(packed[0]) + sum(array.nbytes for array in packed[1])


@cache
def _packer(pickler: type[pickle.Pickler]) -> Any:
    """A pickler that collects tensors and arrays, numbered in order of appearance; the same object is sent once."""

    class Packer(pickler):
        sent: dict[int, tuple[int, Tensor | np.ndarray]]

        def persistent_id(self, obj: Any) -> tuple[int, bool] | None:
            is_tensor = type(obj) is Tensor and obj.dtype is not torch.bfloat16  # a parameter's tensor is inside it
            if not is_tensor and not (type(obj) is np.ndarray and obj.dtype.kind in "biuf"):
                return None
            return self.sent.setdefault(id(obj), (len(self.sent), obj))[0], is_tensor

    return Packer


def _array(obj: Tensor | np.ndarray) -> np.ndarray:
    return obj.detach().cpu().contiguous().numpy() if isinstance(obj, Tensor) else np.ascontiguousarray(obj)


def _copied(array: np.ndarray) -> Tensor:
    aligned = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)
    aligned.numpy()[...] = array
    return aligned


def _read_only(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch has no read-only tensors; plans and data are never written to
        return torch.from_numpy(array)
