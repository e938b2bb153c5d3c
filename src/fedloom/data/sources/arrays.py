"""User data: arrays in memory or in an npz file."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedloom.core.errors import DataError, outside
from fedloom.core.federation import Arrays
from fedloom.data.sources.base import Source, natural_clients, sources
from fedloom.data.sources.formats import read_npy_folder, read_npz
from fedloom.data.sources.images import as_stored
from fedloom.data.sources.scale import standardised, warn_of_pixels

CLASSES = 1_000_000
CHANNELS = (1, 3, 4)
"""Numbers of channels of images."""


@sources.register
def npz(path: str | Path, classes: int | None = None, standardise: bool = False) -> Source:
    """Any npz file with ``x_train`` and ``y_train``, or a folder of npy files with these names.

    Files of a folder are memory-mapped: only what is used is read, so that inputs (float32 or int64) may be larger than
    memory. Optional are ``x_test`` and ``y_test``, ``client_train`` and ``client_test`` (the natural client of each
    sample, as a number or name) and ``names`` (of the classes). uint8 arrays [N, H, W] or [N, H, W, C] are
    images and become float32 [N, C, H, W] in 0..1; other floats become float32, other integers int64.

    Args:
        path: the file or folder.
        classes: number of classes; by default the largest label plus one.
        standardise: whether inputs [N, D] are scaled, column by column, by the mean and deviation of all training
            samples together, which a federation of real clients would have to compute jointly.
    """
    optional = ["x_test", "y_test", "client_train", "client_test", "names"]
    home = Path(path).expanduser()
    found = (read_npy_folder if home.is_dir() else read_npz)(home, ["x_train", "y_train"], optional)
    made = from_tensors(
        found["x_train"],
        found["y_train"],
        x_test=found.get("x_test"),
        y_test=found.get("y_test"),
        classes=classes,
        clients=found.get("client_train"),
        clients_test=found.get("client_test"),
        names=[str(name) for name in np.ravel(found.get("names", ()))],
        name=Path(path).stem,
        settings={"path": str(path)},
    )
    return standardised(made) if standardise else made


def names_clients(path: Path) -> bool:
    """Whether a file or folder for ``npz`` has the client of each training sample; only names of arrays are read."""
    if path.is_dir():
        return (path / "client_train.npy").is_file()
    try:
        with zipfile.ZipFile(path) as file:
            return "client_train.npy" in file.namelist()
    except Exception:  # not a zip file; reading the arrays raises the error
        return False


def from_tensors(
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    x_test: Tensor | np.ndarray | None = None,
    y_test: Tensor | np.ndarray | None = None,
    classes: int | None = None,
    clients: ArrayLike | None = None,
    clients_test: ArrayLike | None = None,
    names: Sequence[str] = (),
    name: str = "tensors",
    licence: str = "not stated",
    citation: str = "",
    settings: dict[str, Any] | None = None,
) -> Source:
    """Make a source of the given arrays.

    Args:
        x: inputs [N, ...]; NumPy arrays uint8 [N, H, W] or [N, H, W, C] are images, as in ``npz``.
        y: class numbers [N], or real targets [N, ...].
        x_test: inputs of the common test set, if any.
        y_test: targets of the common test set.
        classes: number of classes; by default the number of names, or the largest label plus one.
        clients: natural client of each sample, as a number or name.
        clients_test: the same for the test samples.
        names: names of the classes.
        name: name of the source in captions and provenance.
        licence: terms of use.
        citation: BibTeX.
        settings: further provenance, as plain data.

    Raises:
        DataError: if numbers of samples, shapes, labels or clients do not fit together.

    >>> source = from_tensors(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]), clients=["ann", "bob", "ann", "ann"])
    >>> source.group_names, source.groups.tolist(), len(source.test)
    (('ann', 'bob'), [0, 1, 0, 0], 0)
    """
    if (x_test is None) != (y_test is None):
        lacks, there = ("x_test", "y_test") if x_test is None else ("y_test", "x_test")
        raise DataError(f"{name}: there is {there} but no {lacks}; give both or neither.")
    x, y = inputs(x, f"{name}: x_train"), targets(y, f"{name}: y_train")
    u, v = (x[:0], y[:0])
    if x_test is not None and y_test is not None:
        u, v = inputs(x_test, f"{name}: x_test", warn=False), targets(y_test, f"{name}: y_test")
    numbered = classes is None and not names and y.ndim == 1 and y.numel() > 0 and not y.is_floating_point()
    if classes is None:
        largest = -1 if y.is_floating_point() or not y.numel() else int(max(y.max(), v.max() if v.numel() else -1))
        classes = len(names) or largest + 1 or 1
    if not 1 <= classes <= CLASSES:
        raise DataError(
            f"{name}: there would be {classes:,} classes, each with an output of the model, but there may be 1 to "
            f"{CLASSES:,}; number them from 0 on."
        )
    if numbered:
        _warn_of_gaps(y, classes, name)
    warn_of_pixels(x, name)
    for ids in (clients, clients_test):
        if ids is not None and np.asarray(ids).dtype.kind == "f" and np.isnan(np.asarray(ids)).any():
            raise DataError(f"{name}: some samples have NaN for their client; give each a number or a name.")
    train, test = (Arrays(a, b, classes, tuple(names)) for a, b in ((x, y), (u, v)))
    if not (y.is_floating_point() or v.is_floating_point()) and y.ndim == v.ndim == 1:
        _check_test_classes(y, v, names, name)
    groups = {} if clients is None else natural_clients(clients, clients_test)
    return Source(name, train, test, licence, citation, **groups, settings=settings or {})


def _warn_of_gaps(y: Tensor, classes: int, name: str) -> None:
    """Warn of class numbers [N] that begin above 0, or of which fewer than half have samples: each costs an output."""
    used = len(y.unique())
    if int(y.min()) > 0 or 2 * used < classes:
        warnings.warn(
            f"{name}: labels are class numbers from 0 on, but of 0 to {classes - 1} only {used} have samples, and a "
            f"model made by its name has an output for all {classes}; number the classes from 0 on without gaps, or "
            "give their names as labels.",
            stacklevel=outside(),
        )


def _check_test_classes(y: Tensor, v: Tensor, names: Sequence[str], name: str) -> None:
    """Warn of classes that test samples [M] have and training samples [N] lack, by name; refuse if these share none."""
    known, tested = set(y.unique().tolist()), set(v.unique().tolist())
    if not (lacking := sorted(tested - known)) or not known:
        return
    shown = ", ".join(repr(names[label]) if names else str(label) for label in lacking[:5])
    told = f"{name}: only test samples have the {'class' if len(lacking) == 1 else 'classes'} {shown}"
    told += f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
    if not tested & known:
        raise DataError(f"{told}, and no training sample has a class of the test set; give both the same labels.")
    warnings.warn(
        f"{told}, which no model can learn from the training samples; write the labels of both alike, or leave those "
        "samples out.",
        stacklevel=outside(),
    )


def inputs(x: Tensor | np.ndarray, what: str = "x", warn: bool = True) -> Tensor:
    """Inputs as models take them: images [N, C, H, W] in 0..1, floats as float32, integers as int64.

    Within ``images.as_bytes``, images stay bytes. ``warn`` tells of images whose channels seem to be last.

    Raises:
        DataError: for arrays without numbers or rows; ``what`` names them.
    """
    x = x.detach() if isinstance(x, Tensor) else as_array(x, what)
    if x.ndim in (3, 4) and x.dtype in (np.uint8, torch.uint8):
        raw = x.cpu().numpy() if isinstance(x, Tensor) else x
        if raw.ndim == 4 and raw.shape[-1] not in CHANNELS and raw.shape[1] in CHANNELS:
            raw = raw.transpose(0, 2, 3, 1)
        if raw.ndim == 3 or raw.shape[-1] in CHANNELS:
            return as_stored(raw)
    x = numbers(x, what)
    if x.ndim > 2 and not x.is_floating_point() and x.dtype != torch.bool:
        raise DataError(
            f"{what} holds whole numbers of shape {list(x.shape)}; give images as bytes, uint8 [N, H, W] or "
            "[N, H, W, C], or as float32 in 0..1."
        )
    if warn and x.ndim == 4 and x.shape[1] == x.shape[2] > max(CHANNELS) and x.shape[3] in CHANNELS:
        warnings.warn(
            f"{what} holds samples of shape {list(x.shape[1:])}, which look like images with their channels last, but "
            "convolutional models take them first; give x.transpose(0, 3, 1, 2), or bytes (uint8) in this order.",
            stacklevel=outside(),
        )
    made = x.to(torch.float32 if x.is_floating_point() else torch.int64)
    if x.dtype == torch.float64 and bool(torch.isinf(made).any()) and bool(torch.isfinite(x).all()):
        raise DataError(f"{what} holds numbers beyond float32, up to {float(x.abs().max()):.1e}; scale them.")
    return made


def as_array(value: Any, what: str) -> np.ndarray:
    """A value of someone's as one array; ``what`` names it in errors.

    >>> as_array([[1.0, 2.0], [3.0]], "x")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.DataError: x holds arrays of different shapes, or under names; pad or join them to one array ...

    Raises:
        DataError: if it is several, or some of its values are masked.
    """
    if np.ma.is_masked(value):
        lost = int(np.ma.count_masked(value))
        raise DataError(f"{what} has {lost} masked values; fill them in, or drop the samples that lack them.")
    try:
        if not isinstance(value, Mapping):
            return np.asarray(value)
    except ValueError:  # of different shapes
        pass
    raise DataError(
        f"{what} holds arrays of different shapes, or under names; pad or join them to one array per sample, which the "
        "model takes apart again."
    )


def targets(y: Tensor | np.ndarray, what: str = "y") -> Tensor:
    """Class numbers as int64, real targets as float32, all of them finite.

    Raises:
        DataError: for anything else; ``what`` names it.
    """
    y = numbers(y, what)
    y = y.to(torch.float32 if y.is_floating_point() else torch.int64)
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise DataError(f"{what} holds NaN, infinity or numbers beyond float32.")
    return y


def numbers(array: Tensor | np.ndarray, what: str) -> Tensor:
    """A user's array as a tensor.

    >>> numbers(np.array(["cat", "dog"]), "y_train")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.DataError: y_train holds text (<U3), but only numbers and truth values will do.

    Raises:
        DataError: if it is a single number, or does not hold real numbers.
    """
    if isinstance(array, Tensor):
        if array.layout is not torch.strided:
            raise DataError(f"{what} is a sparse tensor; give a dense one, {what.rpartition(' ')[2]}.to_dense().")
        kind, shown = ("c" if array.is_complex() else "f"), str(array.dtype)
    else:
        array = as_array(array, what)
        kind, shown = array.dtype.kind, str(array.dtype)
    if kind not in "buif":
        told = {"U": "text", "S": "text", "O": "Python objects", "c": "complex numbers"}.get(kind, "no plain numbers")
        raise DataError(f"{what} holds {told} ({shown}), but only numbers and truth values will do.")
    if array.ndim == 0:
        raise DataError(f"{what} is a single number, but it must have a row for each sample.")
    if isinstance(array, np.ndarray):
        if kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
            raise DataError(f"{what} holds numbers beyond 64-bit integers.")
        if kind == "f" and array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        with warnings.catch_warnings():  # a read-only array, such as a file in memory, is only read
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            array = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)))
    return array
