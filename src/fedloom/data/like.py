"""New samples in the form of known ones: with their columns, categories, scale, tokens, pixels and class names.

``fedloom.data.user`` is the form of new data; here are predictions, further clients, and nodes of a deployment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import DataError, in_one_line, nearest
from fedloom.core.federation import Arrays
from fedloom.data.augment import Scale
from fedloom.data.columns import complete, is_frame
from fedloom.data.sources import reader_of
from fedloom.data.sources.arrays import inputs, numbers, refuse_whole_images, rescaled, to_images
from fedloom.data.sources.files import one_name_each, read_npy, read_npz
from fedloom.data.sources.table import read_frame
from fedloom.data.texts import padded, texts_of, tokens

PIXELS = 100  # samples of a run's images that say whether their pixels go beyond 1


def read_like(path: Path, table: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """The content of a file: ``x`` and, if it has them, ``y`` of an npz file; the array of an npy file, or a table.

    Raises:
        DataError: if it cannot be read or has no ``x``.
    """
    if reader_of(path.name) == "table":
        return {"x": read_frame(path, texts_in(table, names))}
    return {"x": read_npy(path)} if path.suffix.lower() == ".npy" else read_npz(path, ["x"], ["y"])


def texts_in(table: Mapping[str, Any], names: Sequence[str] = ()) -> set[str]:
    """Columns of a table that hold texts, categories or names of classes, though they may look like numbers."""
    label, texts = table.get("label"), table.get("texts", {})
    columns = with_categories(table.get("columns", ())) | {texts[key] for key in ("column",) if key in texts}
    return columns | {label} if names and isinstance(label, str) else columns


def in_units(content: Mapping[str, Any], arrays: Arrays, table: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file; of a table with its targets ``y``, if it has the column of the known data's labels.

    Columns of an array are in the units of the known data's own file, and are scaled as those were, unless that was a
    table.
    """
    x, label = content["x"], table.get("label")
    if not is_frame(x):
        scale = table.get("standardised")
        if "columns" in table or not isinstance(scale, Mapping) or x.shape[1:] != arrays.x.shape[1:]:
            return {**content}
        return {**content, "x": rescaled(inputs(x).numpy(), scale)}
    if not {"columns", "texts"} & table.keys():
        raise DataError("the run's data were not a table; give inputs x in an .npz file, or an .npy file of them.")
    labels = label if isinstance(label, list) else [label]
    return {"x": x, "y": targets_of(x, labels, arrays.names)} if set(labels) <= set(x.columns) else {"x": x}


def targets_of(frame: Any, labels: Sequence[Any], names: Sequence[str]) -> Any:
    """The columns of labels; a single one as texts, if classes have names."""
    if len(labels) > 1:
        return frame[[*labels]]
    column = frame[labels[0]]
    if not names:
        return column
    complete([column], f"column {labels[0]!r}")
    return column.astype(str)


def inputs_like(arrays: Arrays, table: Mapping[str, Any], x: Any) -> Tensor:
    """Inputs [N, ...] in the shape, type and scale of a run's data; 8-bit pixels are rescaled as its images were.

    Columns of a table, and texts, are read as the run's own were, which ``table`` says (``table_of``).
    """
    if "columns" in table and is_frame(x):
        x = in_columns(x, table["columns"], table.get("standardised"))
        x = x.reshape(len(x), *arrays.x.shape[1:])  # of data.shape
    if "texts" in table:
        x = in_tokens(x, **table["texts"])
    dtype, shape = arrays.x.dtype, tuple(arrays.x.shape[1:])
    x = numbers(x, "x")
    if not len(x):
        raise DataError("there are no inputs.")
    pixels = x.dtype == torch.uint8 and dtype.is_floating_point and len(shape) == 3
    if pixels:
        last = x.ndim == 3 or (x.shape[1:] != shape and x.shape[-1] in (1, 3, 4))  # the channels, if there are any
        x = to_images(x.cpu().numpy()).to(x.device, dtype) if last else x.to(dtype) / 255
        if not arrays.mean and float(arrays.x[:PIXELS].max()) > 1:  # the run's own are not from 0 to 1
            x = x * 255
    if tuple(x.shape[1:]) != shape:
        hint = " (one sample needs a first axis of length 1)" if tuple(x.shape) == shape else ""
        raise DataError(
            f"the inputs have shape {list(x.shape)}, but this model takes [N, {', '.join(map(str, shape))}]{hint}."
        )
    if not dtype.is_floating_point and x.is_floating_point():
        raise DataError("the inputs are real numbers, but this model takes whole numbers, such as tokens.")
    if dtype.is_floating_point and not pixels:
        refuse_whole_images(x, "x")
    if pixels:
        return Scale.of(x, arrays.mean, arrays.std).stored(x)
    x = x.to(dtype)
    if x.is_floating_point() and not bool(torch.isfinite(x.sum())):
        raise DataError("some inputs are NaN or infinite.")
    return x


def labelled_like(arrays: Arrays, x: Tensor, y: Any) -> Arrays:
    """Inputs [N, ...] as ``inputs_like`` returns them, with targets [N, ...], as arrays like a run's."""
    like, y = arrays.y, numbers(numbered(y, arrays.names), "y")
    if y.ndim == like.ndim + 1 and y.shape[-1] == 1:
        y = y.squeeze(-1)
    if tuple(y.shape) != (len(x), *like.shape[1:]):
        raise DataError(f"the targets have shape {list(y.shape)}, not {[len(x), *like.shape[1:]]}.")
    if not like.is_floating_point() and y.is_floating_point() and not torch.equal(y, y.round()):
        raise DataError("the targets are real numbers, but this run's are class numbers.")
    return replace(arrays, x=x, y=y.to(like.dtype))


def numbered(y: Any, names: Sequence[str]) -> Any:
    """Convert class names, or class numbers as texts that name no class, to class numbers; other targets are unchanged.

    >>> numbered(["yes", "no"], ("no", "yes")).tolist(), numbered([1, 0], ("no", "yes"))
    ([1, 0], [1, 0])
    >>> import pandas as pd
    >>> numbered(pd.Categorical([2, 1], categories=[2, 1]), ("2", "1")).tolist()
    [0, 1]
    >>> numbered(["1", "0"], ("no", "yes")).tolist()
    [1, 0]
    >>> numbered(["yes"], ())
    Traceback (most recent call last):
    ...
    fedloom.base.errors.DataError: the targets are names like 'yes', but the classes of this run are numbers.
    """
    if names and hasattr(getattr(y, "dtype", None), "categories"):
        y = [str(label) for label in y]
    texts = None if isinstance(y, Tensor) else np.asarray(y)
    if texts is None or texts.dtype.kind not in "USO":
        return y
    if not names:
        first = next(iter(texts.ravel().tolist()), "")
        raise DataError(f"the targets are names like {first!r}, but the classes of this run are numbers.")
    place = {name: number for number, name in enumerate(names)}
    texts = texts.astype(str)
    words = set(texts.ravel().tolist())
    if not words & place.keys() and all(word.isdecimal() and int(word) < len(names) for word in words):
        return texts.astype(np.int64)
    if lost := [label for label in np.unique(texts).tolist() if label not in place]:
        raise DataError(f"there is no class {lost[0]!r}; {nearest(lost[0], names)}")
    return np.array([place[label] for label in texts.ravel().tolist()], dtype=np.int64).reshape(texts.shape)


def in_columns(frame: Any, columns: Sequence[str], scaled: Mapping[str, Any] | None = None) -> np.ndarray:
    """A frame as float32 [N, D] in the D columns that other frames were ``encoded`` in, found by their names.

    A frame with columns 0 ... D - 1, like that of an array, is used unchanged, unless these are the names.

    Args:
        frame: rows in the units of those frames; further columns are ignored.
        columns: the names of the D columns.
        scaled: the numbers ``columns``, ``mean`` and ``deviation`` by which some of them were standardised.

    >>> import pandas as pd
    >>> in_columns(pd.DataFrame({"town": ["x"], "sex": ["m"], "age": [30]}), ["age", "sex=f", "sex=m"]).tolist()
    [[30.0, 0.0, 1.0]]

    Raises:
        DataError: if a column is missing or has missing values, is not numeric, or has a category that is not among the
            columns.
    """
    one_name_each(frame.columns, "the table of inputs")
    names = {str(column): column for column in frame.columns}
    if list(frame.columns) == list(range(len(columns))) and not set(columns) <= names.keys():
        return frame.to_numpy(dtype=np.float32)
    matrix = np.zeros((len(frame), len(columns)), dtype=np.float32)
    coded: dict[str, list[int]] = {}
    for place, name in enumerate(columns):
        if name in names:
            complete([frame[names[name]]], f"column {name!r} of the inputs")
            try:
                matrix[:, place] = frame[names[name]].to_numpy(dtype=np.float32)
            except (TypeError, ValueError) as error:
                why = in_one_line(error)
                raise DataError(f"column {name!r} of the inputs holds values that are not numbers: {why}.") from error
        else:
            coded.setdefault(next((prefix for prefix in names if name.startswith(f"{prefix}=")), name), []).append(
                place
            )
    for column, places in coded.items():
        if column not in names:
            raise DataError(f"the inputs have no column {column!r}; {nearest(column, names)}")
        complete([frame[names[column]]], f"column {column!r} of the inputs")
        texts = frame[names[column]].astype(str).to_numpy()
        values = [columns[place].removeprefix(f"{column}=") for place in places]
        if len(unseen := np.flatnonzero(~np.isin(texts, values))):
            message = f"column {column!r} of the inputs holds {texts[unseen[0]]!r}"
            raise DataError(f"{message}, which the run's data do not; {nearest(texts[unseen[0]], values)}")
        matrix[:, places] = texts[:, None] == np.array(values)
    return matrix if scaled is None else rescaled(matrix, scaled)


def with_categories(columns: Sequence[str]) -> set[str]:
    """The columns of a table whose categories ``encoded`` may have made into these.

    >>> sorted(with_categories(["age", "sex=f", "sex=m", "a=b=c"]))
    ['a', 'a=b', 'sex']
    """
    parts = [name.split("=") for name in columns]
    return {"=".join(part[:end]) for part in parts for end in range(1, len(part))} - set(columns)


def in_tokens(x: Any, *, column: str, tokenizer: str, words: int, length: int) -> Any:
    """Texts, a list or the column of a frame, as padded tokens, int64 [N, length]; anything else unchanged.

    >>> in_tokens(["Hi"], column="text", tokenizer="bytes", words=2, length=3).tolist()
    [[0, 73, 106]]
    """
    if is_frame(x):
        x = texts_of(x, column, "the table of inputs")
    listed = x.tolist() if isinstance(x, np.ndarray) and x.dtype.kind in "OU" else x
    if not isinstance(listed, list | tuple) or not all(isinstance(token, str) for token in listed):
        return x
    return padded(tokens(listed, tokenizer, words, length), tokenizer, length)
