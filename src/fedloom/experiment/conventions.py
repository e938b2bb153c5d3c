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
"""Columns are scaled differently if the ratio of their deviations exceeds this, or if their means differ by more than
the larger deviation divided by it."""


def table_of(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """How data were made, if from a table, by the provenance of a federation or data set.

    The entries are the names of ``columns``, how these were ``standardised``, how ``texts`` became tokens, and the
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


def compare(model_facts: Mapping[str, Any], data_facts: Mapping[str, Any], model: str) -> None:
    """Refuse data whose inputs or classes mean something else than those from which a model learnt.

    Data in another scale are warned about, since made-up data may be in the model's own scale without saying so.
    """
    for key, noun in (("classes", "classes"), ("columns", "columns"), ("texts", "tokens")):
        if key in model_facts and key in data_facts and model_facts[key] != data_facts[key]:
            first, second = _where_they_differ(model_facts[key], data_facts[key])
            raise ConfigError(f"{model} knows the {noun} {first}, but the {noun} of these data are {second}.")
    if model_facts and _scaled_apart(model_facts, data_facts):
        warnings.warn(
            f"{model} learnt from inputs in another scale than these data have: they were normalised or standardised "
            "differently, so that it may be far off.",
            stacklevel=user_stacklevel(),
        )


def _where_they_differ(left: Any, right: Any) -> tuple[str, str]:
    """Two descriptions from where they differ, if they are lists."""
    if isinstance(left, Mapping):
        return tuple(", ".join(f"{key}={value}" for key, value in side.items()) for side in (left, right))  # pyright: ignore[reportReturnType]
    first = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return tuple(_some(side, max(0, first - 1)) for side in (left, right))  # pyright: ignore[reportReturnType]


def _some(names: Sequence[str], first: int) -> str:
    excerpt = ", ".join(names[first : first + 4]) or "nothing"
    return f"{'… ' if first else ''}{excerpt}{' …' if len(names) > first + 4 else ''}"


def _scaled_apart(model_facts: Mapping[str, Any], data_facts: Mapping[str, Any]) -> bool:
    if any(model_facts.get(key) != data_facts.get(key) for key in ("mean", "std")):
        return True
    first, second = (facts.get("standardised") for facts in (model_facts, data_facts))
    if first is None or second is None:
        return first is not second
    if list(first["columns"]) != list(second["columns"]):
        return True
    means, deviations = (np.array([scaling[key] for scaling in (first, second)]) for key in ("mean", "deviation"))
    far = np.abs(means[0] - means[1]) > deviations.max(0) / APART
    return bool((far | (deviations.max(0) > APART * deviations.min(0))).any())


_token_ranges: WeakKeyDictionary[nn.Module, tuple[int, int]] = (
    WeakKeyDictionary()
)  # least and greatest token that modules on GPUs know


def extreme_rows(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The samples with the least and the greatest token of each set of inputs [M, ...], on the host.

    >>> extreme_rows([torch.tensor([[3, 1], [2, 2], [0, 9]]), torch.zeros(2, 1)])
    [tensor([0, 9]), tensor([0, 9])]
    """
    tokens = [x for x in inputs if x.numel() and not x.is_floating_point()]
    flat = [x.reshape(len(x), -1) for x in tokens]  # a sample may be one number
    at = [(matrix.amin(1).argmin(), matrix.amax(1).argmax()) for matrix in flat]
    return [x[row].cpu() for x, ends in zip(tokens, at, strict=True) for row in ends]


@contextmanager
def refusing_unknown_tokens(module: nn.Module, on_host: bool, *inputs: Tensor) -> Iterator[None]:
    """Raise a ``DataError`` if the block shows that a module does not know some of these inputs [M, ...], tokens.

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
    """Raise an ``IndexError`` if a module cannot look up some of these tokens; a range that worked is not tried again.

    Other errors are left to the device, where the module may well work.
    """
    rows = extreme_rows(inputs)
    if not rows:
        return
    low, high = _range(rows)
    bounds = _token_ranges.get(module, (low, high))
    if module in _token_ranges and bounds[0] <= low and high <= bounds[1]:
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
    _token_ranges[module] = min(low, bounds[0]), max(high, bounds[1])


def _range(inputs: Sequence[Tensor]) -> tuple[int, int]:
    """The least and the greatest of these numbers."""
    return min(int(x.min()) for x in inputs), max(int(x.max()) for x in inputs)
