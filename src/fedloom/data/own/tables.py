"""Tables: columns of numbers and categories as one vector per row."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Mapping, Sequence
from datetime import date, time, timedelta
from numbers import Number
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, in_words, nearest
from fedloom.data.sources.formats import one_name_each
from fedloom.data.sources.scale import rescaled

CATEGORIES = 1000  # more in a column are rather identities
FEW = 20  # categories that any column may have, as many as it has rows


def is_frame(data: Any) -> bool:
    """Whether ``data`` is a pandas frame, determined without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def clients_of(column: Any, what: str) -> np.ndarray:
    """Client ids of a column, as numbers or texts [N].

    Raises:
        DataError: if some are missing.
    """
    if lost := int(column.isna().sum()):
        raise DataError(f"{what}: column {column.name!r} names no client in {lost} rows; drop or fill them.")
    check_cells(column, f"{what}: column {column.name!r}")
    ids = column.to_numpy()
    if ids.dtype.kind == "f" and (ids == np.rint(ids)).all() and (np.abs(ids) < 2**53).all():
        ids = ids.astype(np.int64)  # in a table in which other rows lack it, a whole number is read as a float
    return ids if ids.dtype.kind in "iu" else as_texts(ids, what)


def as_texts(ids: np.ndarray, what: str) -> np.ndarray:
    """Client ids as texts, in the same shape.

    Raises:
        DataError: if a client would be that of a text and that of a number.
    """
    texts, others = ({str(one) for one in ids.ravel() if isinstance(one, str) is kind} for kind in (True, False))
    if double := sorted(texts & others):
        raise DataError(f"{what}: client {double[0]} is a text in some samples and a number in others; convert them.")
    return np.array([str(one) for one in ids.ravel()], dtype=str).reshape(ids.shape)


def encoded(frames: Sequence[Any], what: str) -> tuple[list[np.ndarray], list[str]]:
    """Input columns of several frames as float32 [N, D], with one-hot categories, and the D names.

    Columns are found by their names, in the order of the first frame. The categories of a column are those of all
    frames together, sorted, or in the order that pandas has for them.

    >>> import pandas as pd
    >>> tables, names = encoded([pd.DataFrame({"age": [30, 40], "sex": ["f", "m"]})], "people")
    >>> tables[0].tolist(), names
    ([[30.0, 1.0, 0.0], [40.0, 0.0, 1.0]], ['age', 'sex=f', 'sex=m'])

    Raises:
        DataError: for missing values, dates, texts that are not categories, and frames with different columns.
    """
    import pandas as pd

    columns = list(frames[0].columns)
    shared = [column for column in columns if all(column in frame.columns for frame in frames)]
    if others := [one for frame in frames for one in frame.columns if one not in shared]:
        told = ", ".join(map(repr, dict.fromkeys(map(str, others))))
        raise DataError(f"{what}: not all tables have the columns {told}; give features=[...], which all of them have.")
    if not columns:
        raise DataError(f"{what} has no column other than label and client; there is nothing to learn from.")
    if "Unnamed: 0" in columns:
        raise DataError(
            f"{what} has the row numbers that pandas writes with a table as an input, column 'Unnamed: 0'; drop it, or "
            "leave it out of features=."
        )
    blocks: list[list[np.ndarray]] = [[] for _ in frames]
    names: list[str] = []
    counts = {column: sum(int(frame[column].isna().sum()) for frame in frames) for column in columns}
    if len(lacking := {column: count for column, count in counts.items() if count}) > 1:
        told = ", ".join(f"{str(column)!r} in {count}" for column, count in lacking.items())
        raise DataError(f"{what}: columns lack values, {told} of {sum(map(len, frames))} rows; fill or drop them.")
    for column in columns:
        series = [frame[column] for frame in frames]
        complete(series, f"{what}: column {column!r}")
        if all(pd.api.types.is_numeric_dtype(one.dtype) for one in series):
            names.append(str(column))
            for block, one in zip(blocks, series, strict=True):
                block.append(_narrowed(one, f"{what}: column {column!r}")[:, None])
            continue
        if any(_in_time(one) for one in series):
            raise DataError(
                f"{what}: column {column!r} holds dates; turn it into numbers, or leave it out of features=."
            )
        if any(pd.api.types.is_numeric_dtype(one.dtype) for one in series):
            raise DataError(
                f"{what}: column {column!r} holds numbers in some tables and texts in others; convert it, so that "
                "all have the same."
            )
        for one in series:
            check_cells(one, f"{what}: column {column!r}", numbers=True)
        known = categories(series) or sorted({str(value) for one in series for value in one.unique()})
        if len(known) > CATEGORIES:
            raise DataError(
                f"{what}: column {column!r} has {len(known)} different texts, which are no categories; turn it "
                "into numbers, or leave it out of features=."
            )
        if len(known) > FEW and 2 * len(known) > (rows := sum(map(len, series))):
            warnings.warn(
                f"{what}: column {column!r} has {len(known)} different texts in {rows} rows, each of which becomes an "
                "input; if it holds names or sentences, turn it into numbers, or leave it out of features=.",
                stacklevel=3,
            )
        names += [f"{column}={category}" for category in known]
        for block, one in zip(blocks, series, strict=True):
            codes = pd.Categorical(one.astype(str), categories=known).codes
            block.append(np.eye(len(known), dtype=np.float32)[codes])
    return [np.concatenate(block, 1) for block in blocks], names


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
        DataError: if a column is missing or lacks values, is not numeric, or has a category that is not among the
            columns.
    """
    one_name_each(frame.columns, "the table of inputs")
    names = {str(column): column for column in frame.columns}
    if list(frame.columns) == list(range(len(columns))) and not set(columns) <= names.keys():
        return frame.to_numpy(dtype=np.float32)
    made = np.zeros((len(frame), len(columns)), dtype=np.float32)
    coded: dict[str, list[int]] = {}
    for place, name in enumerate(columns):
        if name in names:
            complete([frame[names[name]]], f"column {name!r} of the inputs")
            try:
                made[:, place] = frame[names[name]].to_numpy(dtype=np.float32)
            except (TypeError, ValueError) as error:
                raise DataError(f"column {name!r} of the inputs holds values that are not numbers.") from error
        else:
            coded.setdefault(next((one for one in names if name.startswith(f"{one}=")), name), []).append(place)
    for column, places in coded.items():
        if column not in names:
            raise DataError(f"the inputs have no column {column!r}; {nearest(column, names)}")
        complete([frame[names[column]]], f"column {column!r} of the inputs")
        texts = frame[names[column]].astype(str).to_numpy()
        known = [columns[place].removeprefix(f"{column}=") for place in places]
        if len(lost := np.flatnonzero(~np.isin(texts, known))):
            told = f"column {column!r} of the inputs holds {texts[lost[0]]!r}"
            raise DataError(f"{told}, which the run's data do not; {nearest(texts[lost[0]], known)}")
        made[:, places] = texts[:, None] == np.array(known)
    return made if scaled is None else rescaled(made, scaled)


def with_categories(columns: Sequence[str]) -> set[str]:
    """The columns of a table whose categories ``encoded`` may have made into these.

    >>> sorted(with_categories(["age", "sex=f", "sex=m", "a=b=c"]))
    ['a', 'a=b', 'sex']
    """
    parts = [name.split("=") for name in columns]
    return {"=".join(part[:end]) for part in parts for end in range(1, len(part))} - set(columns)


def check_cells(column: Any, what: str, numbers: bool = False) -> None:
    """Raise a ``DataError`` if cells hold several values each, or all hold ``numbers`` of no plain type."""
    if column.dtype != object:
        return
    for cell in column:
        if not isinstance(cell, Hashable):
            raise DataError(f"{what} holds {in_words(cell)} in a cell; give one number or text, or leave it out.")
    if numbers and len(column) and all(isinstance(cell, Number) and not isinstance(cell, bool) for cell in column):
        raise DataError(
            f"{what} holds numbers of type {type(column.iloc[0]).__name__}, like {str(column.iloc[0])[:20]}, which are "
            "no floats and no whole numbers of 64 bits; convert them with astype(float), or scale them."
        )


def complete(series: Sequence[Any], what: str) -> None:
    """Raise a ``DataError`` if a column of one or several frames lacks values."""
    if lost := sum(int(one.isna().sum()) for one in series):
        raise DataError(
            f"{what} lacks values in {lost} of {sum(map(len, series))} rows; fill them, or drop those rows."
        )


def _narrowed(column: Any, what: str) -> np.ndarray:
    """A column of real numbers as float32 [N].

    Raises:
        DataError: if it holds complex numbers, or numbers beyond float32.
    """
    values = column.to_numpy()
    if values.dtype.kind == "c":
        raise DataError(f"{what} holds complex numbers; give real and imaginary part as two columns.")
    with np.errstate(over="ignore"):
        made = column.to_numpy(dtype=np.float32)
    if np.isinf(made).any() and np.isfinite(wide := column.to_numpy(dtype=np.float64)).all():
        raise DataError(f"{what} holds numbers beyond float32, up to {np.abs(wide).max():.1e}; scale them.")
    return made


def _in_time(column: Any) -> bool:
    """Whether a column holds dates, times or durations."""
    import pandas as pd

    kinds = pd.api.types
    if kinds.is_datetime64_any_dtype(column.dtype) or kinds.is_timedelta64_dtype(column.dtype):
        return True
    return len(column) > 0 and isinstance(column.iloc[0], date | time | timedelta)


def categories(parts: Sequence[Any]) -> list[str]:
    """The categories of columns in pandas' order, if all are of one categorical type; else none."""
    kinds = [getattr(part, "dtype", None) for part in parts]
    known = getattr(kinds[0], "categories", None)
    return [] if known is None or any(kind != kinds[0] for kind in kinds) else [str(one) for one in known]
