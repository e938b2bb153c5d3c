"""A node's own data: read from its files, and checked against what a recipe expects before the node joins."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedloom.base.checks import all_hold
from fedloom.base.errors import DataError, in_one_line, in_words
from fedloom.base.ranges import Count, Probability, Range, check_ranges
from fedloom.base.rng import stream
from fedloom.core.federation import Arrays, Index
from fedloom.data.columns import complete, is_frame
from fedloom.data.like import in_units, inputs_like, labelled_like, targets_of, with_categories
from fedloom.data.sources.arrays import as_array, by_class, inputs, read_images, targets
from fedloom.data.sources.files import read_npz
from fedloom.data.sources.table import read_frame
from fedloom.data.split import split_rows
from fedloom_apps.deploy.wire import is_count, is_number

TABLES = (".csv", ".parquet")
SCALE = ("columns", "mean", "deviation")  # what a specification says of it
SCALED = "scaled"  # the name under which arrays say that they are standardised already
LABEL = "label"  # the column of the labels, unless the recipe names another
LOADER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
FOR = {"train": "training", "validation": "validation", "test": "tests"}
SPLITS = tuple(FOR)
SLACK = 1e-6  # of the range of inputs, for rounding
NUMBERS, CLASSES = 1 << 24, 1 << 20  # of one input or target


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
        crop: whether files of images keep their aspect ratio, and their centre is cut out, as for ``data=folder``.

    Raises:
        ConfigError: if no data could fulfil it.
    """

    inputs: tuple[Count, ...]
    classes: Annotated[int, Range(1, CLASSES)]
    numeric: bool = False
    targets: tuple[Count, ...] = ()
    integer: bool = False
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    range: tuple[float, float] | None = None
    validation: Probability = 0.0
    held_out: Probability = 0.2
    columns: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    standardised: Mapping[str, Any] = field(default_factory=dict)
    crop: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, "a data specification: ")
        size = prod(self.inputs)
        conditions = {
            f"inputs must have 1 to {NUMBERS:,} numbers": bool(self.inputs) and size <= NUMBERS,
            f"targets must have at most {NUMBERS:,} numbers": prod(self.targets) <= NUMBERS,
            "names must have one entry per class": len(self.names) in (0, self.classes),
            "mean and std must have a finite entry per channel, those of std positive": (
                len(self.mean) == len(self.std) in (0, *self.inputs[:1])
                and all(map(is_number, (*self.mean, *self.std)))
                and all(s > 0 for s in self.std)
            ),
            "range must be two finite numbers, the least first": (
                self.range is None or (all(map(is_number, self.range)) and self.range[0] <= self.range[1])
            ),
            "validation and held_out must leave something to train on": self.validation + self.held_out < 1,
            "columns must have one name per input": len(self.columns) in (0, size),
            "standardised must have columns, a mean and a positive deviation for each": (
                not self.standardised or _is_scale(self.standardised, size)
            ),
        }
        all_hold("a data specification: ", conditions)

    @property
    def table(self) -> dict[str, Any]:
        """The columns and scale of the server's data, as ``fedloom.data.like`` takes them."""
        settings = {"columns": self.columns, "standardised": self.standardised}
        return {key: value for key, value in settings.items() if value}

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


def _is_scale(numbers: Mapping[str, Any], size: int) -> bool:
    """Whether a mapping has the numbers by which some of ``size`` columns are scaled, see ``rescaled``."""
    columns, mean, deviation = (numbers.get(name, ()) for name in SCALE)
    if numbers.keys() != {*SCALE} or not all(isinstance(listed, list | tuple) for listed in (columns, mean, deviation)):
        return False
    return (
        len(columns) == len(mean) == len(deviation)
        and all(is_count(column) and column < size for column in columns)
        and all(map(is_number, mean))
        and all(is_number(value, 0.0) and value > 0 for value in deviation)
    )


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

    @cached_property
    def digest(self) -> str:
        """Tells these samples from any others."""
        hasher = hashlib.blake2b(digest_size=16)
        for arrays in (self.train, self.validation, self.test):
            for tensor in (arrays.x, arrays.y):
                hasher.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
                hasher.update(tensor.contiguous().numpy())
        return hasher.hexdigest()


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
    """
    path = Path(place).expanduser()
    if path.is_dir():
        arrays: Mapping[str, Any] = _images(path, spec)
    else:
        arrays = _table(path, spec) if path.suffix in TABLES else _read_arrays(path, place)
    return fit(arrays, spec, place, seed)


def check_readable(place: str) -> None:
    """Read a node's samples and check them as far as that needs no recipe; images are not opened.

    Which columns of a table are inputs and labels is the recipe's to say: all must be complete.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        by_class(path)
        return
    if path.suffix in TABLES:
        _check_complete(_frame(path), path)
        return
    arrays = _read_arrays(path, place)
    for split in _splits(arrays, place):
        with _naming(place, split):
            x, y = as_array(arrays[f"x_{split}"], "x"), targets(as_array(arrays[f"y_{split}"], "y"))
            pixels = x.dtype == np.uint8 and x.ndim in (3, 4)  # whose channels are the recipe's
            classes = 1 if y.is_floating_point() or not y.numel() else max(int(y.max()) + 1, 1)
            Arrays(torch.from_numpy(x) if pixels else inputs(x), y, classes)


def _read_arrays(path: Path, place: str) -> Mapping[str, Any]:
    """The arrays of a file or function by name."""
    if path.suffix == ".npz":
        optional = [SCALED, *(f"{kind}_{split}" for split in SPLITS[1:] for kind in "xy")]
        return read_npz(path, ["x_train", "y_train"], optional)
    if LOADER.fullmatch(place):
        return _call_loader(place)
    raise DataError(
        f"--data {place}: there is no such folder, and it is neither an npz, CSV or parquet file nor a Python "
        "function like package.module:function."
    )


def _splits(arrays: Mapping[str, Any], place: str) -> list[str]:
    """The splits that are there, each with inputs and targets."""
    splits = [name for name in SPLITS if name == "train" or {f"x_{name}", f"y_{name}"} & arrays.keys()]
    if missing := [f"{kind}_{name}" for name in splits for kind in "xy" if f"{kind}_{name}" not in arrays]:
        raise DataError(f"{place} lacks {' and '.join(missing)}.")
    if getattr(arrays["x_train"], "ndim", 1) and not len(arrays["x_train"]):
        raise DataError(f"{place} has no training samples.")
    return splits


@contextmanager
def _naming(place: str | Path, split: str) -> Iterator[None]:
    """Name the samples in a ``DataError``."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: in the samples for {FOR[split]}, {error}") from error


def fit(arrays: Mapping[str, Any], spec: DataSpec, place: str, seed: int = 0) -> NodeData:
    """The samples in the form that the recipe requires, split if they are not yet."""
    splits = {name: _arrays(arrays, name, spec, place) for name in _splits(arrays, place)}
    train = splits["train"]
    shares = [0.0 if name in splits else share for name, share in (("validation", spec.validation),
                                                                   ("test", spec.held_out))]  # fmt: skip
    labels = train.y.numpy() if not spec.numeric and train.y.ndim == 1 else np.zeros(len(train), np.int64)
    all_rows = Index.of([np.arange(len(train))])
    rows = split_rows(all_rows, labels, shares[0], shares[1], stream(seed, "split"))
    parts = [train.take(part.rows) for part in rows]
    return NodeData(parts[0], splits.get("validation", parts[1]), splits.get("test", parts[2]))


def placeholder(spec: DataSpec) -> Arrays:
    """Two samples of zeros, on which models are tried."""
    x = torch.zeros(2, *spec.inputs, dtype=torch.int64 if spec.integer else torch.float32)
    y = torch.zeros(2, *spec.targets, dtype=torch.float32 if spec.numeric else torch.int64)
    return Arrays(x, y, spec.classes, spec.names, spec.mean, spec.std)


def _arrays(arrays: Mapping[str, Any], split: str, spec: DataSpec, place: str) -> Arrays:
    """The samples of a split in the form of the recipe's."""
    like, x, y = placeholder(spec), arrays[f"x_{split}"], arrays[f"y_{split}"]
    with _naming(place, split):
        x = x if is_frame(x) else as_array(x, "x")
        if x.ndim and not len(x) and not np.size(y):
            return like.take(np.arange(0))
        if not is_frame(x) and not bool(arrays.get(SCALED)):
            if spec.standardised and spec.columns:
                raise DataError(
                    "columns have no names, but the recipe standardises them; give a CSV or parquet table with the "
                    "columns of the server's."
                )
            x = in_units({"x": x}, like, spec.table)["x"]
        samples = labelled_like(like, inputs_like(like, spec.table, x), y)
        if spec.range is not None and samples.x.numel():
            low, high = spec.range
            slack, least, most = SLACK * (high - low), float(samples.x.min()), float(samples.x.max())
            if least < low - slack or most > high + slack:
                raise DataError(
                    f"inputs have values from {least:g} to {most:g}, but the recipe's lie between {low:g} and {high:g}."
                )
    return samples


def _images(folder: Path, spec: DataSpec) -> dict[str, np.ndarray]:
    if len(spec.inputs) != 3 or spec.inputs[1] != spec.inputs[2]:
        raise DataError(f"{folder} holds images, but the recipe's inputs are {list(spec.inputs)}.")
    paths, labels, names = by_class(folder)
    class_names = spec.names or tuple(map(str, range(spec.classes)))
    if unknown_names := [name for name in names if name not in class_names]:
        raise DataError(f"{folder} has a class {unknown_names[0]!r}, but the recipe's are {', '.join(class_names)}.")
    raw = read_images(str(folder), paths, spec.inputs[1], folder / ".fedloom-images.npz", crop=spec.crop)
    if spec.inputs[0] == 1:
        if not (raw == raw[..., :1]).all():
            raise DataError(f"{folder} holds coloured images, but the recipe's inputs have one channel.")
        raw = raw[..., :1]
    return {"x_train": raw, "y_train": np.array([class_names.index(name) for name in names])[labels]}


def _table(path: Path, spec: DataSpec) -> dict[str, Any]:
    """The rows of a table: its columns by the names of the recipe's, or in their order if these have none."""
    texts = with_categories(spec.columns) | set((*spec.label, LABEL) if spec.names else ())
    table = _frame(path, texts)
    label = _label(table, spec, path)
    with _naming(path, "train"):
        y, x = targets_of(table, label, spec.names), table.drop(columns=label)
    if spec.columns:
        return {"x_train": x, "y_train": y}
    if text := [*x.select_dtypes(exclude=["number", "bool"])]:
        raise DataError(f"{path}: column {text[0]!r} holds no numbers.")
    return {"x_train": np.array(x, np.float32), "y_train": y}


def _frame(path: Path, texts: Collection[str] = ()) -> Any:
    """A table with rows, its columns named by texts."""
    table = read_frame(path, texts)
    if not len(table):
        raise DataError(f"{path} has no training samples.")
    return table.set_axis([str(name) for name in table.columns], axis=1)


def _check_complete(table: Any, path: Path) -> None:
    """Raise a ``DataError`` if columns of texts lack values, or those of numbers have NaN or infinity."""
    numbers = table.select_dtypes(["number", "bool"])
    with _naming(path, "train"):
        for name in table.columns.difference(numbers.columns):
            complete([table[name]], f"column {name!r}")
        Arrays(torch.from_numpy(np.array(numbers, np.float32)), torch.zeros(len(table), dtype=torch.int64), 1)


def _label(table: Any, spec: DataSpec, path: Path) -> list[str]:
    """The columns of the labels: those that the recipe names, or ``label``."""
    if spec.label and set(spec.label) <= set(table.columns):
        return list(spec.label)
    inputs = {*spec.columns, *with_categories(spec.columns)}
    if LABEL in table.columns and LABEL not in inputs:
        return [LABEL]
    lost = [name for name in spec.label or (LABEL,) if name not in table.columns]
    raise DataError(f"{path} has no column {', '.join(map(repr, lost))} of labels; it has {', '.join(table.columns)}.")


def _call_loader(place: str) -> dict[str, Any]:
    module, _, name = place.partition(":")
    try:
        data = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise DataError(f"--data {place} cannot be loaded: {type(error).__name__}: {in_one_line(error)}.") from error
    if not isinstance(data, Mapping):
        raise DataError(f"--data {place} returned {in_words(data)}, but it must return a mapping of arrays.")
    return {key: value.detach().cpu().numpy() if isinstance(value, Tensor) else value for key, value in data.items()}
