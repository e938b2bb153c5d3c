"""Formats of published data: idx files, pickles of plain data, and text tables, whose columns may be standardised."""

from __future__ import annotations

import codecs
import csv
import gzip
import math
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedloom.base.errors import DataError
from fedloom.base.files import check_memory, readable_path
from fedloom.data.sources.files import moments, one_name_each, reading

IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
UNKNOWN = ("", "?", "NaN", "nan")
Standardise = Literal["client", "pooled", "none"]


def read_idx(path: str | Path, dims: int | None = None) -> np.ndarray:
    """The array in an idx file (the format of MNIST), plain or gzipped, read straight into place.

    The header is two zero bytes, the element type, the number of dimensions, and each dimension as a big-endian 32-bit
    number; the elements follow, big-endian.

    Args:
        path: the file.
        dims: required number of dimensions (3 for images, 1 for labels).
    """
    path = Path(path)

    def truncated(promised: int, actual: int) -> DataError:
        return DataError(f"{path} is truncated: its header promises {promised} bytes of data, but it holds {actual}.")

    with open(readable_path(path), "rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if gzipped else open(path, "rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_TYPES or (dims and magic[3] != dims):
                dimensions = f" with {dims} dimensions" if dims else ""
                raise DataError(f"{path} is not an idx file{dimensions}: it begins with {magic.hex(' ') or 'nothing'}.")
            header = file.read(4 * magic[3])
            if len(header) < 4 * magic[3]:
                raise DataError(f"{path} is truncated: it ends within its header.")
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4"))
            dtype = np.dtype(IDX_TYPES[magic[2]])
            promised = math.prod(shape) * dtype.itemsize
            if not gzipped and path.stat().st_size < 4 + len(header) + promised:  # before memory is allocated
                raise truncated(promised, path.stat().st_size - 4 - len(header))
            check_memory(f"{path} unpacked", promised)
            array = np.empty(shape, dtype)
            view = memoryview(array.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
            size = 0
            while size < promised and (count := file.readinto(view[size:])):
                size += count
            if size < promised:
                raise truncated(promised, size)
            if file.read(1):
                raise DataError(f"{path} is damaged: it goes on after the {promised} bytes that its header promises.")
    except EOFError as error:
        raise DataError(f"{path} is truncated: its gzip stream ends too early.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    return array.astype(dtype.newbyteorder("="), copy=False)


PICKLED: dict[tuple[str, str], Any] = {
    **{(f"numpy{u}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for u in (".core", "._core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
}
"""The only globals that pickled data may name."""


class PlainUnpickler(pickle.Unpickler):
    """Unpickles numbers, strings, lists, dictionaries and NumPy arrays, and rejects everything else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in PICKLED:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no data file needs")
        return PICKLED[module_name, global_name]


def read_pickle(path: Path, keys: list[str]) -> dict[str, Any]:
    """The dictionary in a pickle of plain data (CIFAR's official batches), read without executing code.

    Raises:
        DataError: if the file is truncated or damaged, lacks a key, or contains anything but plain data.
    """
    with reading(path, "cannot be read as a pickle of plain data"), open(readable_path(path), "rb") as file:
        content = PlainUnpickler(file, encoding="latin1").load()
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}.")
    return content


def read_table(
    path: Path, columns: Sequence[str] = (), *, header: bool = True, separator: str = ",", width: int | None = None
) -> Iterator[list[str]]:
    """The rows of a text table.

    Args:
        path: the file.
        columns: names of the columns to read, in this order; by default all.
        header: whether the first row names the columns.
        separator: between two cells; with tabs, quotation marks have no meaning.
        width: required number of cells per row, for tables without header.

    Raises:
        DataError: if the file is not text, a column is missing, or a row has the wrong number of cells.
    """
    try:
        with open(readable_path(path), newline="", encoding="utf-8-sig", errors="strict") as file:
            marks = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
            reader = csv.reader(file, delimiter=separator, skipinitialspace=separator != "\t", quoting=marks)
            names = next(reader, []) if header else []
            one_name_each(names, str(path))
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


def read_words(path: Path) -> list[list[str]]:
    """The words of every line of a text."""
    with reading(path, "is not a text"):
        return [line.split() for line in readable_path(path).read_text(encoding="utf-8").splitlines()]


def number(cell: str, where: object) -> float:
    """A cell as a number, NaN if it is unknown (empty or ``?``); ``where`` begins the error sentence.

    >>> number("3.5", "x"), number("?", "x")
    (3.5, nan)
    """
    if cell.strip() in UNKNOWN:
        return float("nan")
    with suppress(ValueError):
        if math.isfinite(value := float(cell)):
            return value
    raise DataError(f"{where}: {cell!r} is not a number.")


def standardise(
    x: np.ndarray, groups: np.ndarray, how: Standardise, fit: np.ndarray | None = None, columns: slice = slice(None)
) -> np.ndarray:
    """Scale columns to mean 0 and deviation 1, within each client or over all rows; constant columns become 0.

    Args:
        x: features, float [N, D].
        groups: client of each row, int [N].
        how: ``client``, ``pooled`` or ``none``.
        fit: mask of the rows that give means and deviations, bool [N]; by default all.
        columns: the columns to scale.

    >>> standardise(np.array([[1.0], [3.0], [5.0], [5.0]]), np.array([0, 0, 1, 1]), "client").ravel().tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    if how == "none":
        return x
    x = x.copy()
    fit = np.ones(len(x), bool) if fit is None else fit
    owners = groups if how == "client" else np.zeros(len(x), dtype=np.int64)
    for owner in np.unique(owners):
        rows = owners == owner
        values = x[rows & fit, columns] if (rows & fit).any() else x[rows, columns]
        mean, deviation = moments(values)
        x[rows, columns] = (x[rows, columns] - mean) / deviation
    return x
