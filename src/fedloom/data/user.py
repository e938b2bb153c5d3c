"""The user's own data as a source: arrays, tables, torch and Hugging Face data sets, one data set per client.

>>> import numpy as np
>>> source = as_source((np.zeros((4, 2)), np.array(["no", "yes", "yes", "no"])), client=["ann", "bob", "ann", "bob"])
>>> source.train.y.tolist(), source.train.names, source.group_names
([0, 1, 1, 0], ('no', 'yes'), ('ann', 'bob'))
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedloom.base.errors import DataError, in_words, nearest, user_stacklevel
from fedloom.core.federation import Arrays
from fedloom.data.columns import FEW, as_texts, categories, clients_of, complete, encoded, is_frame, present
from fedloom.data.sources import Source
from fedloom.data.sources.arrays import (
    as_array,
    from_tensors,
    in_bytes,
    inputs,
    numbers,
    standardised,
    targets,
    warn_of_scales,
)
from fedloom.data.sources.files import one_name_each, with_progress

__all__ = ["as_source"]


def as_source(
    data: Any,
    y: Any = None,
    *,
    test: Any = None,
    validation_set: Any = None,
    features: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    client: Any = None,
    classes: int | None = None,
    standardise: bool = False,
    name: str = "own data",
) -> Source:
    """A source of the user's own data, which are given as to ``fedloom.data.federate``; ``name`` names it in captions.

    ``data`` is ``(x, y)`` as arrays or tensors; the inputs alone with ``y``; a pandas frame; a torch ``Dataset`` of
    pairs (read once, in order); a Hugging Face ``Dataset`` or ``DatasetDict``; or one of these per client, as a list or
    as a mapping from client names. ``test`` and ``validation_set`` per client are joined, and may be empty. A
    ``DatasetDict`` brings its own; its ``validation`` is the test set if there is no other.

    Columns of numbers and categories become one float32 vector [D], categories one-hot; the ``features`` may also be
    the name of a column of arrays or images. One-hot columns stay 0 and 1 with ``standardise``. Integers of any width
    and byte order, truth values, texts and categories become class numbers (texts and categories with names), of which
    there are ``classes``, by default those that occur; a matrix of zeros and ones is several truth values per sample;
    floats are numbers. Targets [N, 1] that are classes become [N].

    Raises:
        DataError: if the data cannot be used; the message says what to do.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, Mapping) and "train" in data:
        own_test, own_validation = data.get("test"), data.get("validation")
        if test is None and own_test is None:
            own_test, own_validation = own_validation, None
        test = own_test if test is None else test
        validation_set = own_validation if validation_set is None else validation_set
        data = data["train"]
    parts, owners = _per_client(data)
    if owners is not None and client is not None:
        raise DataError(f"{name} is one data set per client already; leave client= out.")
    if owners is not None and y is not None:
        raise DataError(f"{name} is one data set per client, each with its targets; leave y= out.")
    column = client if isinstance(client, str) else None
    what = [name] if owners is None else [f"{name} of client {owner}" for owner in owners]
    read_parts = [read(part, y, features, label, column, title) for part, title in zip(parts, what, strict=True)]
    count, places = len(read_parts), dict[str, tuple[slice, list[str] | None]]()
    for split, argument in (("test", test), ("validation", validation_set)):
        split_parts, split_owners = _split_parts(argument, owners, name, split)
        places[split] = slice(len(read_parts), len(read_parts) + len(split_parts)), split_owners
        for number, part in enumerate(split_parts):
            what.append(f"{name}: {split}" + ("" if split_owners is None else f" of client {split_owners[number]}"))
            there = getattr(part, "column_names", getattr(part, "columns", ()))
            of = column if column in there else None  # which a test table may lack
            read_parts.append(read(part, None, features, label, of, what[-1]))
    x, columns = _inputs([part.x for part in read_parts], name)
    targets, names = coded([part.y for part in read_parts], [part.names for part in read_parts], name)
    targets = with_kind(targets, x)
    for label_of, a, b in zip(what, x, targets, strict=True):
        if len(a) != len(b):
            raise DataError(f"{label_of} has {len(a)} inputs but {len(b)} targets.")
        if not len(a):
            raise DataError(f"{label_of} has no samples; leave it out, or give it some.")
    splits: dict[str, Any] = {}
    for split, (place, split_owners) in places.items():
        if inputs_of := x[place]:
            splits[f"x_{split}"] = _concatenate(inputs_of, f"{name}: {split} inputs")
            splits[f"y_{split}"] = _concatenate(targets[place], f"{name}: {split} targets")
            sizes = [len(part) for part in inputs_of]
            ids = None if split_owners is None else np.repeat(np.array(split_owners), sizes)
            splits[f"clients_{split}"] = read_parts[place.start].client if ids is None else ids
    source = from_tensors(
        _concatenate(x[:count], f"{name}: inputs"),
        _concatenate(targets[:count], f"{name}: targets"),
        **splits,
        classes=classes,
        clients=_clients(read_parts[0].client, owners, client, [len(part) for part in x[:count]], name),
        names=names,
        name=name,
        settings={"columns": columns} if columns else {},
    )
    if not source.train.has_numbers and len(source.train) and len(source.train.y.unique()) == 1:
        warnings.warn(
            f"{name}: all samples have the same class; there is nothing to learn.", stacklevel=user_stacklevel()
        )
    if columns and features is None:
        for column, cells in read_parts[0].x.items():
            if cells.dtype.kind in "iu" and len(cells) > FEW and (np.diff(cells.to_numpy()) == 1).all():
                warnings.warn(
                    f"{name}: column {column!r} counts the rows and is an input; if it says nothing about them, name "
                    "the inputs with data.features (features= in Python).",
                    stacklevel=user_stacklevel(),
                )
    plain = {str(part) for part in read_parts[0].x.columns} if columns else set()
    numbers = [place for place, column in enumerate(columns) if column in plain]
    if standardise:
        return standardised(source, numbers if columns else None)
    if numbers:
        warn_of_scales(source, columns, numbers)
    return source


def _per_client(data: Any) -> tuple[list[Any], list[str] | None]:
    """The data sets, and the clients' names if there is one for each."""
    if isinstance(data, Mapping | list) and not data:
        raise DataError("there are no data sets; give at least one client.")
    if isinstance(data, Mapping):
        if {"x", "y"} <= data.keys():
            return [(data["x"], data["y"])], None
        owners = [str(key) for key in data]
        if len(set(owners)) < len(owners):
            raise DataError(f"two data sets belong to client {Counter(owners).most_common(1)[0][0]!r}; join them.")
        return list(data.values()), owners
    if isinstance(data, list):
        if isinstance(data[0], np.ndarray | Tensor | int | float | str):
            raise DataError(
                "a list holds one data set per client; give inputs and targets as a pair (x, y), or targets with y=."
            )
        return data, [f"{number:0{len(str(len(data) - 1))}d}" for number in range(len(data))]
    return [data], None


def _split_parts(data: Any, owners: Sequence[str] | None, name: str, split: str) -> tuple[list[Any], list[str] | None]:
    """The data sets for tests or validation that are not empty, and their clients' names if there is one for each."""
    if data is None:
        return [], None
    parts, split_owners = _per_client(data)
    if split_owners is None:
        return parts, None
    which = "test=" if split == "test" else "validation_set="
    if owners is None:
        raise DataError(
            f"{name}: {which} is one data set per client, but the data are not; give both in the same form."
        )
    if isinstance(data, list) and len(split_owners) != len(owners):
        raise DataError(
            f"{name} is {len(owners)} data sets, but {which} is {len(split_owners)}; give one for each client, in "
            "their order."
        )
    if strange := sorted(set(split_owners) - set(owners)):
        raise DataError(
            f"{name}: {which} names client {strange[0]!r}, which has no data set; {nearest(strange[0], owners)}"
        )
    pairs = [(part, owner) for part, owner in zip(parts, split_owners, strict=True) if not _is_empty(part)]
    return [part for part, _ in pairs], [owner for _, owner in pairs]


def _is_empty(part: Any) -> bool:
    """Whether a data set certainly has no samples."""
    inputs = part[0] if isinstance(part, tuple) and part else part
    return hasattr(inputs, "__len__") and not len(inputs)


def _inputs(parts: Sequence[Any], name: str) -> tuple[list[Tensor], list[str]]:
    """Inputs of all parts, and their columns' names if they were tables."""
    if any(map(is_frame, parts)):
        if not all(map(is_frame, parts)):
            raise DataError(f"{name}: some of the data sets are tables and others arrays; give all in the same form.")
        tables, columns = encoded(parts, name)
        return [torch.from_numpy(table) for table in tables], columns
    return [inputs(part, f"{name}: x", warn=False) for part in parts], []


def _clients(
    column_ids: np.ndarray | None, owners: Sequence[str] | None, client: Any, sizes: Sequence[int], name: str
) -> np.ndarray | None:
    """The natural client of each training row: its data set's, its cell's or its argument's; None without any."""
    if owners is not None:
        return np.repeat(np.array(owners), sizes)
    if client is None or isinstance(client, str):
        return column_ids
    return client_ids(client, sizes[0], name)


def client_ids(client: Any, samples: int, name: str) -> np.ndarray:
    """The natural clients of so many samples, given as one number or name each."""
    ids = as_array(client, f"{name}: client")
    if ids.dtype.kind == "O":
        if lost := sum(value is None or value != value for value in ids.ravel()):  # NaN differs from itself
            raise DataError(f"{name}: {lost} of {ids.size} samples have no client; drop them, or give each one.")
        ids = as_texts(ids, name)
    if ids.ndim != 1 or len(ids) != samples:
        raise DataError(f"{name} has {samples} samples, but client ids of shape {list(ids.shape)}; give one each.")
    return ids


def _concatenate(parts: Sequence[Tensor], what: str) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    forms = dict.fromkeys(f"{str(part.dtype).removeprefix('torch.')} {list(part.shape[1:])}" for part in parts)
    if len(forms) > 1:
        raise DataError(f"{what} differ from client to client, {' and '.join(forms)}; convert them to one.")
    return torch.cat(list(parts))


READ_TWICE = 8
"""So many items of a torch data set are read again, to notice random ones."""


class Columns(NamedTuple):
    """A data set, not converted yet.

    Attributes:
        x: an array or tensor [N, ...], or a frame of input columns.
        y: targets [N, ...], or a frame of target columns.
        client: the natural client of each sample [N], if the data set has them.
        names: class names, if the data set has them.
    """

    x: Any
    y: Any
    client: np.ndarray | None = None
    names: tuple[str, ...] = ()


def read(
    data: Any, y: Any, features: str | Sequence[str] | None, label: str | Sequence[str] | None, client: str | None,
    what: str,
) -> Columns:  # fmt: skip
    """The columns of a data set; ``what`` names it in errors."""
    is_hugging_face = hasattr(data, "column_names") and hasattr(data, "with_format")
    if y is not None and (is_hugging_face or isinstance(data, Arrays) or (is_frame(data) and label is not None)):
        raise DataError(f"{what} has its targets already; leave y= out.")
    if is_frame(data):
        return _frame(data, y, features, label, client, what)
    if is_hugging_face:
        return _hugging_face(data, features, label, client, what)
    if isinstance(data, Arrays):
        return Columns(data.x, data.y, names=data.names)
    if y is not None:
        return Columns(data, y)
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise _too_many(what, data.tensors)
        return Columns(data.tensors[0], data.tensors[1])
    if isinstance(data, Dataset):
        return _torch(data, features, label, what)
    if isinstance(data, tuple) and len(data) == 2:
        return Columns(*data)
    if isinstance(data, np.ndarray | Tensor):
        raise DataError(f"{what} has no targets; give a pair (x, y), or the targets with y=.")
    raise DataError(
        f"{what} is {in_words(data)}; give a pair of arrays (x, y), a pandas frame, a torch Dataset, a Hugging "
        "Face Dataset, or a list with one of these for each client."
    )


def _frame(
    frame: Any, y: Any, features: str | Sequence[str] | None, label: str | Sequence[str] | None, client: str | None,
    what: str,
) -> Columns:  # fmt: skip
    columns = list(frame.columns)
    one_name_each(columns, what)
    if label is None and y is None:
        raise DataError(
            f"{what} is a table; name the target column with label=, one of: {', '.join(map(str, columns))}."
        )
    targets = [] if label is None else [label] if isinstance(label, str) else list(label)
    chosen_features = [features] if isinstance(features, str) else list(features or ())
    input_columns = _input_columns(columns, chosen_features, targets, client, what)
    ids = None if client is None else clients_of(frame[client], what)
    if y is None:
        y = frame[targets[0]] if len(targets) == 1 else frame[targets]
    if isinstance(features, str) and frame[features].dtype == object and not isinstance(frame[features].iloc[0], str):
        return Columns(stacked(list(frame[features]), f"{what}: {features}"), y, ids)
    return Columns(frame[input_columns], y, ids)


def _input_columns(
    columns: Sequence[str], features: Sequence[str], targets: Sequence[str], client: str | None, what: str
) -> list[str]:
    """The input columns of a table with these ``columns``: ``features`` or, without any, all that are nothing else."""
    reserved = [*targets, client]
    present([*targets, *features, *([client] if client else [])], columns, what)
    for place, column in enumerate(features):
        if column in (*reserved, *features[:place]):
            also = "twice" if column in features[:place] else "and also the label or client"
            raise DataError(
                f"{what}: column {column!r} is an input {also}; leave it out of data.features (features= in Python)."
            )
    return list(features) or [column for column in columns if column not in reserved]


def _hugging_face(
    dataset: Any, features: str | Sequence[str] | None, label: str | Sequence[str] | None, client: str | None, what: str
) -> Columns:
    """A ``datasets.Dataset``; images and arrays are decoded, several columns become a table."""
    columns = list(dataset.column_names)
    if label is None:
        label = next((column for column in ("label", "labels", "target", "y") if column in columns), "label")
    targets = [label] if isinstance(label, str) else list(label)
    chosen_features = [features] if isinstance(features, str) else list(features or ())
    input_columns = _input_columns(columns, chosen_features, targets, client, what)
    names = tuple(getattr(dataset.features[targets[0]], "names", None) or ())
    ids = None
    if client is not None:
        table = dataset.select_columns([client]).with_format(None).to_pandas()
        ids = clients_of(table[client], what)
    table = dataset.select_columns(targets).with_format(None).to_pandas()
    y: Any = table[targets[0]] if len(targets) == 1 else table
    if len(targets) == 1 and y.dtype == object and len(y) and not isinstance(y.iloc[0], str):
        y = stacked(list(y), f"{what}: {targets[0]}")
    image = input_columns[0] if len(input_columns) == 1 else None
    if image is None and not chosen_features:  # an image or array beside other columns
        image = next((c for c in input_columns if type(dataset.features[c]).__name__ in ("Image", "Array3D")), None)
    if image is None or type(dataset.features[image]).__name__ == "Value":
        return Columns(dataset.select_columns(input_columns).with_format(None).to_pandas(), y, ids, names)
    rows = dataset.select_columns([image]).with_format(None)
    return Columns(stacked([row[image] for row in with_progress(rows, what)], f"{what}: {image}"), y, ids, names)


def _torch(
    dataset: Dataset[Any], features: str | Sequence[str] | None, label: str | Sequence[str] | None, what: str
) -> Columns:
    """A torch data set, read once: every item is a pair (input, target), or a mapping with the named entries.

    A few items are read again, to warn of random ones.
    """
    if isinstance(dataset, IterableDataset):
        items: list[Any] = list(dataset)
    else:
        items = [dataset[row] for row in with_progress(range(len(dataset)), what)]  # pyright: ignore[reportArgumentType]
    if not items:
        raise DataError(f"{what} is empty.")
    first = items[0]
    if isinstance(first, Mapping):
        if not (isinstance(features, str) and isinstance(label, str)):
            raise DataError(
                f"the items of {what} are mappings; name their input and target with features= and label=: "
                f"{', '.join(map(str, first))}."
            )
        present([features, label], list(first), f"an item of {what}")
        pairs = [(item[features], item[label]) for item in items]
    elif isinstance(first, tuple | list) and len(first) > 2:
        raise _too_many(what, first)
    elif isinstance(first, tuple | list) and len(first) == 2:
        pairs = [(item[0], item[1]) for item in items]
    else:
        raise DataError(f"an item of {what} is {in_words(first)}, but it must be a pair (input, target).")
    names = tuple(map(str, getattr(dataset, "classes", ())))
    x, y = (stacked([pair[side] for pair in pairs], what) for side in (0, 1))
    if not isinstance(dataset, IterableDataset):
        of = features if isinstance(first, Mapping) else 0
        again = stacked([dataset[row][of] for row in range(min(len(x), READ_TWICE))], what)
        if not np.array_equal(again, x[: len(again)], equal_nan=again.dtype.kind == "f"):
            warnings.warn(
                f"items of {what} differ when they are read again, as by a random transform, but each is read once for "
                "the whole run; leave the transform out of the data set, and give augment=, like augment=['flip'].",
                stacklevel=user_stacklevel(),
            )
    return Columns(x, y, names=names if np.asarray(y).dtype.kind in "iub" else ())


def _too_many(what: str, fields: Sequence[Any]) -> DataError:
    """The error of items of which the second field need not be the target."""
    message = "; ".join(f"{number}: {in_words(field)}" for number, field in enumerate(fields))
    return DataError(f"the items of {what} have {len(fields)} fields ({message}), not two; give pairs (input, target).")


def stacked(items: Sequence[Any], what: str) -> np.ndarray:
    """Samples as one array [N, ...]; images of PIL as uint8, in colour if any of them is."""
    if any(hasattr(item, "getbands") for item in items):
        items = pixels(items)
    arrays = [item.detach().cpu().numpy() if isinstance(item, Tensor) else as_array(item, what) for item in items]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        odd = next(i for i, array in enumerate(arrays) if array.shape != arrays[0].shape)
        raise DataError(
            f"{what}: sample 0 has shape {list(arrays[0].shape)}, but sample {odd} {list(arrays[odd].shape)}; "
            "resize or pad them to one."
        )
    return np.stack(arrays) if arrays else np.zeros(0)


def pixels(items: Sequence[Any]) -> list[Any]:
    """PIL images with 8 bits per channel: all grey, all in colour, or all in colour with transparency."""
    modes = {item.mode for item in items if hasattr(item, "getbands")}
    grey = modes <= {"1", "L", "LA", "La"} or all(mode.startswith("I") for mode in modes)
    mode = "RGBA" if modes == {"RGBA"} else "L" if grey else "RGB"
    return [in_bytes(item).convert(mode) if hasattr(item, "getbands") else item for item in items]


def coded(parts: Sequence[Any], names: Sequence[Sequence[str]], what: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Targets of several parts of the data, each with its class names or (), and the names of all classes.

    Texts and categories are numbered in the same way in all parts: in the order of their categories, or sorted. If
    parts have different class names, their class numbers are renumbered in the union of all names.

    >>> [y.tolist() for y in coded([["no", "yes"], ["yes"]], [(), ()], "mine")[0]], coded([["b", "a"]], [()], "mine")[1]
    ([[0, 1], [1]], ('a', 'b'))
    >>> [y.tolist() for y in coded([np.array([0, 1])] * 2, [("cat", "dog"), ("dog", "fish")], "mine")[0]]
    [[0, 1], [1, 2]]
    """
    raw = [_raw(part, what) for part in parts]
    if any(part.dtype.kind == "U" for part in raw):
        texts = [part.astype(str) for part in raw]
        labels = categories(parts) or sorted({str(value) for part in texts for value in np.unique(part)})
        place = {name: number for number, name in enumerate(labels)}
        return [torch.tensor([place[value] for value in part.ravel()], dtype=torch.int64) for part in texts], tuple(
            labels
        )
    tensors = [targets(part, f"{what}: y") for part in raw]
    kinds = {part.is_floating_point() for part in tensors}
    if len(kinds) > 1:
        raise DataError(f"{what}: some targets are whole numbers and others floats; convert them to one type.")
    if not kinds.pop():
        least = min((int(part.min()) for part in tensors if part.numel()), default=0)
        if least < 0:
            raise DataError(
                f"{what}: there is a label {least}, but classes are numbered from 0; for labels -1 and 1 give y > 0."
            )
    return _renumbered(tensors, [tuple(group) for group in names], what)


def _renumbered(
    tensors: list[Tensor], names: Sequence[tuple[str, ...]], what: str
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Class numbers of all parts, renumbered in the union of their class names, and that union."""
    groups = list(dict.fromkeys(part for part in names if part))
    if len(groups) < 2:
        return tensors, groups[0] if groups else ()
    union = list(dict.fromkeys(label for part in groups for label in part))
    if not all(names) or any(part.is_floating_point() or part.ndim > 1 for part in tensors):
        raise DataError(f"{what}: data sets have different class names, and some have none; give the targets as names.")
    for part, labels in zip(tensors, names, strict=True):
        if part.numel() and int(part.max()) >= len(labels):
            raise DataError(f"{what}: there is a label {int(part.max())}, but only {len(labels)} class names.")
    place = [torch.tensor([union.index(label) for label in labels]) for labels in names]
    return [table[part] for table, part in zip(place, tensors, strict=True)], tuple(union)


def with_kind(targets: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """Convert matrices of zeros and ones to truth values, float32 [N, L]; targets of sequences stay class numbers.

    >>> y = torch.tensor([[0, 1], [1, 1]])
    >>> with_kind([y], [torch.zeros(2, 5)])[0].dtype, with_kind([y], [torch.zeros(2, 2).long()])[0].dtype
    (torch.float32, torch.int64)
    """
    first, inputs = targets[0], x[0]
    sequences = not inputs.is_floating_point() and inputs.shape[1:] == first.shape[1:]
    is_matrix = not first.is_floating_point() and first.ndim == 2 and not sequences
    if is_matrix and all(int(part.max()) <= 1 for part in targets if part.numel()):
        return [part.float() for part in targets]
    return list(targets)


def _raw(part: Any, what: str) -> np.ndarray:
    """Targets as an array of numbers or texts."""
    if isinstance(part, Tensor):
        values = numbers(part.detach().cpu(), f"{what}: y")
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if is_frame(part):
        part = part.to_numpy()
    elif hasattr(part, "isna"):  # a pandas series
        complete([part], f"{what}: column {part.name!r}")
        category = hasattr(part.dtype, "categories")
        part = np.array([str(value) for value in part]) if category else part.to_numpy()
    array = as_array(part, f"{what}: y")
    if array.dtype.kind != "O":
        return array
    kinds = {type(value) for value in array.ravel()}
    if all(issubclass(kind, str) for kind in kinds):
        return array.astype(str)
    is_whole = [issubclass(kind, int | np.bool_ | np.integer) for kind in kinds]
    if all(is_int or issubclass(kind, float | np.floating) for kind, is_int in zip(kinds, is_whole, strict=True)):
        try:
            return array.astype(np.int64 if all(is_whole) else np.float64)
        except OverflowError:
            raise DataError(
                f"{what}: there is a target beyond 64-bit integers; number the classes from 0 on."
            ) from None
    message = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise DataError(f"{what}: targets are {message}; give class numbers, names or numbers, and none missing.")
