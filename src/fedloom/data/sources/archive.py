"""The npz format: arrays by name in a zip file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
