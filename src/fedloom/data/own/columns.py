"""One data set as columns (inputs, targets and natural clients), whatever its container."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedloom.core.errors import DataError, in_words, nearest, outside
from fedloom.core.federation import Arrays
from fedloom.data.own.tables import clients_of, is_frame
from fedloom.data.sources.arrays import as_array
from fedloom.data.sources.files import with_progress
from fedloom.data.sources.formats import one_name_each
from fedloom.data.sources.images import in_bytes

READ_TWICE = 8
"""So many items of a torch data set are read again, to notice random ones."""


class Columns(NamedTuple):
    """A data set, not converted yet.

    Attributes:
        x: an array or tensor [N, ...], or a frame of input columns.
        y: targets [N, ...], or a frame of target columns.
        client: the natural client of each sample [N], if the data set has them.
        names: class names, if the data set has them.
    """

    x: Any
    y: Any
    client: np.ndarray | None = None
    names: tuple[str, ...] = ()


def read(
    data: Any, y: Any, features: str | Sequence[str] | None, label: str | Sequence[str] | None, client: str | None,
    what: str,
) -> Columns:  # fmt: skip
    """The columns of a data set; ``what`` names it in errors.

    Raises:
        DataError: for anything that is not a data set, or lacks a column.
    """
    if is_frame(data):
        return _frame(data, y, features, label, client, what)
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        return _hugging_face(data, features, label, client, what)
    if isinstance(data, Arrays):
        return Columns(data.x, data.y, names=data.names)
    if y is not None:
        return Columns(data, y)
    if isinstance(data, TensorDataset):
        if len(data.tensors) < 2:
            raise DataError(f"{what} is a TensorDataset without targets; give TensorDataset(x, y).")
        if len(data.tensors) > 2:
            raise _too_many(what, data.tensors)
        return Columns(data.tensors[0], data.tensors[1])
    if isinstance(data, Dataset):
        return _torch(data, features, label, what)
    if isinstance(data, tuple) and len(data) == 2:
        return Columns(*data)
    if isinstance(data, np.ndarray | Tensor):
        raise DataError(f"{what} has no targets; give a pair (x, y), or the targets with y=.")
    raise DataError(
        f"{what} is {in_words(data)}; give a pair of arrays (x, y), a pandas frame, a torch Dataset, a Hugging "
        "Face Dataset, or a list with one of these for each client."
    )


def present(wanted: Sequence[str], columns: Sequence[str], what: str) -> None:
    """Raise a ``DataError`` for a column that does not exist."""
    for column in wanted:
        if column == "label" not in columns:  # the default
            told = ", ".join(map(str, columns))
            raise DataError(
                f"{what} has no column 'label'; say which is the target, with label= (data.label= on the command "
                f"line): {told}."
            )
        if column not in columns:
            raise DataError(f"{what} has no column {column!r}; {nearest(str(column), map(str, columns))}")


def _frame(
    frame: Any, y: Any, features: str | Sequence[str] | None, label: str | Sequence[str] | None, client: str | None,
    what: str,
) -> Columns:  # fmt: skip
    columns = list(frame.columns)
    one_name_each(columns, what)
    if label is None and y is None:
        raise DataError(
            f"{what} is a table; say which column is the target, with label=: {', '.join(map(str, columns))}."
        )
    targets = [] if label is None else [label] if isinstance(label, str) else list(label)
    wanted = [features] if isinstance(features, str) else features
    present([*targets, *(wanted or ()), *([client] if client else [])], columns, what)
    if wanted is None:
        wanted = [column for column in columns if column not in targets and column != client]
    ids = None if client is None else clients_of(frame[client], what)
    if y is None:
        y = frame[targets[0]] if len(targets) == 1 else frame[targets]
    if isinstance(features, str) and frame[features].dtype == object and not isinstance(frame[features].iloc[0], str):
        return Columns(stacked(list(frame[features]), f"{what}: {features}"), y, ids)
    return Columns(frame[list(wanted)], y, ids)


def _hugging_face(
    dataset: Any, features: str | Sequence[str] | None, label: str | Sequence[str] | None, client: str | None, what: str
) -> Columns:
    """A ``datasets.Dataset``; images and arrays are decoded, several columns become a table."""
    columns = list(dataset.column_names)
    if label is None:
        guesses = [column for column in ("label", "labels", "target", "y") if column in columns]
        if not guesses:
            raise DataError(
                f"{what} has no column 'label'; say which is the target, with label=: {', '.join(columns)}."
            )
        label = guesses[0]
    targets = [label] if isinstance(label, str) else list(label)
    named = [features] if isinstance(features, str) else list(features or ())
    present([*targets, *named, *([client] if client else [])], columns, what)
    others = named or [column for column in columns if column not in targets and column != client]
    names = tuple(getattr(dataset.features[targets[0]], "names", None) or ())
    ids = None
    if client is not None:
        table = dataset.select_columns([client]).with_format(None).to_pandas()
        ids = clients_of(table[client], what)
    table = dataset.select_columns(targets).with_format(None).to_pandas()
    y: Any = table[targets[0]] if len(targets) == 1 else table
    if len(targets) == 1 and y.dtype == object and len(y) and not isinstance(y.iloc[0], str):
        y = stacked(list(y), f"{what}: {targets[0]}")
    one = others[0] if len(others) == 1 else None
    if one is None and not named:  # an image or array beside other columns
        one = next((c for c in others if type(dataset.features[c]).__name__ in ("Image", "Array3D")), None)
    if one is None or type(dataset.features[one]).__name__ == "Value":
        return Columns(dataset.select_columns(others).with_format(None).to_pandas(), y, ids, names)
    rows = dataset.select_columns([one]).with_format(None)
    return Columns(stacked([row[one] for row in with_progress(rows, what)], f"{what}: {one}"), y, ids, names)


def _torch(
    dataset: Dataset[Any], features: str | Sequence[str] | None, label: str | Sequence[str] | None, what: str
) -> Columns:
    """A torch data set, read once: every item is a pair (input, target), or a mapping with the named entries.

    A few items are read again, to warn of random ones.
    """
    if isinstance(dataset, IterableDataset):
        items: list[Any] = list(dataset)
    else:
        items = [dataset[row] for row in with_progress(range(len(dataset)), what)]  # pyright: ignore[reportArgumentType]
    if not items:
        raise DataError(f"{what} is empty.")
    first = items[0]
    if isinstance(first, Mapping):
        if not (isinstance(features, str) and isinstance(label, str)):
            raise DataError(
                f"the items of {what} are mappings; name their input and target with features= and label=: "
                f"{', '.join(map(str, first))}."
            )
        present([features, label], list(first), f"an item of {what}")
        pairs = [(item[features], item[label]) for item in items]
    elif isinstance(first, tuple | list) and len(first) > 2:
        raise _too_many(what, first)
    elif isinstance(first, tuple | list) and len(first) == 2:
        pairs = [(item[0], item[1]) for item in items]
    else:
        raise DataError(f"an item of {what} is {in_words(first)}, but it must be a pair (input, target).")
    names = tuple(map(str, getattr(dataset, "classes", ())))
    x, y = (stacked([pair[side] for pair in pairs], what) for side in (0, 1))
    if not isinstance(dataset, IterableDataset):
        of = features if isinstance(first, Mapping) else 0
        again = stacked([dataset[row][of] for row in range(min(len(x), READ_TWICE))], what)
        if not np.array_equal(again, x[: len(again)], equal_nan=again.dtype.kind == "f"):
            warnings.warn(
                f"items of {what} differ when they are read again, as by a random transform, but each is read once for "
                "the whole run; leave the transform out of the data set, and give augment=, like augment=['flip'].",
                stacklevel=outside(),
            )
    return Columns(x, y, names=names if np.asarray(y).dtype.kind in "iub" else ())


def _too_many(what: str, fields: Sequence[Any]) -> DataError:
    """The error of items of which the second field need not be the target."""
    told = "; ".join(f"{number}: {in_words(field)}" for number, field in enumerate(fields))
    return DataError(f"the items of {what} have {len(fields)} fields ({told}), not two; give pairs (input, target).")


def stacked(items: Sequence[Any], what: str) -> np.ndarray:
    """Samples as one array [N, ...]; images of PIL as uint8, in colour if any of them is.

    Raises:
        DataError: if their shapes differ.
    """
    if any(hasattr(item, "getbands") for item in items):
        items = pixels(items)
    arrays = [item.detach().cpu().numpy() if isinstance(item, Tensor) else as_array(item, what) for item in items]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        other = next(i for i, array in enumerate(arrays) if array.shape != arrays[0].shape)
        raise DataError(
            f"{what}: sample 0 has shape {list(arrays[0].shape)}, but sample {other} {list(arrays[other].shape)}; "
            "resize or pad them to one."
        )
    return np.stack(arrays) if arrays else np.zeros(0)


def pixels(items: Sequence[Any]) -> list[Any]:
    """PIL images with 8 bits per channel: all grey, all in colour, or all in colour with transparency."""
    modes = {item.mode for item in items if hasattr(item, "getbands")}
    grey = modes <= {"1", "L", "LA", "La"} or all(mode.startswith("I") for mode in modes)
    mode = "RGBA" if modes == {"RGBA"} else "L" if grey else "RGB"
    return [in_bytes(item).convert(mode) if hasattr(item, "getbands") else item for item in items]
