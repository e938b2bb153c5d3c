"""A node's own data: read from its files, and checked against what a recipe expects before the node joins."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError, in_one_line, in_words
from fedloom.core.federation import Arrays, Index
from fedloom.core.rng import stream
from fedloom.data.sources.arrays import as_array, by_class, inputs, read_images, rescaled, targets, to_images
from fedloom.data.sources.files import read_npz
from fedloom.data.sources.table import read_frame
from fedloom.data.split import split_rows
from fedloom.data.user import complete, in_columns, with_categories
from fedloom.experiment.trained import numbered

TABLES = (".csv", ".parquet")
SCALED = "scaled"  # the name under which arrays say that they are standardised already
LABEL = "label"  # the column of the labels, unless the recipe names another
LOADER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
FOR = {"train": "training", "validation": "validation", "test": "tests"}
SPLITS = tuple(FOR)
SLACK = 1e-6  # of the range of inputs, for rounding


@dataclass(frozen=True)
class DataSpec:
    """A recipe's requirements on a node's samples.

    Args:
        inputs: shape of one input.
        classes: C; 1 if the targets are numbers.
        numeric: whether targets are numbers instead of classes.
        targets: shape of one target; () for a class number.
        integer: whether inputs are integers, such as characters.
        names: names of the classes, if there are any.
        mean: per-channel mean by which images of bytes are normalised, x = (pixel - mean) / std with pixels in [0, 1].
        std: per-channel standard deviation, likewise.
        range: least and largest value of an input, after normalisation; None if all values are allowed.
        validation: fraction of a node's samples that is kept for validation, if the files do not split them.
        held_out: fraction that is held out for tests, likewise.
        columns: names of the inputs, if the server's data are a table; those of a node's table are found by them, and
            categories are one-hot as there, ``column=category``.
        label: the column of the labels in the server's table, or several of numbers.
        standardised: the numbers ``columns``, ``mean`` and ``deviation`` by which the server's inputs were scaled, and
            a node's are; empty if they were not.
    """

    inputs: tuple[int, ...]
    classes: int
    numeric: bool = False
    targets: tuple[int, ...] = ()
    integer: bool = False
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    range: tuple[float, float] | None = None
    validation: float = 0.0
    held_out: float = 0.2
    columns: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    standardised: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Arrays, **settings: Any) -> DataSpec:
        """The specification that these arrays fulfil."""
        x, bounds = arrays.x, None
        if arrays.mean:
            ends = [((0 - m) / s, (1 - m) / s) for m, s in zip(arrays.mean, arrays.std, strict=True)]
            bounds = min(low for low, _ in ends), max(high for _, high in ends)
        return cls(
            tuple(x.shape[1:]), arrays.classes, arrays.has_numbers, tuple(arrays.y.shape[1:]),
            not x.is_floating_point(), arrays.names, arrays.mean, arrays.std, bounds, **settings,
        )  # fmt: skip


@dataclass(frozen=True)
class NodeData:
    """A node's samples: for training, for validation and for tests; the last two may be empty."""

    train: Arrays
    validation: Arrays
    test: Arrays

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of samples."""
        return len(self.train), len(self.validation), len(self.test)


def read(place: str, spec: DataSpec, seed: int = 0) -> NodeData:
    """Read a node's samples.

    Args:
        place: an npz file with ``x_train``, ``y_train`` and, where the node has them, ``x_validation``,
            ``y_validation``, ``x_test`` and ``y_test``; a folder with one sub-folder of images per class; a CSV or
            parquet table with the columns of the recipe, or, if the recipe names none, with the column ``label`` and
            numbers in all others; or a Python function ``package.module:function`` that returns arrays under the names
            of the npz file. If the recipe standardises its inputs, the samples' are scaled by its numbers; arrays with
            ``scaled``, which is true, are so already.
        spec: the recipe's requirements.
        seed: seed of the split, if the files are not split.

    Raises:
        DataError: if the samples cannot be read or do not fit.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        named: Mapping[str, Any] = _images(path, spec)
    else:
        named = _table(path, spec) if path.suffix in TABLES else _named(path, place)
    return fit(named, spec, place, seed)


def look(place: str) -> None:
    """Read a node's samples and check them as far as that needs no recipe; images are not opened.

    Which columns of a table are inputs and labels is the recipe's to say: all must be complete.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        by_class(path)
        return
    if path.suffix in TABLES:
        _whole(_frame(path), path)
        return
    named = _named(path, place)
    for split in _splits(named, place):
        raw, y = _raw(named, split, place), _targets(named, split, place)
        pixels = raw.dtype == np.uint8 and raw.ndim in (3, 4)  # whose channels are the recipe's
        x = torch.from_numpy(raw) if pixels else inputs(raw, f"{place}: x_{split}")
        _made(x, y, split, place, 1 if y.is_floating_point() or not y.numel() else max(int(y.max()) + 1, 1))


def _named(path: Path, place: str) -> Mapping[str, Any]:
    """The arrays of a file or function by name."""
    if path.suffix == ".npz":
        optional = [SCALED, *(f"{kind}_{split}" for split in SPLITS[1:] for kind in "xy")]
        return read_npz(path, ["x_train", "y_train"], optional)
    if LOADER.fullmatch(place):
        return _loaded(place)
    raise DataError(
        f"--data {place}: there is no such folder, and it is neither an npz, CSV or parquet file nor a Python "
        "function like package.module:function."
    )


def _splits(named: Mapping[str, Any], place: str) -> list[str]:
    """The splits that are there, each with inputs and targets."""
    splits = [name for name in SPLITS if name == "train" or {f"x_{name}", f"y_{name}"} & named.keys()]
    if missing := [f"{kind}_{name}" for name in splits for kind in "xy" if f"{kind}_{name}" not in named]:
        raise DataError(f"{place} lacks {' and '.join(missing)}.")
    return splits


def fit(named: Mapping[str, Any], spec: DataSpec, place: str, seed: int = 0) -> NodeData:
    """The samples in the form that the recipe requires, split if they are not yet."""
    splits = {name: _arrays(named, name, spec, place) for name in _splits(named, place)}
    train = splits["train"]
    shares = [0.0 if name in splits else share for name, share in (("validation", spec.validation),
                                                                   ("test", spec.held_out))]  # fmt: skip
    labels = train.y.numpy() if not spec.numeric and train.y.ndim == 1 else np.zeros(len(train), np.int64)
    whole = Index.of([np.arange(len(train))])
    rows = split_rows(whole, labels, shares[0], shares[1], stream(seed, "split"))
    taken = [train.take(part.rows) for part in rows]
    return NodeData(taken[0], splits.get("validation", taken[1]), splits.get("test", taken[2]))


def _arrays(named: Mapping[str, Any], split: str, spec: DataSpec, place: str) -> Arrays:
    raw, y = _raw(named, split, place), _targets(named, split, place)
    pixels = raw.dtype == np.uint8 and len(spec.inputs) == 3 and raw.ndim in (3, 4)
    x = to_images(raw, spec.mean, spec.std) if pixels else inputs(raw, f"{place}: x_{split}")
    _check_shape(x, split, spec, place)
    if spec.standardised and not bool(named.get(SCALED)):
        if spec.columns:
            raise DataError(
                f"{place} names no columns, but the recipe standardises them; give a CSV or parquet table with the "
                "columns of the server's."
            )
        x = torch.from_numpy(rescaled(x.numpy(), spec.standardised))
    _check(x, y, split, spec, place)
    return _made(x, y, split, place, spec.classes, spec.names, spec.mean, spec.std)


def _raw(named: Mapping[str, Any], split: str, place: str) -> np.ndarray:
    return as_array(named[f"x_{split}"], f"{place}: x_{split}")


def _targets(named: Mapping[str, Any], split: str, place: str) -> Tensor:
    what = f"{place}: y_{split}"
    return targets(as_array(named[f"y_{split}"], what), what)


def _made(x: Tensor, y: Tensor, split: str, place: str, *described: Any) -> Arrays:
    """The arrays of a split; their lengths, labels and values are checked, and training needs samples."""
    try:
        arrays = Arrays(x, y, *described)
    except DataError as error:
        raise DataError(f"{place}: in the samples for {FOR[split]}, {error}") from error
    if split == "train" and not len(arrays):
        raise DataError(f"{place} has no training samples.")
    return arrays


def _check_shape(x: Tensor, split: str, spec: DataSpec, place: str) -> None:
    if tuple(x.shape[1:]) != spec.inputs:
        raise DataError(
            f"{place}: a sample of x_{split} has the shape {list(x.shape[1:])}, but the recipe's inputs are "
            f"{list(spec.inputs)}."
        )


def _check(x: Tensor, y: Tensor, split: str, spec: DataSpec, place: str) -> None:
    """Raise ``DataError`` if samples do not fit; ``Arrays`` checks labels and finite inputs."""
    what = f"{place}: a sample of x_{split}"
    if x.is_floating_point() == spec.integer:
        kinds = {True: "whole numbers", False: "real numbers"}
        raise DataError(f"{what} holds {kinds[not spec.integer]}, but the recipe's inputs are {kinds[spec.integer]}.")
    if y.is_floating_point() != spec.numeric:
        wanted = "numbers" if spec.numeric else "class numbers"
        raise DataError(f"{place}: y_{split} holds {y.dtype}, but the recipe's targets are {wanted}.")
    if tuple(y.shape[1:]) != spec.targets:
        raise DataError(f"{place}: a target of y_{split} has the shape {list(y.shape[1:])}, not {list(spec.targets)}.")
    if spec.range is not None and x.numel():
        low, high = spec.range
        slack = SLACK * (high - low)
        least, most = float(x.min()), float(x.max())
        if least < low - slack or most > high + slack:
            raise DataError(
                f"{what} holds values from {least:g} to {most:g}, but the recipe's inputs lie between {low:g} and "
                f"{high:g}."
            )


def _images(folder: Path, spec: DataSpec) -> dict[str, np.ndarray]:
    if len(spec.inputs) != 3 or spec.inputs[1] != spec.inputs[2]:
        raise DataError(f"{folder} holds images, but the recipe's inputs are {list(spec.inputs)}.")
    paths, labels, names = by_class(folder)
    known = spec.names or tuple(map(str, range(spec.classes)))
    if strange := [name for name in names if name not in known]:
        raise DataError(f"{folder} has a class {strange[0]!r}, but the recipe's are {', '.join(known)}.")
    raw = read_images(str(folder), paths, spec.inputs[1], folder / ".fedloom-images.npz")
    if spec.inputs[0] == 1:
        if not (raw == raw[..., :1]).all():
            raise DataError(f"{folder} holds coloured images, but the recipe's inputs have one channel.")
        raw = raw[..., :1]
    return {"x_train": raw, "y_train": np.array([known.index(name) for name in names])[labels]}


def _table(path: Path, spec: DataSpec) -> dict[str, Any]:
    """The rows of a table: its columns by the names of the recipe's, or in their order if these have none."""
    texts = with_categories(spec.columns) | set((*spec.label, LABEL) if spec.names else ())
    table = _frame(path, texts)
    label = _label(table, spec, path)
    y = _labels(table[label if len(label) > 1 else label[0]], spec, path)
    columns = table.drop(columns=label)
    if not spec.columns:
        return {"x_train": _in_order(columns, path), "y_train": y}
    return {"x_train": _by_name(columns, spec, path), "y_train": y, SCALED: True}


def _frame(path: Path, texts: Collection[str] = ()) -> Any:
    """A table with rows, its columns named by texts."""
    table = read_frame(path, texts)
    if not len(table):
        raise DataError(f"{path} has no training samples.")
    return table.set_axis([str(name) for name in table.columns], axis=1)


def _whole(table: Any, path: Path) -> None:
    """Raise a ``DataError`` if columns of texts lack values, or those of numbers have NaN or infinity."""
    numbers = table.select_dtypes(["number", "bool"])
    for name in table.columns.difference(numbers.columns):
        complete([table[name]], f"{path}: column {name!r}")
    x = torch.from_numpy(np.array(numbers, np.float32))
    _made(x, torch.zeros(len(table), dtype=torch.int64), "train", str(path), 1)


def _label(table: Any, spec: DataSpec, path: Path) -> list[str]:
    """The columns of the labels: those that the recipe names, or ``label``."""
    if spec.label and set(spec.label) <= set(table.columns):
        return list(spec.label)
    inputs = {*spec.columns, *with_categories(spec.columns)}
    if LABEL in table.columns and LABEL not in inputs:
        return [LABEL]
    lost = [name for name in spec.label or (LABEL,) if name not in table.columns]
    raise DataError(f"{path} has no column {', '.join(map(repr, lost))} of labels; it has {', '.join(table.columns)}.")


def _labels(column: Any, spec: DataSpec, path: Path) -> np.ndarray:
    """Targets as numbers: names of classes become theirs, and whole numbers real ones if the recipe's are."""
    y = np.array(column)
    if spec.numeric:
        return y.astype(np.float32) if y.dtype.kind in "iub" else y
    if not spec.names:
        return y
    complete([column], f"{path}: column {column.name!r}")
    texts = column.astype(str).to_numpy(str)
    if not set(texts) <= set(spec.names) and all(map(str.isdecimal, texts)):
        return texts.astype(np.int64)  # class numbers
    try:
        return numbered(texts, spec.names)
    except DataError as error:
        raise DataError(f"{path}: column {column.name!r}: {error}") from error


def _by_name(table: Any, spec: DataSpec, path: Path) -> np.ndarray:
    """The inputs [N, D] in the recipe's columns and scale; further columns are ignored."""
    lost = [
        name for name in spec.columns
        if name not in table.columns and not any(name.startswith(f"{column}=") for column in table.columns)
    ]  # fmt: skip
    if lost:
        names = ", ".join(map(repr, dict.fromkeys(name.partition("=")[0] for name in lost)))
        raise DataError(
            f"{path} has no column {names}, which the recipe's data have; it has {', '.join(table.columns) or 'none'}."
        )
    try:
        return in_columns(table, spec.columns, spec.standardised or None)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _in_order(table: Any, path: Path) -> np.ndarray:
    """All columns as inputs [N, D], in their order."""
    import pandas as pd

    if text := [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]:
        raise DataError(f"{path}: column {text[0]!r} holds no numbers.")
    return np.array(table, np.float32)


def _loaded(place: str) -> dict[str, Any]:
    module, _, name = place.partition(":")
    try:
        data = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise DataError(f"--data {place} cannot be loaded: {type(error).__name__}: {in_one_line(error)}.") from error
    if not isinstance(data, Mapping):
        raise DataError(f"--data {place} returned {in_words(data)}, but it must return a mapping of arrays.")
    return {key: value.detach().cpu().numpy() if isinstance(value, Tensor) else value for key, value in data.items()}
