"""What inputs and outputs of a model stand for: columns, scales and classes of its data, and the tokens it knows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError, DataError, user_stacklevel
from fedloom.core.federation import Arrays

APART = 2.0
"""A ratio of two deviations above which columns are scaled differently; so are they if their means differ by more than
the larger deviation over it."""


def table_of(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """How data were made, if from a table, by the provenance of a federation or data set.

    These are the names of their ``columns``, how those were ``standardised``, or how ``texts`` became tokens, and the
    column of the ``label``.
    """
    source = provenance.get("source", {})
    return {key: source[key] for key in ("columns", "standardised", "label", "texts") if key in source}


def conventions(arrays: Arrays, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What the shapes of a model's inputs and outputs do not say, as plain data, as far as the data have it.

    >>> import torch
    >>> arrays = Arrays(torch.zeros(1, 2), torch.tensor([0]), classes=2, names=("no", "yes"))
    >>> conventions(arrays, {"source": {"columns": ["age", "size"], "label": "ill"}})
    {'columns': ['age', 'size'], 'classes': ['no', 'yes']}
    """
    facts = {key: value for key, value in table_of(provenance).items() if key != "label"}
    facts |= {"classes": list(arrays.names), "mean": list(arrays.mean), "std": list(arrays.std)}
    return {key: value for key, value in facts.items() if value}


def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], model: str) -> None:
    """Refuse data whose inputs or classes mean something else than those from which a model learnt.

    Data in another scale are warned about, since made-up data may be in the model's own scale without saying so.
    """
    for key, noun in (("classes", "classes"), ("columns", "columns"), ("texts", "tokens")):
        if key in theirs and key in ours and theirs[key] != ours[key]:
            first, other = _where_they_differ(theirs[key], ours[key])
            raise ConfigError(f"{model} knows the {noun} {first}, but the {noun} of these data are {other}.")
    if theirs and _scaled_apart(theirs, ours):
        warnings.warn(
            f"{model} learnt from inputs in another scale than these data have: they were normalised or standardised "
            "differently, so that it may be far off.",
            stacklevel=user_stacklevel(),
        )


def _where_they_differ(one: Any, other: Any) -> tuple[str, str]:
    """Two descriptions from where they differ, if they are lists."""
    if isinstance(one, Mapping):
        return tuple(", ".join(f"{key}={value}" for key, value in each.items()) for each in (one, other))  # pyright: ignore[reportReturnType]
    first = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return tuple(_some(each, max(0, first - 1)) for each in (one, other))  # pyright: ignore[reportReturnType]


def _some(names: Sequence[str], first: int) -> str:
    shown = ", ".join(names[first : first + 4]) or "nothing"
    return f"{'… ' if first else ''}{shown}{' …' if len(names) > first + 4 else ''}"


def _scaled_apart(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    if any(theirs.get(key) != ours.get(key) for key in ("mean", "std")):
        return True
    first, other = (each.get("standardised") for each in (theirs, ours))
    if first is None or other is None:
        return first is not other
    if list(first["columns"]) != list(other["columns"]):
        return True
    means, deviations = (np.array([each[key] for each in (first, other)]) for key in ("mean", "deviation"))
    far = np.abs(means[0] - means[1]) > deviations.max(0) / APART
    return bool((far | (deviations.max(0) > APART * deviations.min(0))).any())


_tried: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()  # tokens that modules on GPUs know


def extreme_rows(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The samples with the least and the greatest token of each set of inputs [M, ...], on the host.

    >>> extreme_rows([torch.tensor([[3, 1], [2, 2], [0, 9]]), torch.zeros(2, 1)])
    [tensor([0, 9]), tensor([0, 9])]
    """
    tokens = [x for x in inputs if x.numel() and not x.is_floating_point()]
    flat = [x.reshape(len(x), -1) for x in tokens]  # a sample may be one number
    at = [(each.amin(1).argmin(), each.amax(1).argmax()) for each in flat]
    return [x[row].cpu() for x, ends in zip(tokens, at, strict=True) for row in ends]


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
