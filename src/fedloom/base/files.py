"""Files: written new or replaced as a whole, and read only if they are regular files that fit into memory."""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from fedloom.base.errors import DataError, FedLoomError

CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


PIECE = 256  # rows of texts that are read at a time
FORMULA = ("=", "+", "-", "@", "\t", "\r")
NUMBERS = re.compile(r"[-+](?:[\d.,\s±%()+-]|e(?=[-+]?\d)|inf|nan|to)+")


def cell(text: str) -> str:
    """A text as a cell of a CSV file, with an apostrophe where a spreadsheet would take it for a formula.

    >>> cell("=1+1"), cell("-0.5"), cell("+2.0 ± 0.6 (-0.5 to +4.5)"), cell("fedavg"), cell("-1 +cmd|' /C calc'!A0")
    ("'=1+1", '-0.5', '+2.0 ± 0.6 (-0.5 to +4.5)', 'fedavg', "'-1 +cmd|' /C calc'!A0")
    """
    return f"'{text}" if text.startswith(FORMULA) and not NUMBERS.fullmatch(text) else text


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to write into, never the target of a link; it is on disk when the block ends."""
    path.unlink(missing_ok=True)
    with path.open("xb+") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacement(path: Path, alone: bool = True) -> Iterator[Path]:
    """Where to write what replaces ``path`` when the block ends: readers see either the old content or the new one."""
    part = path.with_name(f".{path.name}.part" if alone else f".{path.name}.{platform.node()}-{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces ``path``, as in ``replacement``; other processes may do so at the same time.

    Raises:
        OSError: if it cannot be written; nothing is left behind.
    """
    with replacement(path, alone=False) as part, new_file(part) as file:
        yield file


FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(what: object, kind: type[FedLoomError] = DataError) -> Iterator[None]:
    """Raise an error of this kind, about ``what``, if the block cannot write.

    >>> with writing("a.png"):
    ...     raise OSError(errno.EROFS, "Read-only file system")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.DataError: a.png cannot be written: Read-only file system; choose another place.
    """
    try:
        yield
    except OSError as error:
        room = "make room for it, or " if error.errno in FULL else ""
        raise kind(f"{what} cannot be written: {error.strerror or error}; {room}choose another place.") from error


def memory_map(file: BinaryIO, dtype: DTypeLike, shape: tuple[int, ...]) -> np.memmap:
    """A new array in an npy file that was opened for writing, mapped into memory."""
    dtype = np.dtype(dtype)
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, about)
    file.flush()
    start = file.tell()
    size = start + math.prod(shape) * dtype.itemsize
    if hasattr(os, "posix_fallocate"):  # where a file has holes, a full disk ends the process that writes into the map
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)
    return np.memmap(file, dtype, "r+", start, shape)


def readable_path(path: Path) -> Path:
    """The same path, unless reading it might never end; a path that does not exist is left to its reader.

    Raises:
        DataError: for a pipe, a socket or a device.
    """
    with suppress(OSError):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise DataError(f"{path} is a pipe, a socket or a device, whose end is not known; give a file.")
    return path


def memory() -> float:
    """Bytes of memory that this process may use: the least limit of machine, container and process; inf if unknown."""
    limits = [math.inf]
    with suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in CGROUP:
        with suppress(ValueError, OSError):  # ValueError: "max"
            limits.append(int(Path(limit).read_text()))
    if sys.platform != "win32":
        import resource

        if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            limits.append(most)
    return min(limits)


def check_parquet(path: Path, file: Any, texts: bool = True) -> None:
    """Raise a ``DataError`` if memory cannot hold what a parquet file holds: few bytes may stand for many values.

    With ``texts`` all texts are read, piece by piece: the file does not say how long repeated texts are, and may lie
    about its size. Of numbers there are as many as it says.
    """
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(group.num_columns)]
    size = 8.0 * sum(column.num_values for column in columns)
    check_memory(f"{path} unpacked", size + sum(group.total_byte_size for group in groups))
    long = sorted({column.path_in_schema for column in columns if column.physical_type.endswith("BYTE_ARRAY")})
    for number in range(len(groups)) if texts and long else ():
        most = 0  # of categories, which every piece of a group has anew
        for piece in file.iter_batches(PIECE, row_groups=[number], columns=long):
            piece.validate(full=True)  # texts may be none
            repeated = sum(column.dictionary.nbytes for column in piece.columns if hasattr(column, "dictionary"))
            check_memory(f"{path} unpacked", size := size + piece.nbytes - min(repeated, most))
            most = max(repeated, most)


def check_memory(title: str, size: float) -> None:
    """Raise a ``DataError`` if memory cannot hold ``size`` bytes."""
    if size > (limit := memory()):
        raise DataError(
            f"{title} needs {size / 1e9:.1f} GB of memory, but there are {limit / 1e9:.1f} GB; "
            "choose smaller sizes or fewer samples."
        )
