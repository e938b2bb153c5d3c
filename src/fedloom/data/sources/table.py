"""A user's table on disk: CSV or parquet, with columns for label, client and time."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import DataError, first_line, in_one_line, nearest
from fedloom.core.files import check_memory, readable
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.formats import one_name_each

CSV = (".csv", *(f".csv.{packed}" for packed in ("gz", "bz2", "xz", "zip", "zst")))
SEPARATORS = {";": "semicolons", "\t": "tabs"}
COLUMNS = 100_000
IN_DIGITS = re.compile(r"^\s*(\d{1,2})([./-])(\d{1,2})\2\d{2,4}\b")
"""A date whose day, month and year are numbers, the year at the end."""


@sources.register
def table(
    path: str | Path,
    label: tuple[str, ...] = ("label",),
    features: tuple[str, ...] = (),
    client: str | None = None,
    time: str | None = None,
    standardise: bool = False,
) -> Source:
    """A CSV or parquet table with one row per sample: ``data=table:FILE data.label=COLUMN``.

    Columns of numbers are inputs unchanged; texts and categories become one-hot columns.

    Args:
        path: the file, ``.csv`` or ``.parquet``.
        label: the target column, or several of numbers: ``data.label=[height,weight]``.
        features: the input columns; by default all other than label, client and time.
        client: the column of natural clients.
        time: the column by which rows are sorted, of numbers or dates; it is no input. Each client is tested on its
            last rows.
        standardise: whether columns of numbers are scaled by the mean and deviation of all rows together, which a
            federation of real clients would have to compute jointly.

    Raises:
        DataError: if the file cannot be read as a table, or lacks a column.
    """
    from fedloom.data.own import as_source  # this package is imported by it

    if twice := [column for column in (*label, client) if column in features]:
        raise DataError(f"data.features names the column of labels or clients, {twice[0]!r}.")
    place = Path(path).expanduser()
    frame, name = read_frame(place), place.stem
    if time is not None:
        frame = in_order(frame, time, name)
        frame = frame if time in features else frame.drop(columns=time)
    targets = only(label)
    one = as_source(
        frame, features=list(features) or None, label=targets, client=client, standardise=standardise, name=name
    )
    settings = {"path": str(path), "label": targets, "time": time}
    settings |= {"client": client} if client else {}
    settings |= {"features": list(features)} if features else {}
    settings |= {key: one.settings[key] for key in ("columns", "standardised") if key in one.settings}
    return Source(name, one.train, one.test, "not stated", "", one.groups, None, one.group_names, settings=settings)


def only(columns: Sequence[str]) -> str | list[str]:
    """The name of a single column, or a list of several.

    >>> only(["ill"]), only(["height", "weight"])
    ('ill', ['height', 'weight'])

    Raises:
        DataError: if there is none.
    """
    if not columns:
        raise DataError("data.label names no column.")
    return columns[0] if len(columns) == 1 else list(columns)


def read_frame(path: Path, texts: Collection[str] = ()) -> Any:
    """A CSV or parquet file as a pandas frame.

    Args:
        path: the file.
        texts: columns of a CSV file that hold texts, even if all of them look like numbers.

    Raises:
        DataError: if there is no such file, or it is not a table.
    """
    try:
        frame = (_csv if path.name.lower().endswith(CSV) else _parquet)(readable(path), texts)
    except (DataError, MemoryError):
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file {path}.") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not encoded in UTF-8; write it in that encoding.") from None
    except Exception as error:  # readers fail in their own ways
        raise DataError(f"{path} cannot be read as a table ({in_one_line(error)}).") from error
    return frame


def _csv(path: Path, texts: Collection[str]) -> Any:
    import pandas as pd
    from pandas.io.common import get_handle

    with get_handle(path, "r", encoding="utf-8-sig", compression="infer") as opened:
        header = next((row for row in csv.reader(opened.handle) if row), [])
    if len(header) == 1 and (apart := next((name for sign, name in SEPARATORS.items() if sign in header[0]), None)):
        raise DataError(
            f"{path} separates its columns by {apart}; write it with commas, and with points in decimal numbers."
        )
    _check_header(header, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # of values beyond the header, which would be lost
        try:
            return pd.read_csv(path, dtype=dict.fromkeys(texts, str), index_col=False)
        except pd.errors.ParserWarning:
            raise DataError(
                f"{path} has more values in a row than the {len(header)} names in its header; name each column."
            ) from None


def _parquet(path: Path, texts: Collection[str]) -> Any:
    import pandas as pd
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _check_header(names, path)
        check_memory(f"{path} unpacked", 8.0 * file.metadata.num_rows * len(names))
    return pd.read_parquet(path)


def _check_header(names: Sequence[str], path: Path) -> None:
    """Raise a ``DataError`` if columns share a name, or are so many that a table of them takes minutes to read."""
    one_name_each(names, str(path))
    if len(names) > COLUMNS:
        raise DataError(
            f"{path} has {len(names):,} columns, and a table is read with at most {COLUMNS:,}; give wider data as one "
            "array x, in an npz file."
        )


def in_order(frame: Any, column: str, what: str) -> Any:
    """A pandas frame sorted by a column of numbers or dates; rows of the same time keep their order.

    >>> import pandas as pd
    >>> in_order(pd.DataFrame({"day": ["2026-02-01", "2026-01-31"], "x": [1, 2]}), "day", "visits")["x"].tolist()
    [2, 1]

    Raises:
        DataError: if there is no such column, some of its values are neither numbers nor dates, or its dates may begin
            with the day or with the month.
    """
    import pandas as pd

    if column not in frame.columns:
        raise DataError(f"{what} has no column {column!r}; {nearest(column, map(str, frame.columns))}")
    times = frame[column]
    if not pd.api.types.is_numeric_dtype(times):
        times = dates(times, f"{what}: column {column!r}")
    if lost := int(times.isna().sum()):
        raise DataError(
            f"{what}: column {column!r} lacks times in {lost} of {len(frame)} rows; fill them, or drop those rows."
        )
    return frame.iloc[times.argsort(kind="stable")]


def dates(column: Any, what: str) -> Any:
    """A pandas column of dates as times in UTC; dates in digits all begin with the day, or all with the month.

    A number above 12 decides which; with dots the day comes first.

    >>> import pandas as pd
    >>> dates(pd.Series(["31/01/2026", "01/02/2026"]), "visits").dt.month.tolist()
    [1, 2]

    Raises:
        DataError: if some are not dates, or it is ambiguous whether they begin with the day or the month.
    """
    import pandas as pd

    column = column.reset_index(drop=True)
    parts = column.dropna().astype(str).str.extract(IN_DIGITS).dropna()
    day_first = bool((parts[0].astype(int) > 12).any())
    month_first = bool((parts[2].astype(int) > 12).any())
    if day_first and month_first:
        raise DataError(f"{what} holds dates that begin with the day and others that begin with the month.")
    if len(parts) and not (day_first or month_first or (day_first := bool((parts[1] == ".").all()))):
        raise DataError(
            f"{what} holds dates like {column[parts.index[0]]!r}, which may begin with the day or with the month; "
            "write them as 2026-12-31."
        )
    try:
        in_digits = column.index.isin(parts.index)
        times = pd.to_datetime(column.mask(in_digits), utc=True, format="mixed")
        return times.fillna(pd.to_datetime(column.where(in_digits), utc=True, format="mixed", dayfirst=day_first))
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} holds neither numbers nor dates ({first_line(error)}).") from error
