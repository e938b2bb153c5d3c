"""Targets of any type as class numbers, truth values or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.data.own.tables import categories, is_frame
from fedloom.data.sources.arrays import as_array, numbers, targets


def coded(parts: Sequence[Any], names: Sequence[Sequence[str]], what: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Targets of several parts of the data, each with its class names or (), and the names of all classes.

    Texts and categories are numbered in the same way in all parts: in the order of their categories, or sorted. If
    parts have different class names, their class numbers are renumbered in the union of all names.

    >>> [y.tolist() for y in coded([["no", "yes"], ["yes"]], [(), ()], "mine")[0]], coded([["b", "a"]], [()], "mine")[1]
    ([[0, 1], [1]], ('a', 'b'))
    >>> [y.tolist() for y in coded([np.array([0, 1])] * 2, [("cat", "dog"), ("dog", "fish")], "mine")[0]]
    [[0, 1], [1, 2]]

    Raises:
        DataError: if targets are missing, negative, or neither numbers nor names, or if parts have different class
            names and some parts have none.
    """
    raw = [_raw(part, what) for part in parts]
    if any(part.dtype.kind in "US" for part in raw):
        texts = [part.astype(str) for part in raw]
        if any(part.ndim > 1 and part.shape[1:] != (1,) for part in texts):
            raise DataError(f"{what}: targets are texts of shape {list(texts[0].shape)}; give one name per sample.")
        known = categories(parts) or sorted({str(one) for part in texts for one in np.unique(part)})
        place = {name: number for number, name in enumerate(known)}
        return [torch.tensor([place[one] for one in part.ravel()], dtype=torch.int64) for part in texts], tuple(known)
    found = [targets(part, f"{what}: y") for part in raw]
    kinds = {part.is_floating_point() for part in found}
    if len(kinds) > 1:
        raise DataError(f"{what}: some targets are whole numbers and others floats; convert them to one type.")
    if not kinds.pop():
        found = [part[:, 0] if part.ndim == 2 and part.shape[1] == 1 else part for part in found]
        least = min((int(part.min()) for part in found if part.numel()), default=0)
        if least < 0:
            raise DataError(
                f"{what}: there is a label {least}, but classes are numbered from 0; for labels -1 and 1 give y > 0."
            )
    return _renumbered(found, [tuple(one) for one in names], what)


def _renumbered(
    found: list[Tensor], names: Sequence[tuple[str, ...]], what: str
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Class numbers of all parts, renumbered in the union of their class names, and that union."""
    given = list(dict.fromkeys(part for part in names if part))
    if len(given) < 2:
        return found, given[0] if given else ()
    known = list(dict.fromkeys(one for part in given for one in part))
    if not all(names) or any(part.is_floating_point() or part.ndim > 1 for part in found):
        raise DataError(f"{what}: data sets have different class names, and some have none; give the targets as names.")
    for part, own in zip(found, names, strict=True):
        if part.numel() and int(part.max()) >= len(own):
            raise DataError(f"{what}: there is a label {int(part.max())}, but only {len(own)} class names.")
    place = [torch.tensor([known.index(one) for one in own]) for own in names]
    return [table[part] for table, part in zip(place, found, strict=True)], tuple(known)


def with_kind(found: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """Convert matrices of zeros and ones to truth values, float32 [N, L]; targets of sequences stay class numbers.

    >>> y = torch.tensor([[0, 1], [1, 1]])
    >>> with_kind([y], [torch.zeros(2, 5)])[0].dtype, with_kind([y], [torch.zeros(2, 2).long()])[0].dtype
    (torch.float32, torch.int64)
    """
    first, one = found[0], x[0]
    sequences = not one.is_floating_point() and one.shape[1:] == first.shape[1:]
    whole = not first.is_floating_point() and first.ndim == 2 and not sequences
    if whole and all(int(part.max()) <= 1 for part in found if part.numel()):
        return [part.float() for part in found]
    return list(found)


def _raw(part: Any, what: str) -> np.ndarray:
    """Targets as an array of numbers or texts."""
    if isinstance(part, Tensor):
        held = numbers(part.detach().cpu(), f"{what}: y")
        return (held.float() if held.dtype == torch.bfloat16 else held).numpy()
    if is_frame(part):
        part = part.to_numpy()
    elif hasattr(part, "isna"):  # a pandas series
        if lost := int(part.isna().sum()):
            raise DataError(
                f"{what}: column {part.name!r} lacks targets in {lost} of {len(part)} rows; drop those rows."
            )
        category = hasattr(part.dtype, "categories")
        part = np.array([str(one) for one in part]) if category else part.to_numpy()
    array = as_array(part, f"{what}: y")
    if array.dtype.kind != "O":
        return array
    kinds = {type(one) for one in array.ravel()}
    if kinds <= {str}:
        return array.astype(str)
    if kinds <= {bool, int, np.bool_, np.int64} or kinds <= {float, int}:
        try:
            return array.astype(np.float64 if float in kinds else np.int64)
        except OverflowError as error:
            raise DataError(f"{what}: some labels are beyond the numbers of classes that fit.") from error
    told = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise DataError(f"{what}: targets are {told}; give class numbers, names or numbers, and none missing.")
