"""Text tables: csv and its kin."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.core.errors import ConfigError, DataError, nearest

UNKNOWN = ("", "?", "NaN", "nan")
Scale = Literal["client", "pooled", "none"]


def read_table(
    path: Path, columns: Sequence[str] = (), *, header: bool = True, separator: str = ",", width: int | None = None
) -> Iterator[list[str]]:
    """The rows of a table, only the named columns, in the order of ``columns``.

    Args:
        path: the file.
        columns: names in the header; all columns if none are given.
        header: whether the first row names the columns.
        separator: between two cells; between tabulators, quotation marks are text.
        width: how many cells a row must have, where there is no header.

    Raises:
        DataError: if the file is no text, a column is missing, or a row has too few or too many cells.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="strict") as file:
            marks = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
            reader = csv.reader(file, delimiter=separator, skipinitialspace=separator != "\t", quoting=marks)
            names = next(reader, []) if header else []
            if missing := [name for name in columns if name not in names]:
                raise DataError(f"{path} has no column {', '.join(missing)}; it has {', '.join(names) or 'nothing'}.")
            places, width = [names.index(name) for name in columns], len(names) if header else width
            for row in reader:
                if not row:
                    continue
                if width is not None and len(row) != width:
                    raise DataError(f"{path}, line {reader.line_num}: there are {len(row)} cells, not {width}.")
                yield [row[place] for place in places] if columns else row
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text table ({error}).") from error
    except csv.Error as error:
        raise DataError(f"{path} is damaged: {error}.") from error


def number(cell: str, where: object) -> float:
    """A cell as a number; NaN if it is unknown (empty or ``?``).

    >>> number("3.5", "x"), number("?", "x")
    (3.5, nan)
    """
    if cell.strip() in UNKNOWN:
        return float("nan")
    try:
        return float(cell)
    except ValueError:
        raise DataError(f"{where}: {cell!r} is not a number.") from None


def standardise(
    x: np.ndarray, groups: np.ndarray, how: Scale, fit: np.ndarray | None = None, columns: slice = slice(None)
) -> np.ndarray:
    """Columns with mean 0 and deviation 1, within each client or over all; a column without any spread becomes 0.

    Args:
        x: float [N, D].
        groups: client of each row.
        how: ``client``, ``pooled`` or ``none``.
        fit: mask of the rows that means and deviations are taken from, by default all.
        columns: which columns.

    >>> standardise(np.array([[1.0], [3.0], [5.0], [5.0]]), np.array([0, 0, 1, 1]), "client").ravel().tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    if how not in ("client", "pooled", "none"):
        raise ConfigError(f"there is no standardisation {how!r}; {nearest(how, ('client', 'pooled', 'none'))}")
    if how == "none":
        return x
    x = x.copy()
    fit = np.ones(len(x), bool) if fit is None else fit
    owners = groups if how == "client" else np.zeros(len(x), dtype=np.int64)
    for owner in np.unique(owners):
        mine = owners == owner
        known = x[mine & fit, columns] if (mine & fit).any() else x[mine, columns]
        spread = known.std(0)
        x[mine, columns] = (x[mine, columns] - known.mean(0)) / np.where(spread > 0, spread, 1)
    return x
