"""Inputs that are whole numbers, such as tokens: whether a model knows all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedloom.core.errors import DataError

_tried: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()  # tokens that modules on GPUs know


def extreme_rows(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The samples with the least and the greatest token of each set of inputs [M, ...], on the host.

    >>> extreme_rows([torch.tensor([[3, 1], [2, 2], [0, 9]]), torch.zeros(2, 1)])
    [tensor([0, 9]), tensor([0, 9])]
    """
    found = [x for x in inputs if x.numel() and not x.is_floating_point()]
    flat = [x.reshape(len(x), -1) for x in found]  # a sample may be one number
    at = [(each.amin(1).argmin(), each.amax(1).argmax()) for each in flat]
    return [x[row].cpu() for x, ends in zip(found, at, strict=True) for row in ends]


@contextmanager
def known_tokens(module: nn.Module, on_host: bool, *inputs: Tensor) -> Iterator[None]:
    """Raise a ``DataError`` if a module turns out not to know some of these inputs [M, ...], which are tokens.

    On the host an unknown token is an ``IndexError`` of the block. On a GPU it would make the GPU useless for the rest
    of the process, so that the least and the greatest token are first shown to a copy of the module on the host.

    Args:
        module: the module that the block applies to the inputs, with any parameters.
        on_host: whether it does so on the host.
        inputs: the inputs; real numbers are not looked at.
    """
    try:
        if not on_host:
            _try_on_host(module, inputs)
        yield
    except IndexError as error:
        if any(x.is_floating_point() for x in inputs):
            raise
        least, greatest = _range(inputs)
        raise DataError(
            f"the inputs have tokens from {least} to {greatest}, not all of which this model knows ({error})."
        ) from error


def _try_on_host(module: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raise an ``IndexError`` if a module cannot look up some of these tokens; those tried before are not tried again.

    Other errors are left to the device, where the module may well work.
    """
    rows = extreme_rows(inputs)
    if not rows:
        return
    low, high = _range(rows)
    known = _tried.get(module, (low, high))
    if module in _tried and known[0] <= low and high <= known[1]:
        return
    try:
        with torch.no_grad():
            host = copy.deepcopy(module).to("cpu").eval()
            for row in rows:
                host(row[None])
    except IndexError:
        raise
    except Exception:
        return
    _tried[module] = min(low, known[0]), max(high, known[1])


def _range(inputs: Sequence[Tensor]) -> tuple[int, int]:
    """The least and the greatest of these numbers."""
    return min(int(x.min()) for x in inputs), max(int(x.max()) for x in inputs)
