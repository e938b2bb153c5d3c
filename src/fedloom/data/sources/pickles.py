"""CIFAR's official batches are pickles; this reads them without running anything they could carry."""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError

ADMITTED: dict[tuple[str, str], Any] = {
    **{(f"numpy{u}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for u in (".core", "._core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
}


class PlainUnpickler(pickle.Unpickler):
    """Unpickles numbers, strings, lists, dictionaries and NumPy arrays, and refuses everything else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The few names that arrays need."""
        if (module_name, global_name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no data file needs")
        return ADMITTED[module_name, global_name]


def read_pickle(path: Path, keys: list[str]) -> dict[str, Any]:
    """The dictionary in a pickle of plain data, which must have ``keys``.

    Raises:
        DataError: if the file is truncated or damaged, lacks a key, or asks for anything but plain data.
    """
    try:
        with open(path, "rb") as file:
            found = PlainUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle fails in many ways
        raise DataError(f"{path} cannot be read as a pickle of plain data: {error}.") from error
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}.")
    return found
