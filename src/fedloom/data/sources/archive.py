"""The npz format: arrays by name in a zip file; and what was made from slower formats, kept in it."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError


def read_npz(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Some arrays of an npz file; never unpickles.

    Raises:
        DataError: if there is no such file, it is truncated or damaged, or an array is missing.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            held = list(getattr(file, "files", ()))
            if missing := [key for key in keys if key not in held]:
                raise DataError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(held) or 'no named arrays'}.")
            return {key: file[key] for key in (*keys, *optional) if key in held}
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except DataError:
        raise
    except Exception as error:  # zip, zlib and npy each fail in their own ways
        raise DataError(f"{path} is truncated or not an npz file of plain arrays ({error}).") from error


def write_npz(path: Path, **arrays: Any) -> None:
    """Write arrays into an npz file in one step: a stop at any moment leaves the old file or the new one.

    Raises:
        OSError: if it cannot be written; then nothing is left behind.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def kept(path: Path, stamp: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array that ``make`` returns, read from ``path`` if it was kept there under the same stamp.

    What is there under another stamp, or damaged, is made again and replaced. A folder that cannot be written is no
    error: a warning says so, and the array is made each time.
    """
    if path.is_file():
        try:
            if str(read_npz(path, ["stamp"])["stamp"]) == stamp:
                return read_npz(path, ["array"])["array"]
        except DataError:
            pass
    array = make()
    try:
        write_npz(path, stamp=np.array(stamp), array=array)
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error.strerror}), so it is made again next time.", stacklevel=2)
    return array


def stamp_of(paths: Iterable[Path], *settings: Any) -> str:
    """A checksum of the names and sizes of files, and of settings: it changes when they do."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for path in paths:
        digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
