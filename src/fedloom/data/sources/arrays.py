"""User data as arrays and images: in memory, in an npz file, or in folders with one sub-folder per class.

Image files are decoded, and bytes converted to normalised tensors. Columns of very different scale and images of large
values lead to warnings; columns can be standardised.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedloom.base.errors import DataError, import_extra, nearest, user_stacklevel
from fedloom.base.files import check_memory, memory_map, readable_path, whole_file, writing
from fedloom.base.ranges import Count
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.files import cached, moments, read_npy_folder, read_npz, reading, stamp_of, with_progress

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
_BYTES: ContextVar[bool] = ContextVar("images stay bytes", default=False)


@contextmanager
def as_bytes() -> Iterator[None]:
    """Make data sources leave images as bytes, uint8 [N, C, H, W], for readers that convert them by mini-batch.

    ``normalised`` then gives what the source would have given, bit for bit.
    """
    token = _BYTES.set(True)
    try:
        yield
    finally:
        _BYTES.reset(token)


def as_stored(raw: np.ndarray, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """Images as a source keeps them: ``to_images``, or within ``as_bytes`` the same bytes as [N, C, H, W], not copied.

    >>> with as_bytes():
    ...     as_stored(np.array([[[0, 255]]], np.uint8)).tolist()
    [[[[0, 255]]]]
    """
    if not _BYTES.get():
        return to_images(raw, mean, std)
    with warnings.catch_warnings():  # a file that is mapped into memory is only read
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(_planes(raw)).permute(0, 3, 1, 2)


def normalised(x: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """Bytes of images, uint8 [N, C, H, W], as float32 in 0..1, then (x - mean) / std per channel if given.

    >>> normalised(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), [0.5], [0.5]).tolist()
    [[[[-1.0, 1.0]]]]
    """
    return _scaled(x.to(torch.float32), mean, std)


def to_images(raw: np.ndarray, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """uint8 [N, H, W] or [N, H, W, C] to float32 [N, C, H, W] in 0..1, then (x - mean) / std per channel if given.

    No memory beyond the result is allocated.

    >>> to_images(np.array([[[0, 255]]], np.uint8)).tolist()
    [[[[0.0, 1.0]]]]
    >>> to_images(np.array([[[0, 255]]], np.uint8), mean=[0.5], std=[0.5]).tolist()
    [[[[-1.0, 1.0]]]]
    """
    planes = _planes(raw)
    n, h, w, channels = planes.shape
    x = torch.empty(n, channels, h, w)
    for c in range(channels):
        np.copyto(x[:, c].numpy(), planes[..., c], casting="unsafe")
    return _scaled(x, mean, std)


def _planes(raw: np.ndarray) -> np.ndarray:
    """Images as uint8 [N, H, W, C]."""
    if raw.dtype != np.uint8 or raw.ndim not in (3, 4):
        raise DataError(f"images must be uint8 [N, H, W] or [N, H, W, C], not {raw.dtype} {list(raw.shape)}.")
    return raw[..., None] if raw.ndim == 3 else raw


def _scaled(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels 0..255 [N, C, H, W] to 0..1, then normalised per channel, in place."""
    x.div_(255)
    if mean:
        x.sub_(x.new_tensor(mean)[:, None, None]).div_(x.new_tensor(std)[:, None, None])
    return x


def image_arrays(
    raw: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    normalise: bool,
    mean: Sequence[float],
    std: Sequence[float],
) -> Arrays:
    """Labelled images of one split; ``names`` are the classes.

    Raises:
        DataError: if images are not bytes with as many channels as ``mean``, or labels are not one class number each.
    """
    mean, std = (tuple(mean), tuple(std)) if normalise else ((), ())
    if mean and _planes(raw).shape[3] != len(mean):
        raise DataError(f"images must have {len(mean)} channels, the last axis, but their shape is {list(raw.shape)}.")
    return Arrays(as_stored(raw, mean, std), class_labels(labels, "labels"), len(names), tuple(names), mean, std)


def class_labels(labels: Any, what: str) -> Tensor:
    """Class numbers of samples, int64 [N], given as [N] or [N, 1]; a ``DataError`` for anything else."""
    y = targets(labels, what)
    if y.is_floating_point() or y.ndim != 1:
        raise DataError(f"{what} must be one whole number for each sample, not {y.dtype} of shape {list(y.shape)}.")
    return y


def folders_in(folder: Path) -> list[str]:
    """The names of a folder's folders, sorted, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")


def by_class(folder: Path, inner: str = "") -> tuple[list[Path], np.ndarray, list[str]]:
    """Image paths, class numbers [N] and class names of a folder with one sub-folder per class, in order of names.

    Args:
        folder: contains the classes' folders.
        inner: sub-folder of a class's folder that holds its images, if any.
    """
    names = folders_in(folder)
    if not names:
        raise DataError(f"{folder} holds no folders, but there should be one for each class.")
    files = []
    for home in (folder / name / inner for name in names):
        if not home.is_dir():
            raise DataError(f"{home.parent} has no folder {inner!r}.")
        paths = sorted(e.name for e in os.scandir(home) if e.name.lower().endswith(SUFFIXES) and e.name[0] != ".")
        if not paths:
            raise DataError(f"{home} holds no images ({', '.join(SUFFIXES)}).")
        files.append([home / path for path in paths])
    return [path for paths in files for path in paths], np.repeat(np.arange(len(files)), list(map(len, files))), names


def read_images(
    title: str, paths: Sequence[Path], size: int | None, cache: Path, *, crop: bool = False, resize: bool = True
) -> np.ndarray:
    """Image files as one array uint8 [N, size, size, 3], decoded once and cached.

    Args:
        title: name of the data set in the progress bar and in errors.
        paths: the files.
        size: height and width in pixels.
        cache: npz file for the decoded images, renewed if the files or the size change.
        crop: whether to keep the aspect ratio and cut out the centre; otherwise both sides are scaled to ``size``.
        resize: whether images of another size are resized or rejected.
    """
    if not size or size < 1:
        raise DataError(f"{title}: images need a size of at least 1 pixel, not {size}.")
    check_memory(title, (1 if _BYTES.get() else 5) * len(paths) * size * size * 3)
    if lost := next((path for path in paths if not path.is_file()), None):
        raise DataError(f"{title} is incomplete: there is no file {lost}.")

    def make() -> np.ndarray:
        array = np.empty((len(paths), size, size, 3), np.uint8)
        for row, path in enumerate(with_progress(paths, title)):
            array[row] = read_image(path, size, crop, resize)
        return array

    return cached(cache, stamp_of(paths, size, crop), make)


def in_bytes(picture: Any) -> Any:
    """Convert a PIL image of 16 bits per pixel to 8, where PIL itself would clip; others are unchanged."""
    if picture.mode == "F":
        which = getattr(picture, "filename", None) or "an image"
        raise DataError(
            f"{which} has floats for pixels, whose range is not known; save it with 8 or 16 bits per pixel."
        )
    if not picture.mode.startswith("I"):
        return picture
    from PIL import Image

    return Image.fromarray((np.asarray(picture).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))


def read_image(path: Path, size: int, crop: bool = False, resize: bool = True) -> np.ndarray:
    """One image as RGB, uint8 [size, size, 3]."""
    Image = import_extra("images", "PIL.Image", "a folder of images")
    with reading(path, "is damaged or not an image"), Image.open(readable_path(path)) as file:
        wide, high = file.size
        if (wide, high) != (size, size) and not resize:
            raise DataError(f"{path} is {wide} by {high} pixels, but {size} by {size} are expected.")
        picture = in_bytes(file).convert("RGB")
        if crop and wide != high:
            scale = size / min(wide, high)
            sides = max(size, round(wide * scale)), max(size, round(high * scale))
            left, top = (sides[0] - size) // 2, (sides[1] - size) // 2
            picture = picture.resize(sides).crop((left, top, left + size, top + size))
        elif picture.size != (size, size):
            picture = picture.resize((size, size))
        return np.asarray(picture)


LARGE, APART = 10, 100
"""Root mean square of a column, and the ratio of two columns' deviations, above which training suffers."""
MILD, ENOUGH = 3, 16
"""Root mean square of images up to which single large values are outliers, and the number of images looked at."""


def standardised(source: Source, columns: Sequence[int] | None = None) -> Source:
    """A source with columns scaled by the mean and deviation of the pooled training rows; constant ones become 0.

    Test rows are scaled by the same numbers, which are kept in ``settings["standardised"]`` for later inputs.
    """
    x = source.train.x
    if x.ndim != 2:
        raise DataError(
            f"{source.name}: standardise=true is for samples of plain numbers [D], not of shape {list(x.shape[1:])}; "
            "leave it out."
        )
    if not len(x):
        raise DataError(f"{source.name}: standardise=true needs training samples, and there are none; leave it out.")
    scalable = list(range(x.shape[1]) if columns is None else columns)
    mean, deviation = moments(x.numpy()[:, scalable].astype(np.float64))
    numbers = {"columns": scalable, "mean": mean.tolist(), "deviation": deviation.tolist()}

    def scaled(arrays: Arrays) -> Arrays:
        return replace(arrays, x=torch.from_numpy(rescaled(arrays.x.numpy(), numbers)))

    settings = {**source.settings, "standardised": numbers}
    validation = source.validation and scaled(source.validation)
    return replace(
        source, train=scaled(source.train), test=scaled(source.test), validation=validation, settings=settings
    )


def rescaled(table: np.ndarray, numbers: Mapping[str, Any]) -> np.ndarray:
    """A table [N, D] with some ``columns`` scaled by their ``mean`` and ``deviation``, as float32.

    >>> rescaled(np.array([[5.0, 1.0]]), {"columns": [0], "mean": [3.0], "deviation": [2.0]}).tolist()
    [[1.0, 1.0]]
    """
    table, columns = table.astype(np.float64), list(numbers["columns"])
    table[:, columns] = (table[:, columns] - numbers["mean"]) / numbers["deviation"]
    return table.astype(np.float32)


def warn_of_scales(source: Source, names: Sequence[str], columns: Sequence[int]) -> None:
    """Warn if a column of numbers is far from mean 0 and deviation 1, or much wider than another."""
    table = source.train.x.numpy()[:, list(columns)].astype(np.float64)
    mean, deviation = table.mean(0), table.std(0)
    varied = np.flatnonzero(np.ptp(table, 0) > 0)
    if not len(varied):
        return
    size = np.hypot(mean, deviation)
    largest = int(varied[size[varied].argmax()])
    if size[largest] > LARGE or deviation[varied].max() > APART * deviation[varied].min():
        warnings.warn(
            f"{source.name}: column {names[columns[largest]]!r} has mean {mean[largest]:.3g} and standard deviation "
            f"{deviation[largest]:.3g}, with which models train poorly; data.standardise=true (standardise=True in "
            "Python) scales all columns of numbers.",
            stacklevel=user_stacklevel(),
        )


def warn_of_pixels(x: Tensor, name: str) -> None:
    """Warn if inputs of two or more axes, such as images [N, C, H, W], hold large values; only some are read."""
    if x.ndim < 3 or not x.is_floating_point() or not x.numel():
        return
    sample = x[:: -(-len(x) // ENOUGH)]
    if float(sample.abs().max()) > LARGE and float(sample.square().mean()) > MILD**2:
        warnings.warn(
            f"{name}: samples of shape {list(x.shape[1:])} hold values up to {float(sample.max()):.3g}, with which "
            "models train poorly; give images as 8-bit pixels (uint8), or scale them to 0..1, as dividing by 255 does.",
            stacklevel=user_stacklevel(),
        )


CLASSES = 1_000_000
CHANNELS = (1, 3, 4)
"""Numbers of channels of images."""


MEDMNIST = {
    f"{kind}_{part}": f"{name}_{title}"
    for kind, title in (("x", "images"), ("y", "labels"))
    for part, name in (("train", "train"), ("validation", "val"), ("test", "test"))
}


@sources.register
def npz(
    path: str | Path, classes: int | None = None, shape: tuple[Count, ...] = (), standardise: bool = False
) -> Source:
    """Any npz file with ``x_train`` and ``y_train``, or a folder of npy files with these names.

    Files of a folder are memory-mapped: only what is used is read, so that inputs (float32 or int64) may be larger than
    memory. Optional are ``x_test`` and ``y_test``, ``x_validation`` and ``y_validation``, ``client_train``,
    ``client_test`` and ``client_validation`` (the natural client of each sample, as a number or name) and ``names`` (of
    the classes). MedMNIST's names are read, too: ``train_images``, ``train_labels`` and so on. A warning names an
    array like ``x_val`` that is not read. uint8 arrays [N, H, W] or [N, H, W, C] are images and become float32
    [N, C, H, W] in 0..1; other floats become float32, other integers int64.

    Args:
        path: the file or folder.
        classes: number of classes; by default the largest label plus one.
        shape: the shape of one sample, like [28,28], where inputs are stored as rows of numbers.
        standardise: whether inputs [N, D] are scaled, column by column, by the mean and deviation of all training
            samples together, which a federation of real clients would have to compute jointly.
    """
    optional = [f"{kind}_{split}" for split in ("test", "validation") for kind in ("x", "y", "client")]
    home = Path(path).expanduser()
    read = read_npy_folder if home.is_dir() else read_npz
    try:
        arrays = read(home, ["x_train", "y_train"], [*optional, "client_train", "names"])
    except DataError as error:
        try:
            medmnist = read(home, [MEDMNIST["x_train"], MEDMNIST["y_train"]], list(MEDMNIST.values()))
        except DataError:
            raise error from None
        arrays = {key: medmnist[name] for key, name in MEDMNIST.items() if name in medmnist}
    for name in sorted(array_names(home) - arrays.keys()):
        if name.startswith(("x_", "y_", "client_")):
            hint = nearest(name, ["x_train", "y_train", "client_train", *optional])
            warnings.warn(f"{path}: the array {name!r} is not read; {hint}", stacklevel=user_stacklevel())
    arrays |= {key: shaped(array, shape, str(path)) for key, array in arrays.items() if key.startswith("x_")}
    splits: dict[str, Any] = {key.replace("client_", "clients_"): arrays[key] for key in optional if key in arrays}
    source = from_tensors(
        arrays["x_train"],
        arrays["y_train"],
        **splits,
        classes=classes,
        clients=arrays.get("client_train"),
        names=[str(name) for name in as_array(arrays.get("names", ()), f"{path}: names").ravel()],
        name=Path(path).stem,
        settings={"path": str(path), **({"shape": list(shape)} if shape else {})},
    )
    return standardised(source) if standardise else source


def shaped(x: np.ndarray, shape: Sequence[int], what: str) -> np.ndarray:
    """Rows of numbers [N, ...] as samples of the given shape; unchanged for ().

    >>> shaped(np.zeros((3, 6)), (2, 3), "x").shape
    (3, 2, 3)
    """
    if not shape:
        return x
    if int(np.prod(x.shape[1:])) != int(np.prod(shape)):
        raise DataError(
            f"{what}: data.shape={list(shape)} is {int(np.prod(shape))} numbers, but a sample has "
            f"{int(np.prod(x.shape[1:]))}; give a shape of as many."
        )
    return x.reshape(*x.shape[:1], *shape)


def array_names(path: Path) -> set[str]:
    """The names of the arrays of a file or folder for ``npz``, without reading them."""
    if path.is_dir():
        return {file.stem for file in path.glob("*.npy")}
    try:
        with zipfile.ZipFile(path) as file:
            return {name.removesuffix(".npy") for name in file.namelist()}
    except Exception:  # not a zip file; reading the arrays raises the error
        return set()


def from_tensors(
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    x_test: Tensor | np.ndarray | None = None,
    y_test: Tensor | np.ndarray | None = None,
    x_validation: Tensor | np.ndarray | None = None,
    y_validation: Tensor | np.ndarray | None = None,
    classes: int | None = None,
    clients: ArrayLike | None = None,
    clients_test: ArrayLike | None = None,
    clients_validation: ArrayLike | None = None,
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
        x_validation: inputs for validation that are not training samples, if any.
        y_validation: their targets.
        classes: number of classes; by default the number of names, or the largest label plus one.
        clients: natural client of each sample, as a number or name.
        clients_test: the same for the test samples.
        clients_validation: the same for the validation samples.
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
    x, y = inputs(x, f"{name}: x_train"), targets(y, f"{name}: y_train")
    splits: dict[str, tuple[Tensor, Tensor]] = {}
    for split, a, b in (("test", x_test, y_test), ("validation", x_validation, y_validation)):
        if (a is None) != (b is None):
            lacks, there = ("x", "y") if a is None else ("y", "x")
            raise DataError(f"{name}: there is {there}_{split} but no {lacks}_{split}; give both or neither.")
        if a is not None and b is not None:
            splits[split] = inputs(a, f"{name}: x_{split}", warn=False), targets(b, f"{name}: y_{split}")
    numbered = classes is None and not names and y.ndim == 1 and y.numel() > 0 and not y.is_floating_point()
    if classes is None:
        labels = () if y.is_floating_point() or not y.numel() else (y, *(v for _, v in splits.values()))
        largest = max((int(v.max()) for v in labels if v.numel() and not v.is_floating_point()), default=-1)
        classes = len(names) or largest + 1 or 1
    if not 1 <= classes <= CLASSES:
        raise DataError(
            f"{name}: there would be {classes:,} classes, each with an output of the model, but there may be 1 to "
            f"{CLASSES:,}; number them from 0 on."
        )
    if numbered:
        _warn_of_gaps(y, classes, name)
    warn_of_pixels(x, name)
    owners = [
        None if ids is None else as_array(ids, f"{name}: clients")
        for ids in (clients, clients_test, clients_validation)
    ]
    if any(ids is not None and ids.dtype.kind == "f" and np.isnan(ids).any() for ids in owners):
        raise DataError(f"{name}: some samples have NaN for their client; give each a number or a name.")
    train, test = (Arrays(*pair, classes, tuple(names)) for pair in ((x, y), splits.get("test", (x[:0], y[:0]))))
    validation = Arrays(*splits["validation"], classes, tuple(names)) if "validation" in splits else None
    for split, (_, v) in splits.items():
        if not (y.is_floating_point() or v.is_floating_point()) and y.ndim == v.ndim == 1:
            _check_classes(y, v, names, name, split)
    groups = {} if owners[0] is None else natural_clients(owners[0], owners[1], validation=owners[2])
    return Source(name, train, test, licence, citation, **groups, settings=settings or {}, validation=validation)


def _warn_of_gaps(y: Tensor, classes: int, name: str) -> None:
    """Warn of class numbers [N] that begin above 0, or of which fewer than half have samples: each costs an output."""
    used = len(y.unique())
    if int(y.min()) > 0 or 2 * used < classes:
        warnings.warn(
            f"{name}: labels are class numbers from 0 on, but of 0 to {classes - 1} only {used} have samples, and a "
            f"model made by its name has an output for all {classes}; number the classes from 0 on without gaps, or "
            "give their names as labels.",
            stacklevel=user_stacklevel(),
        )


def _check_classes(y: Tensor, v: Tensor, names: Sequence[str], name: str, split: str) -> None:
    """Warn of classes that samples kept apart [M] have and training samples [N] lack; refuse if these share none."""
    trained, tested = set(y.unique().tolist()), set(v.unique().tolist())
    if not (lacking := sorted(tested - trained)) or not trained:
        return
    labels = ", ".join(repr(names[label]) if names else str(label) for label in lacking[:5])
    message = f"{name}: only {split} samples have the {'class' if len(lacking) == 1 else 'classes'} {labels}"
    message += f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
    if not tested & trained:
        raise DataError(f"{message}, and no training sample has a class of the {split} set; give both the same labels.")
    warnings.warn(
        f"{message}, which no model can learn from the training samples; give both the same labels, or leave those "
        "samples out.",
        stacklevel=user_stacklevel(),
    )


def inputs(x: Tensor | np.ndarray, what: str = "x", warn: bool = True) -> Tensor:
    """Inputs as models take them: images [N, C, H, W] in 0..1, floats as float32, integers as int64.

    Within ``as_bytes``, images stay bytes. ``warn`` tells of images whose channels seem to be last.
    """
    x = x.detach() if isinstance(x, Tensor) else as_array(x, what)
    if x.ndim in (3, 4) and x.dtype in (np.uint8, torch.uint8):
        raw = x.cpu().numpy() if isinstance(x, Tensor) else x
        if raw.ndim == 4 and raw.shape[-1] not in CHANNELS and raw.shape[1] in CHANNELS:
            raw = raw.transpose(0, 2, 3, 1)
        if raw.ndim == 3 or raw.shape[-1] in CHANNELS:
            return as_stored(raw)
    x = numbers(x, what)
    refuse_whole_images(x, what)
    if warn and x.ndim == 4 and x.shape[1] == x.shape[2] > max(CHANNELS) and x.shape[3] in CHANNELS:
        warnings.warn(
            f"{what} holds samples of shape {list(x.shape[1:])}, which look like images with their channels last, but "
            "convolutional models take them first; give x.transpose(0, 3, 1, 2), or bytes (uint8) in this order.",
            stacklevel=user_stacklevel(),
        )
    return x.to(torch.float32 if x.is_floating_point() else torch.int64)


def refuse_whole_images(x: Tensor, what: str) -> None:
    """Raise a ``DataError`` for whole numbers [N, D, E, ...], of which nobody knows which is white."""
    if x.ndim > 2 and not x.is_floating_point() and x.dtype != torch.bool:
        raise DataError(
            f"{what} holds whole numbers of shape {list(x.shape)}; give images as bytes, uint8 [N, H, W] or "
            "[N, H, W, C], or as float32 in 0..1."
        )


def as_array(value: Any, what: str) -> np.ndarray:
    """A value of someone's as one array, bytes as the texts that they encode; ``what`` names it in errors.

    >>> as_array([[1.0, 2.0], [3.0]], "x")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.DataError: x holds arrays of different shapes, or under names; pad or join them to one array ...
    """
    if np.ma.is_masked(value):
        lost = int(np.ma.count_masked(value))
        raise DataError(f"{what} has {lost} masked values; fill them in, or drop the samples that lack them.")
    try:
        if not isinstance(value, Mapping):
            array = np.asarray(value)
            return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
    except UnicodeDecodeError:
        raise DataError(f"{what} holds bytes that are not text in UTF-8; decode them to texts.") from None
    except ValueError:  # of different shapes
        pass
    raise DataError(
        f"{what} holds arrays of different shapes, or under names; pad or join them to one array per sample, which the "
        "model takes apart again."
    )


def targets(y: Tensor | np.ndarray, what: str = "y") -> Tensor:
    """Class numbers as int64, [N] where they are given as [N, 1], and real targets as float32."""
    if isinstance(y, np.ndarray) and y.dtype.kind in "US":
        raise DataError(f"{what} holds text; number the classes from 0 on, and give their names as names.")
    y = numbers(y, what)
    if y.is_floating_point():
        return y.to(torch.float32)
    return (y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y).to(torch.int64)


def numbers(array: Tensor | np.ndarray, what: str) -> Tensor:
    """A user's array as a tensor.

    >>> numbers(np.array(["cat", "dog"]), "y_train")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.DataError: y_train holds text (<U3), but only numbers and truth values will do.
    """
    if isinstance(array, Tensor):
        if array.layout is not torch.strided:
            raise DataError(f"{what} is a sparse tensor; give a dense one, {what.rpartition(' ')[2]}.to_dense().")
        kind, dtype = ("c" if array.is_complex() else "f"), str(array.dtype)
    else:
        array = as_array(array, what)
        kind, dtype = array.dtype.kind, str(array.dtype)
    if kind not in "buif":
        kind_in_words = {"U": "text", "O": "Python objects", "c": "complex numbers"}.get(kind, "no plain numbers")
        raise DataError(f"{what} holds {kind_in_words} ({dtype}), but only numbers and truth values will do.")
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


PARTS = {"train": "train", "test": "test", "val": "validation", "valid": "validation", "validation": "validation"}
"""The folders of a set that is divided already, and which split each of them is."""


@sources.register
def folder(path: str | Path, size: Count = 64, crop: bool = True, by_client: bool = False) -> Source:
    """Images by class in folders: ``CLASS/*.png``, or ``train/CLASS/*.png`` with ``test/…`` and ``val/…`` if there are.

    With ``by_client`` there is a folder of classes for each natural client, ``CLIENT/CLASS/*.png`` or
    ``train/CLIENT/CLASS/*.png``, with ``test/…`` and ``val/…`` alike. A client may lack classes. Images in ``val``
    (or ``valid``, ``validation``) are for validation.

    Images are decoded once, one after the other, to float32 in 0..1, and kept beside the originals in a memory-mapped
    ``fedloom-*.npy`` (12 · size² bytes each); only what is used is read, so that the set may be larger than memory.

    Args:
        path: the folder.
        size: height and width in pixels.
        crop: whether to keep the aspect ratio and cut out the centre; otherwise both sides are scaled to ``size``.
        by_client: whether the outer folders are natural clients, and the classes' folders are in these.
    """
    home = Path(path).expanduser().resolve()
    if not home.is_dir():
        raise DataError(f"there is no folder {home}.")
    folder_names = [name for name in PARTS if (home / name).is_dir()]
    parts = {PARTS[name]: home / name for name in folder_names}
    pools = parts if "train" in parts else {"train": home}
    if pools is parts and len(parts) < len(folder_names):
        several = ", ".join(name for name in folder_names if PARTS[name] == "validation")
        raise DataError(f"{home} has several folders for validation, {several}; join them, or move all but one away.")
    listings = {split: listed(pool, by_client) for split, pool in pools.items()}
    names = sorted(set(listings["train"].classes))
    splits: dict[str, Arrays] = {}
    for split, images in listings.items():
        if strange := sorted(set(images.classes) - set(names)):
            raise DataError(f"{home}: {pools[split].name} has the class {strange[0]!r}, which train has not.")
        y = torch.from_numpy(np.searchsorted(names, images.classes).astype(np.int64))
        splits[split] = Arrays(decoded(images.paths, pools[split], size, crop), y, len(names), tuple(names))
    splits.setdefault("test", splits["train"].take(np.arange(0)))
    settings = {"path": str(home), "size": size, "crop": crop} | ({"by_client": True} if by_client else {})
    ids = {split: images.clients for split, images in listings.items()}
    clients = natural_clients(ids["train"], ids.get("test"), validation=ids.get("validation")) if by_client else {}
    return Source(home.name, **splits, licence="not stated", citation="", settings=settings, **clients)


class Listed(NamedTuple):
    """Image files, with the names of each one's class and client."""

    paths: list[Path]
    classes: list[str]
    clients: list[str]


def listed(pool: Path, by_client: bool) -> Listed:
    """The images of a folder, in order of names, client by client."""
    outer = folders_in(pool)
    if not by_client and any(folders_in(pool / name) for name in outer):
        raise DataError(f"{pool}: its folders contain folders; if the outer ones are clients, set data.by_client=true.")
    listing = Listed([], [], [])
    for client in outer if by_client else ("",):
        paths, labels, names = by_class(pool / client)
        listing.paths.extend(paths)
        listing.classes.extend(names[label] for label in labels)
        listing.clients.extend([client] * len(paths))
    return listing


def decoded(paths: list[Path], pool: Path, size: int, crop: bool) -> Tensor:
    """Images as float32 [N, 3, size, size] in a memory-mapped file, which is made if it does not exist."""
    target = pool / f"fedloom-{stamp_of(paths, size, crop)}.npy"
    if not target.is_file():
        with writing(target), whole_file(target) as file:
            array = memory_map(file, np.float32, (len(paths), 3, size, size))
            for row, path in enumerate(with_progress(paths, pool.name)):
                array[row] = read_image(path, size, crop).transpose(2, 0, 1) / np.float32(255)
            array.flush()
            del array
    return inputs(np.load(target, mmap_mode="r"))
