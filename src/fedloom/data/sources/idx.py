"""The idx format of MNIST and its kin: a magic number, the shape, and the bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path, dims: int | None = None) -> np.ndarray:
    """The array in an idx file, plain or gzipped, read straight into place.

    The header is two zero bytes, the element type, the number of dimensions, and each dimension as a big-endian 32-bit
    number; the elements follow, big-endian.

    Args:
        path: the file.
        dims: how many dimensions it must have (3 for images, 1 for labels).

    Raises:
        DataError: if it is not an idx file, or is truncated or damaged.
    """
    path = Path(path)
    with open(path, "rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if gzipped else open(path, "rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or (dims and magic[3] != dims):
                wanted = f" with {dims} dimensions" if dims else ""
                raise DataError(f"{path} is not an idx file{wanted}: it begins with {magic.hex(' ') or 'nothing'}.")
            header = file.read(4 * magic[3])
            if len(header) < 4 * magic[3]:
                raise DataError(f"{path} is truncated: it ends within its header.")
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4"))
            dtype = np.dtype(TYPES[magic[2]])
            promised = math.prod(shape) * dtype.itemsize
            if not gzipped and path.stat().st_size < 4 + len(header) + promised:  # before the memory is asked for
                raise truncated(path, promised, path.stat().st_size - 4 - len(header))
            array = np.empty(shape, dtype)
            view = memoryview(array.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
            done = 0
            while done < promised and (count := file.readinto(view[done:])):
                done += count
            if done < promised:
                raise truncated(path, promised, done)
            if file.read(1):
                raise DataError(f"{path} is damaged: it goes on after the {promised} bytes that its header promises.")
    except EOFError as error:
        raise DataError(f"{path} is truncated: its gzip stream ends too early.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    return array.astype(dtype.newbyteorder("="), copy=False)


def truncated(path: Path, promised: int, found: int) -> DataError:
    """The sentence for a file that is too short."""
    return DataError(f"{path} is truncated: its header promises {promised} bytes of data, but it holds {found}.")
