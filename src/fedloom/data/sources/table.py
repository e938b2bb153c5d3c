"""One's own table on disk: CSV or parquet, with columns for label, client and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.core.errors import DataError, first_line, in_one_line, nearest
from fedloom.data.sources.base import Source, sources


@sources.register
def table(
    path: str, label: str = "label", features: tuple[str, ...] = (), client: str | None = None, time: str | None = None
) -> Source:
    """A CSV or parquet table with one row per sample: ``data=table:FILE data.label=COLUMN``.

    Columns of numbers are inputs as they are, texts and categories become one-hot columns.

    Args:
        path: the file, ``.csv`` or ``.parquet``.
        label: the target column.
        features: the input columns; by default all other than label, client and time.
        client: the column of natural clients.
        time: the column by which rows are sorted, of numbers or dates; it is no input.

    Raises:
        DataError: if the file cannot be read as a table, or lacks a column.
    """
    from fedloom.data.own import as_source  # this package is imported by it

    place = Path(path).expanduser()
    frame, name = read_frame(place), place.stem
    if time is not None:
        frame = in_order(frame, time, name)
        frame = frame if time in features else frame.drop(columns=time)
    one = as_source(frame, features=list(features) or None, label=label, client=client, name=name)
    settings = {"path": str(path), "label": label, "time": time}
    return Source(name, one.train, one.test, "not stated", "", one.groups, None, one.group_names, settings=settings)


def read_frame(path: Path) -> Any:
    """A CSV or parquet file as a pandas frame.

    Raises:
        DataError: if there is no such file, or it is no table.
    """
    import pandas as pd

    try:
        return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}.") from None
    except Exception as error:  # readers fail in their own ways
        raise DataError(f"{path} cannot be read as a table ({in_one_line(error)}).") from error


def in_order(frame: Any, column: str, what: str) -> Any:
    """A pandas frame sorted by a column of numbers or dates; rows of the same time keep their order.

    >>> import pandas as pd
    >>> in_order(pd.DataFrame({"day": ["2026-02-01", "2026-01-31"], "x": [1, 2]}), "day", "visits")["x"].tolist()
    [2, 1]

    Raises:
        DataError: if there is no such column, or some of its values are neither numbers nor dates.
    """
    import pandas as pd

    if column not in frame.columns:
        raise DataError(f"{what} has no column {column!r}; {nearest(column, map(str, frame.columns))}")
    times = frame[column]
    try:
        times = times if pd.api.types.is_numeric_dtype(times) else pd.to_datetime(times, utc=True, format="mixed")
    except (ValueError, TypeError) as error:
        told = f"{what}: column {column!r} holds neither numbers nor dates ({first_line(error)})."
        raise DataError(told) from error
    if lost := int(times.isna().sum()):
        raise DataError(
            f"{what}: column {column!r} lacks times in {lost} of {len(frame)} rows; fill them, or drop those rows."
        )
    return frame.iloc[times.argsort(kind="stable")]
