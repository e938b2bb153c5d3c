"""Columns of tables as numbers: clients, inputs with one-hot categories, and what no column may hold."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Hashable, Sequence
from datetime import date, time, timedelta
from numbers import Number
from typing import Any

import numpy as np

from fedloom.base.errors import DataError, in_words, nearest

CATEGORIES = 1000  # more in a column are rather identities
FEW = 20  # categories that any column may have, as many as it has rows
DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{4})([ T]\d.*)?")
NUMBER = re.compile(r"\s*[-+]?\d[\d.,]*\s*")
"""Texts that are numbers, also with decimal commas."""


def is_frame(data: Any) -> bool:
    """Whether ``data`` is a pandas frame, determined without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def clients_of(column: Any, what: str) -> np.ndarray:
    """Client ids of a column, as numbers or texts [N]."""
    complete([column], f"{what}: column {column.name!r}")
    check_cells(column, f"{what}: column {column.name!r}")
    ids = column.to_numpy()
    if ids.dtype.kind == "f" and (ids == np.rint(ids)).all() and (np.abs(ids) < 2**53).all():
        ids = ids.astype(np.int64)  # in a table in which other rows lack it, a whole number is read as a float
    return ids if ids.dtype.kind in "iu" else as_texts(ids, what)


def as_texts(ids: np.ndarray, what: str) -> np.ndarray:
    """Client ids as texts, in the same shape."""
    texts, numbers = (
        {str(value) for value in ids.ravel() if isinstance(value, str) is is_text} for is_text in (True, False)
    )
    if twin := sorted(texts & numbers):
        raise DataError(f"{what}: client {twin[0]} is a text in some samples and a number in others; convert them.")
    return np.array([str(value) for value in ids.ravel()], dtype=str).reshape(ids.shape)


def encoded(frames: Sequence[Any], what: str) -> tuple[list[np.ndarray], list[str]]:
    """Input columns of several frames as float32 [N, D], with one-hot categories, and the D names.

    Columns are found by their names, in the order of the first frame. The categories of a column are those of all
    frames together, sorted, or in the order that pandas has for them.

    >>> import pandas as pd
    >>> tables, names = encoded([pd.DataFrame({"age": [30, 40], "sex": ["f", "m"]})], "people")
    >>> tables[0].tolist(), names
    ([[30.0, 1.0, 0.0], [40.0, 0.0, 1.0]], ['age', 'sex=f', 'sex=m'])
    """
    import pandas as pd

    columns = list(frames[0].columns)
    shared = [column for column in columns if all(column in frame.columns for frame in frames)]
    if extra := [entry for frame in frames for entry in frame.columns if entry not in shared]:
        message = ", ".join(map(repr, dict.fromkeys(map(str, extra))))
        raise DataError(
            f"{what}: not all tables have the columns {message}; give data.features (features= in Python) with columns "
            "that all of them have."
        )
    if not columns:
        raise DataError(f"{what} has no column other than label and client; there is nothing to learn from.")
    if "Unnamed: 0" in columns:
        raise DataError(
            f"{what} has the row numbers that pandas writes with a table as an input, column 'Unnamed: 0'; drop it, or "
            "leave it out of data.features (features= in Python)."
        )
    blocks: list[list[np.ndarray]] = [[] for _ in frames]
    names: list[str] = []
    counts = {column: sum(int(frame[column].isna().sum()) for frame in frames) for column in columns}
    if lacking := {column: count for column, count in counts.items() if count}:
        message = ", ".join(f"column {str(column)!r} in {count}" for column, count in lacking.items())
        raise DataError(
            f"{what} has missing values, {message} of {sum(map(len, frames))} rows; fill or drop them, as "
            "data.missing=impute or drop does with data=table."
        )
    for column in columns:
        series = [frame[column] for frame in frames]
        if all(pd.api.types.is_numeric_dtype(entry.dtype) for entry in series):
            names.append(str(column))
            for block, column_of in zip(blocks, series, strict=True):
                block.append(_narrowed(column_of, f"{what}: column {column!r}")[:, None])
            continue
        if any(_in_time(entry) for entry in series):
            raise DataError(
                f"{what}: column {column!r} holds dates; turn it into numbers, or leave it out of data.features "
                "(features= in Python)."
            )
        if any(pd.api.types.is_numeric_dtype(entry.dtype) for entry in series):
            raise DataError(
                f"{what}: column {column!r} holds numbers in some tables and texts in others; convert it, so that "
                "all have the same."
            )
        for column_of in series:
            check_cells(column_of, f"{what}: column {column!r}", numbers=True)
        values = categories(series) or sorted({str(value) for entry in series for value in entry.unique()})
        if len(values) > CATEGORIES:
            raise DataError(
                f"{what}: column {column!r} has {len(values)} different texts, too many for categories; turn it "
                "into numbers, or leave it out of data.features "
                "(features= in Python)."
            )
        texts = [text for text in values if not NUMBER.fullmatch(text)]
        if len(values) > FEW and 2 * len(texts) < len(values):
            example = next(iter(texts), next((text for text in values if "," in text), values[0]))
            warnings.warn(
                f"{what}: column {column!r} holds numbers, but also texts like {example!r}, so that each of its "
                f"{len(values)} values becomes an input; write numbers with points, and leave the other cells empty "
                "(data.missing).",
                stacklevel=3,
            )
        elif len(values) > FEW and 2 * len(values) > (rows := sum(map(len, series))):
            warnings.warn(
                f"{what}: column {column!r} has {len(values)} different texts in {rows} rows, each of which becomes an "
                "input; if it holds names or sentences, turn it into numbers, or leave it out of data.features "
                "(features= in Python).",
                stacklevel=3,
            )
        names += [f"{column}={category}" for category in values]
        for block, column_of in zip(blocks, series, strict=True):
            codes = pd.Categorical(column_of.astype(str), categories=values).codes
            block.append(np.eye(len(values), dtype=np.float32)[codes])
    return [np.concatenate(block, 1) for block in blocks], names


def check_cells(column: Any, what: str, numbers: bool = False) -> None:
    """Raise a ``DataError`` if cells hold several values each, or all hold ``numbers`` of no plain type."""
    if column.dtype != object:
        return
    for cell in column:
        if isinstance(cell, bytes) or not isinstance(cell, Hashable):
            raise DataError(f"{what} holds {in_words(cell)} in a cell; give one number or text, or leave it out.")
    if numbers and len(column) and all(isinstance(cell, Number) and not isinstance(cell, bool) for cell in column):
        raise DataError(
            f"{what} holds numbers of type {type(column.iloc[0]).__name__}, like {str(column.iloc[0])[:20]}, which are "
            "no floats and no whole numbers of 64 bits; convert them with astype(float), or scale them."
        )


def complete(series: Sequence[Any], what: str) -> None:
    """Raise a ``DataError`` if a column of one or several frames lacks values."""
    if lost := sum(int(part.isna().sum()) for part in series):
        raise DataError(
            f"{what} has missing values in {lost} of {sum(map(len, series))} rows; fill them, or drop those rows."
        )


def _narrowed(column: Any, what: str) -> np.ndarray:
    """A column of real numbers as float32 [N]."""
    values = column.to_numpy()
    if values.dtype.kind == "c":
        raise DataError(f"{what} holds complex numbers; give real and imaginary part as two columns.")
    with np.errstate(over="ignore"):
        return column.to_numpy(dtype=np.float32)


def _in_time(column: Any) -> bool:
    """Whether a column holds dates, times or durations, or texts that are dates."""
    import pandas as pd

    kinds = pd.api.types
    if kinds.is_datetime64_any_dtype(column.dtype) or kinds.is_timedelta64_dtype(column.dtype):
        return True
    if len(column) and isinstance(column.iloc[0], date | time | timedelta):
        return True
    return len(column) > 0 and all(isinstance(cell, str) and DATE.fullmatch(cell) for cell in column)


def categories(parts: Sequence[Any]) -> list[str]:
    """The categories of columns in pandas' order, if all are of one categorical type; else none."""
    kinds = [getattr(part, "dtype", None) for part in parts]
    values = getattr(kinds[0], "categories", None)
    return [] if values is None or any(kind != kinds[0] for kind in kinds) else [str(category) for category in values]


def present(names: Sequence[str], columns: Sequence[str], what: str) -> None:
    """Raise a ``DataError`` for a column that does not exist."""
    for column in names:
        if column == "label" not in columns:  # the default
            message = ", ".join(map(str, columns))
            raise DataError(
                f"{what} has no column 'label'; name the target with label= (data.label= on the command line), one "
                f"of: {message}."
            )
        if column not in columns:
            raise DataError(f"{what} has no column {column!r}; {nearest(str(column), map(str, columns))}")
