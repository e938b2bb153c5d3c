"""The user's own data as a source: arrays, tables, torch and Hugging Face data sets, one data set per client.

>>> import numpy as np
>>> source = as_source((np.zeros((4, 2)), np.array(["no", "yes", "yes", "no"])), client=["ann", "bob", "ann", "bob"])
>>> source.train.y.tolist(), source.train.names, source.group_names
([0, 1, 1, 0], ('no', 'yes'), ('ann', 'bob'))
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError, nearest, outside
from fedloom.data.own.columns import Columns, read
from fedloom.data.own.labels import coded, with_kind
from fedloom.data.own.tables import as_texts, encoded, is_frame
from fedloom.data.sources.arrays import as_array, from_tensors, inputs
from fedloom.data.sources.base import Source
from fedloom.data.sources.scale import standardised, warn_of_scales

__all__ = ["as_source"]


def as_source(
    data: Any,
    y: Any = None,
    *,
    test: Any = None,
    features: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    client: Any = None,
    classes: int | None = None,
    standardise: bool = False,
    name: str = "own data",
) -> Source:
    """A source of the user's own data.

    Args:
        data: ``(x, y)`` as arrays or tensors; the inputs alone with ``y``; a pandas frame; a torch ``Dataset`` of pairs
            (read once, in order); a Hugging Face ``Dataset`` or ``DatasetDict``; or one of these per client, as a list
            or as a mapping from client names.
        y: the targets, if ``data`` is the inputs alone.
        test: a common test set, likewise, if there is one. One per client, for data with one data set per client, are
            joined, and each remains its client's with ``held_out="natural"``; they may be empty.
        features: for tables, the input columns: a list of numbers and categories, which become one float32 vector
            (categories one-hot), or the name of a column of arrays or images; by default all other columns.
        label: for tables, the target column; a list of columns for several labels or numbers per sample.
        client: natural client of each sample: an array, or the name of a column.
        classes: number of classes; by default those that occur.
        standardise: whether numbers [N, D] are scaled, column by column, by the mean and deviation of all clients'
            training samples (of those that are tested on a share, too); one-hot columns stay 0 and 1. In a federation
            of real clients these two numbers per column would have to be computed jointly, for instance as secure sums.
        name: the name in captions and provenance.

    Returns:
        The source. Integers of any width and byte order, truth values, texts and categories become class numbers
        (texts and categories with names); a matrix of zeros and ones is several truth values per sample; floats are
        numbers. Targets [N, 1] that are classes become [N].

    Raises:
        DataError: if the data cannot be used; the message says what to do.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, Mapping) and "train" in data:
        held = next((data[key] for key in ("test", "validation") if key in data), None)
        data, test = data["train"], held if test is None else test
    parts, owners = _per_client(data)
    if owners is not None and client is not None:
        raise DataError(f"{name} is one data set per client already; leave client= out.")
    if owners is not None and y is not None:
        raise DataError(f"{name} is one data set per client, each with its targets; leave y= out.")
    column = client if isinstance(client, str) else None
    what = [name] if owners is None else [f"{name} of client {owner}" for owner in owners]
    read_parts = [read(part, y, features, label, column, told) for part, told in zip(parts, what, strict=True)]
    count, (held_parts, held_by) = len(read_parts), _tests(test, owners, name)
    held_what = [f"{name}: test"] if held_by is None else [f"{name}: test of client {owner}" for owner in held_by]
    tests = [
        read(part, None, features, label, column if _has(part, column) else None, told)
        for part, told in zip(held_parts, held_what, strict=False)
    ]
    x, columns = _inputs([part.x for part in (*read_parts, *tests)], count, name)
    named = [part.names for part in (*read_parts, *tests)]
    targets, names = coded([part.y for part in (*read_parts, *tests)], named, name)
    targets = with_kind(targets, x)
    for told, a, b in zip((*what, *held_what), x, targets, strict=False):
        if len(a) != len(b):
            raise DataError(f"{told} has {len(a)} inputs but {len(b)} targets.")
        if not len(a):
            raise DataError(f"{told} has no samples; leave it out, or give it some.")
    ids, ids_test = _clients(read_parts, tests, owners, client, [len(one) for one in x], name)
    if held_by:
        ids_test = np.repeat(np.array(held_by), [len(one) for one in x[count:]])
    made = from_tensors(
        _joined(x[:count], f"{name}: inputs"),
        _joined(targets[:count], f"{name}: targets"),
        x_test=_joined(x[count:], f"{name}: test inputs") if tests else None,
        y_test=_joined(targets[count:], f"{name}: test targets") if tests else None,
        classes=classes,
        clients=ids,
        clients_test=ids_test,
        names=names,
        name=name,
        settings={"columns": columns} if columns else {},
    )
    if not made.train.has_numbers and len(made.train) and len(made.train.y.unique()) == 1:
        warnings.warn(f"{name}: all samples have the same class; there is nothing to learn.", stacklevel=outside())
    plain = {str(one) for one in read_parts[0].x.columns} if columns else set()
    numbers = [place for place, column in enumerate(columns) if column in plain]
    if standardise:
        return standardised(made, numbers if columns else None)
    if numbers:
        warn_of_scales(made, columns, numbers)
    return made


def _per_client(data: Any) -> tuple[list[Any], list[str] | None]:
    """The data sets, and the clients' names if there is one for each."""
    if isinstance(data, Mapping):
        if not data:
            raise DataError("the mapping of data sets is empty; give at least one client.")
        if {"x", "y"} <= data.keys():
            return [(data["x"], data["y"])], None
        owners = [str(key) for key in data]
        if len(set(owners)) < len(owners):
            raise DataError(f"two data sets are those of client {Counter(owners).most_common(1)[0][0]!r}; join them.")
        return list(data.values()), owners
    if isinstance(data, list):
        if not data:
            raise DataError("the list of data sets is empty; give at least one client.")
        if isinstance(data[0], np.ndarray | Tensor | int | float | str):
            raise DataError(
                "a list holds one data set per client; give inputs and targets as a pair (x, y), or targets with y=."
            )
        return data, [f"{number:0{len(str(len(data) - 1))}d}" for number in range(len(data))]
    return [data], None


def _tests(test: Any, owners: Sequence[str] | None, name: str) -> tuple[list[Any], list[str] | None]:
    """The test sets that are not empty, and their clients' names if there is one for each."""
    if test is None:
        return [], None
    parts, held_by = _per_client(test)
    if held_by is None:
        return parts, None
    if owners is None:
        raise DataError(f"{name}: test= is one data set per client, but the data are not; give both in the same form.")
    if isinstance(test, list) and len(held_by) != len(owners):
        raise DataError(
            f"{name} is {len(owners)} data sets, but test= is {len(held_by)}; give one for each client, in their order."
        )
    if strange := sorted(set(held_by) - set(owners)):
        raise DataError(
            f"{name}: test= names client {strange[0]!r}, which has no data set; {nearest(strange[0], owners)}"
        )
    pairs = [(part, owner) for part, owner in zip(parts, held_by, strict=True) if not _is_empty(part)]
    return [part for part, _ in pairs], [owner for _, owner in pairs]


def _is_empty(part: Any) -> bool:
    """Whether a data set certainly has no samples."""
    one = part[0] if isinstance(part, tuple) and part else part
    return hasattr(one, "__len__") and not len(one)


def _has(test: Any, column: str | None) -> bool:
    """Whether a test table has the column of clients, which it may lack."""
    return column is not None and column in getattr(test, "column_names", getattr(test, "columns", ()))


def _inputs(parts: Sequence[Any], count: int, name: str) -> tuple[list[Tensor], list[str]]:
    """Inputs of all parts, of which ``count`` are for training, and the names of their columns if they were tables."""
    if any(map(is_frame, parts)):
        if not all(map(is_frame, parts)):
            raise DataError(f"{name}: some data sets are tables and others are not; give all of them alike.")
        tables, columns = encoded(parts, name)
        return [torch.from_numpy(table) for table in tables], columns
    found = [inputs(part, f"{name}: x", warn=False) for part in parts]
    shapes = {tuple(part.shape[1:]) for part in found[:count]}
    if len(shapes) > 1:
        told = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise DataError(f"{name}: samples have different shapes, {told}; resize or pad them to one.")
    (shape,) = shapes
    if strange := [list(part.shape[1:]) for part in found[count:] if part.shape[1:] != shape]:
        raise DataError(f"{name}: test samples have shape {strange[0]}, training samples {list(shape)}.")
    return found, []


def _clients(
    parts: Sequence[Columns], tests: Sequence[Columns], owners: Sequence[str] | None, client: Any,
    sizes: Sequence[int], name: str,
) -> tuple[Any, Any]:  # fmt: skip
    """The natural client of each training and test row; None without any."""
    ids_test = tests[0].client if tests else None
    if owners is not None:
        return np.repeat(np.array(owners), sizes[: len(parts)]), None
    if client is None or isinstance(client, str):
        return parts[0].client, ids_test
    ids = as_array(client, f"{name}: client")
    if ids.dtype.kind == "O":
        if lost := sum(one is None or one != one for one in ids.ravel()):  # NaN differs from itself
            raise DataError(f"{name}: {lost} of {ids.size} samples have no client; drop them, or give each one.")
        ids = as_texts(ids, name)
    if ids.ndim != 1 or len(ids) != sizes[0]:
        raise DataError(
            f"{name} has {sizes[0]} samples, but client ids of shape {list(ids.shape)}; give one per sample."
        )
    return ids, None


def _joined(parts: Sequence[Tensor], what: str) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if len({(part.dtype, tuple(part.shape[1:])) for part in parts}) > 1:
        raise DataError(f"{what} differ in type or shape from client to client; convert them to one.")
    return torch.cat(list(parts))
