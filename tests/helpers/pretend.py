"""A simulated device without memory: its tensors have a shape, a type and a device, but no numbers.

``FakeTensorMode`` follows them through every operation and refuses those that mix devices, as a GPU would, with no GPU
there. Tensors on the host stay real. Where the host asks for numbers of the device, which makes it wait for the device
to finish, it gets ones, and the place in the code is counted.

The device is registered with PyTorch for the rest of the process: use it in a process of its own.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

KIND = "pretend"
DEVICE = f"{KIND}:0"
ASKS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__"}


class _Factories(TorchDispatchMode):
    """Makes new tensors on the device, those too that operations make for themselves."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_there(kwargs.get("device")):
            return func(*args, **kwargs)
        with self.fake:
            return func(*args, **kwargs)


class PretendDevice(TorchFunctionMode):
    """Inside the block, ``pretend:0`` is a device.

    Attributes:
        waits: how often the host waited for the device, by the lines of the package's code, innermost last.
    """

    def __init__(self) -> None:
        if not hasattr(torch, KIND):
            _setup_privateuseone_for_python_backend(KIND)
        FakeTensor.tolist = Tensor.tolist  # its own asks for one number after the other
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.factories = _Factories(self.fake)
        self.waits: Counter[tuple[str, ...]] = Counter()

    def __enter__(self) -> PretendDevice:
        self.factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.factories.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if func in (torch.tensor, torch.as_tensor) and is_there(kwargs.get("device")):
            return self._send(func(*args, **kwargs | {"device": "cpu"}))
        if name == "_fused_sgd_":  # has no form for devices that PyTorch does not know
            return [group[0].add_(sum(group[1:])) for group in zip(*filter(None, args), strict=True)]
        if not isinstance(first, Tensor):
            return func(*args, **kwargs)
        if name in ("to", "cpu"):
            return self._move(func, first, args, kwargs)
        if name == "new_tensor" and is_there(first.device):
            return self._send(torch.tensor(args[1], dtype=kwargs.get("dtype", first.dtype)))
        if name == "copy_" and is_there(args[1].device) and not is_there(first.device):
            return first.copy_(self._fetch(args[1]))
        if not is_there(first.device):
            return func(*args, **kwargs)
        if name == "nonzero":  # of nothing: the checks for which it is asked find no fault
            return self._send(self._fetch(first).new_zeros(0, first.ndim, dtype=torch.int64))
        if name == "unique":
            return tuple(map(self._send, func(self._fetch(first), *args[1:], **kwargs)))
        if name in ASKS:
            return func(self._fetch(first), *args[1:], **kwargs)
        if name == "__getitem__" and (mask := _mask(args[1])) is not None:
            return first[_with_mask_places(args[1], self._fetch(mask))]
        return func(*args, **kwargs)

    def _move(self, func: Callable[..., Any], tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tensor on the other side, if it is to go there."""
        arguments = [arg for arg in (*args[1:], *kwargs.values()) if not isinstance(arg, bool)]
        places = ["cpu"] if func is Tensor.cpu else [_place(arg) for arg in arguments if _place(arg) is not None]
        there = is_there(places[0]) if places else is_there(tensor.device)
        if there == is_there(tensor.device):
            return func(tensor, *args[1:], **kwargs)
        dtype = next((arg.dtype if isinstance(arg, Tensor) else arg for arg in arguments if _place(arg) is None
                      or isinstance(arg, Tensor)), tensor.dtype)  # fmt: skip
        dtype = dtype if isinstance(dtype, torch.dtype) else tensor.dtype
        return (self._send if there else self._fetch)(tensor, dtype)

    def _send(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with self.fake:
            shape, order = tuple(tensor.shape), tensor.stride()
            sent = torch.empty_strided(shape, order, dtype=dtype or tensor.dtype, device=DEVICE)
        sent.numbers = tensor
        return sent

    def _fetch(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        frames = [f for f in traceback.extract_stack() if "/src/fedloom" in f.filename]
        self.waits[tuple(f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno}" for f in frames)] += 1
        numbers = getattr(tensor, "numbers", None)  # known as long as nothing is done with them
        return torch.ones(tensor.shape, dtype=dtype or tensor.dtype) if numbers is None else numbers.clone()


def is_there(place: Any) -> bool:
    """Whether a device, or its name, is the pretended one."""
    return place is not None and str(place).startswith(KIND)


def _place(argument: Any) -> Any:
    """The device that an argument of ``Tensor.to`` names; None if it names none."""
    if isinstance(argument, Tensor):
        return argument.device
    return argument if isinstance(argument, str | torch.device) else None


def _mask(index: Any) -> Tensor | None:
    """A boolean mask on the device among the indices."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.dtype == torch.bool and is_there(part.device):
            return part
    return None


def _with_mask_places(index: Any, mask: Tensor) -> Any:
    """The indices with the places of a mask for the mask."""
    places = mask.nonzero(as_tuple=True)
    if not isinstance(index, tuple):
        return places
    return tuple(part for item in index for part in (places if _mask(item) is not None else (item,)))
