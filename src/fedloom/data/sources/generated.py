"""Synthetic data sets on disk: the output of ``fedloom synthesize`` as npz or parquet, and a source that reads it.

Both formats hold images as pixels in 0..1 (other inputs unchanged), their labels, the class names, the mean and
deviation by which the real images are normalised, and the provenance as JSON.

- npz: ``x_train`` float32 [M, C, H, W], ``y_train`` int64 [M], ``names``, ``mean``, ``std``, ``provenance``; also
  readable with ``data=npz``.
- parquet: one row per sample with ``label`` and ``x`` (the flattened input); images also as ``image``, a PNG, as
  Hugging Face ``datasets`` and its viewers expect.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import DataError, FedLoomError, import_extra
from fedloom.base.files import check_parquet, readable_path
from fedloom.core.federation import Arrays
from fedloom.data.augment import Scale
from fedloom.data.sources import Source, sources
from fedloom.data.sources.files import files_of, read_npz, reading, write_npz

OURS = b"fedloom"  # key of the set's metadata in parquet
KEYS = ("shape", "classes", "names", "mean", "std", "provenance")


class Generated(NamedTuple):
    """A synthetic set: samples in the range of the real data, and their provenance."""

    arrays: Arrays
    provenance: Mapping[str, Any]


def pixels(arrays: Arrays) -> Tensor:
    """Images as pixels in 0..1, float32 [N, C, H, W]; inputs without normalisation unchanged.

    >>> arrays = Arrays(torch.zeros(1, 1, 1, 1), torch.tensor([0]), classes=1, mean=(0.25,), std=(0.5,))
    >>> pixels(arrays).item()
    0.25
    """
    x = arrays.x.float()
    return Scale.of(x, arrays.mean, arrays.std).pixels(x) if arrays.std else x


def _normalised(x: Tensor, about: Mapping[str, Any], y: Tensor) -> Arrays:
    mean, std = (tuple(float(v) for v in about[key]) for key in ("mean", "std"))
    x = Scale.of(x, mean, std).stored(x) if std else x
    return Arrays(x, y, int(about["classes"]), tuple(about["names"]), mean, std)


def save_npz(data: Generated, path: Path) -> None:
    """Write a set as npz."""
    arrays = data.arrays
    write_npz(
        path,
        x_train=pixels(arrays).numpy(),
        y_train=arrays.y.numpy(),
        names=np.array(arrays.names, dtype=np.str_),
        classes=np.array(arrays.classes),
        mean=np.array(arrays.mean, dtype=np.float64),
        std=np.array(arrays.std, dtype=np.float64),
        provenance=np.array(json.dumps(data.provenance)),
    )


def parquet(data: Generated) -> bytes:
    """A set as a parquet file."""
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as pq

    arrays, x = data.arrays, pixels(data.arrays)
    columns: dict[str, Any] = {"label": pa.array(arrays.y.numpy(), pa.int64())}
    kinds: dict[str, Any] = {"label": {"_type": "Value", "dtype": "int64"}}
    if arrays.names:
        kinds["label"] = {"_type": "ClassLabel", "names": list(arrays.names)}
    if x.ndim == 4 and x.shape[1] in (1, 3):
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns["image"] = pa.array([{"bytes": png(picture), "path": None} for picture in x], image)
        kinds["image"] = {"_type": "Image"}
    columns["x"] = pa.array(x.flatten(1).numpy().tolist(), pa.list_(pa.float32()))
    kinds["x"] = {"_type": "List", "feature": {"_type": "Value", "dtype": "float32"}}
    about = {
        "shape": list(x.shape[1:]),
        "classes": arrays.classes,
        "names": arrays.names,
        "mean": arrays.mean,
        "std": arrays.std,
        "provenance": data.provenance,
    }
    hub_metadata = {"info": {"features": kinds}}
    table = pa.table(columns).replace_schema_metadata(
        {OURS: json.dumps(about), b"huggingface": json.dumps(hub_metadata)}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def png(x: Tensor) -> bytes:
    """One image [1 or 3, H, W] of pixels in 0..1 as a PNG file."""
    bytes_ = (x.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    pillow = import_extra("images", "PIL.Image", "a synthetic set of images in parquet")
    pillow.fromarray(bytes_[..., 0] if len(x) == 1 else bytes_).save(buffer, "PNG")
    return buffer.getvalue()


def read_generated(path: Path) -> Generated:
    """Read a synthetic set, npz or parquet."""
    with reading(path, "was not written by fedloom synthesize; read it with data=npz or data=table"):
        if path.suffix == ".parquet":
            x, y, about = _read_parquet(path)
        else:
            arrays = read_npz(path, ["x_train", "y_train", "provenance"], ["names", "classes", "mean", "std"])
            x, y = torch.from_numpy(arrays["x_train"]), torch.from_numpy(arrays["y_train"])
            about: dict[str, Any] = {key: arrays[key].tolist() for key in ("names", "classes", "mean", "std")}
            about["provenance"] = json.loads(str(arrays["provenance"]))
        if not isinstance(about["provenance"].get("data", {}), dict):
            raise ValueError("its provenance names no data")
        if len(x) != len(y):
            raise DataError(f"{path} holds {len(x)} samples but {len(y)} labels.")
        return Generated(_normalised(x.float(), about, y.long()), about["provenance"])


def _read_parquet(path: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
    import pyarrow.parquet as pq

    with reading(path, "is truncated or not a parquet file"), pq.ParquetFile(readable_path(path)) as file:
        check_parquet(path, file)
        table = file.read()
    metadata = (table.schema.metadata or {}).get(OURS)
    about = json.loads(metadata) if metadata else {}
    if not {*KEYS} <= {*about} or not {"x", "label"} <= {*table.column_names}:
        raise DataError(f"{path} was not written by fedloom synthesize.")
    x = np.array(table["x"].to_pylist(), dtype=np.float32).reshape(-1, *about["shape"])
    return torch.from_numpy(x), torch.from_numpy(table["label"].to_numpy().copy()), about


@sources.register
def generated(path: str | Path, test: bool = True) -> Source:
    """A synthetic training set from ``fedloom synthesize``, with the real test set of the data it imitates.

    Args:
        path: its npz or parquet file.
        test: whether to read the real test set; otherwise there is none.

    Raises:
        DataError: if it is not such a file, or the real data are missing.
    """
    data = read_generated(Path(path).expanduser())
    arrays, origin = data.arrays, data.provenance.get("data", {})
    real = Arrays(arrays.x[:0], arrays.y[:0], arrays.classes, arrays.names, arrays.mean, arrays.std)
    licence, citation = "that of the data it imitates", ""
    if test:
        source = _imitated(path, origin)
        if source.test.x.shape[1:] != arrays.x.shape[1:] or source.test.std != arrays.std:
            raise DataError(f"{path} imitates other images than the {source.name} here; leave its test set out: {OUT}")
        real, licence, citation = source.test, source.licence, source.citation
    settings = {"path": str(path), "imitates": origin.get("name"), "method": data.provenance.get("method")}
    return Source(f"generated from {origin.get('name')}", arrays, real, licence, citation, settings=settings)


OUT = "data.test=false."


def _imitated(path: str | Path, origin: Mapping[str, Any]) -> Source:
    name = str(origin.get("name"))
    if name not in sources or not (name == "digits" or files_of(sources[name])):  # a stranger's set chooses no file
        raise DataError(f"{path} imitates data that have no name here, so there is no test set; leave it out: {OUT}")
    parameters = sources[name].parameters.keys() - {"root", "download"}
    try:
        return sources.make(name, **{key: value for key, value in origin.items() if key in parameters})
    except FedLoomError as error:
        raise DataError(f"{path} imitates {name}, which cannot be read: {error} Or leave it out: {OUT}") from error
