"""Tables, columns of texts, and data sets of the Hugging Face hub, read like the user's own (``fedloom.data.user``)."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import torch

from fedloom.base.errors import ConfigError, DataError, first_line, import_extra, user_stacklevel
from fedloom.base.files import check_memory, check_parquet, readable_path
from fedloom.base.ranges import Count, Range
from fedloom.data.columns import check_cells, clients_of, complete, present
from fedloom.data.sources import CSV, Source, reader_of, sources
from fedloom.data.sources.files import one_name_each, reading
from fedloom.data.texts import padded, texts_of, tokens, vocabulary

SEPARATORS = {";": "semicolons", "\t": "tabs"}
FILE = "client"  # the column of the names of a folder's files
COLUMNS = 100_000
PIECE = 1 << 18  # bytes of a CSV file that are read at once
HEADER = 1 << 24  # characters of a line of its header
IN_DIGITS = re.compile(r"^\s*(\d{1,2})([./-])(\d{1,2})\2\d{2,4}\b")
"""A date whose day, month and year are numbers, the year at the end."""


@sources.register
def table(
    path: str | Path,
    label: tuple[str, ...] = ("label",),
    features: tuple[str, ...] = (),
    client: str | None = None,
    time: str | None = None,
    standardise: bool = False,
    test: str | Path | None = None,
    validation: str | Path | None = None,
    missing: Literal["refuse", "drop", "impute"] = "refuse",
    shape: tuple[Count, ...] = (),
) -> Source:
    """A CSV or parquet table with one row per sample: ``data=table:FILE data.label=COLUMN``.

    Columns of numbers are inputs unchanged; texts and categories become one-hot columns.

    Args:
        path: the file, ``.csv`` or ``.parquet``; or a folder of them, by default one for each client.
        label: the target column, or several of numbers: ``data.label=[height,weight]``.
        features: the input columns; by default all other than label, client and time.
        client: the column of natural clients; of a folder without one, the names of its files.
        time: the column by which rows are sorted, of numbers or dates; not an input. Each client is tested on its
            last rows.
        standardise: whether columns of numbers are scaled by the mean and deviation of all rows together, which a
            federation of real clients would have to compute jointly.
        test: another such file or folder, the common test set; if it names clients, ``held_out=natural`` tests each
            client on its own rows.
        validation: likewise for validation: a client's own rows, or rows like its own.
        missing: what becomes of missing values: ``refuse`` the table, ``drop`` their rows, or ``impute`` inputs by the
            mean of a column's numbers in the first file, or its most frequent text, which clients would have to compute
            jointly.
        shape: the shape of one sample, like [1,28,28], where the input columns are its numbers in order.

    Raises:
        DataError: if a file cannot be read as a table, or lacks a column, or has columns for samples of another shape.
    """
    from fedloom.data.sources.arrays import shaped
    from fedloom.data.user import as_source  # this package is imported by it

    if time is not None and time in (*label, client):
        raise DataError(f"data.time names the column of labels or clients, {time!r}; choose another.")
    place = Path(path).expanduser()
    (frame, owner), name = read_frames(place, client), place.stem
    if time is not None:
        frame = in_order(frame, time, name)
        frame = frame if time in features else frame.drop(columns=time)
    targets = only(label)
    splits = [read_frames(Path(split).expanduser(), client)[0] for split in (test, validation) if split is not None]
    client = owner
    if time is not None and time not in features:
        splits = [split.drop(columns=time, errors="ignore") for split in splits]
    frame, *splits = without_gaps([frame, *splits], missing, [*label, *([client] if client else [])], features)
    paths = {"test": test, "validation": validation}
    paths = {key: str(value) for key, value in paths.items() if value is not None}
    tables = dict(zip(paths, splits, strict=True))
    source = as_source(
        frame, features=list(features) or None, label=targets, client=client, standardise=standardise, name=name,
        test=tables.get("test"), validation_set=tables.get("validation"),
    )  # fmt: skip
    inferred = {key: source.settings.get(key) for key in ("columns", "standardised")}
    optional = {"client": client, "features": list(features), **inferred, **paths, "shape": list(shape)}
    optional |= {"missing": None if missing == "refuse" else missing}
    settings = {"path": str(path), "label": targets, "time": time} | {k: v for k, v in optional.items() if v}
    parts = {part: getattr(source, part) for part in ("train", "test", "validation")} if shape else {}
    new = {
        part: replace(arrays, x=torch.from_numpy(shaped(arrays.x.numpy(), shape, name)))
        for part, arrays in parts.items()
        if arrays is not None
    }
    return replace(source, settings=settings, **new)


def without_gaps(frames: Sequence[Any], missing: str, ids: Sequence[str], features: Sequence[str]) -> list[Any]:
    """Frames without missing values in the columns that are read; the first one's values fill those of all.

    ``ids`` are the columns of labels and clients, whose gaps are never filled.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"a": [1.0, None, 3.0], "b": ["x", "y", None], "label": [0, 1, 1]})
    >>> without_gaps([frame], "impute", ["label"], ())[0].values.tolist()
    [[1.0, 'x', 0], [2.0, 'y', 1], [3.0, 'x', 1]]
    >>> len(without_gaps([frame], "drop", ["label"], ())[0])
    1
    """
    import pandas as pd

    if missing == "refuse":
        return list(frames)
    read = [column for column in frames[0].columns if not features or column in features or column in ids]
    if missing == "drop":
        return [_without_rows(frame, [column for column in read if column in frame.columns], ids) for frame in frames]
    fill = {}
    for column in (column for column in read if column not in ids):
        values = frames[0][column]
        check_cells(values, f"column {column!r}")
        if values.isna().all():
            raise DataError(f"column {column!r} has no value by which missing ones could be filled; leave it out.")
        numbers = pd.api.types.is_numeric_dtype(values)
        fill[column] = values.mean() if numbers else values.mode(dropna=True)[0]
    return [frame.astype(dict.fromkeys(_gaps_of_integers(frame, fill), float)).fillna(fill) for frame in frames]


def _gaps_of_integers(frame: Any, columns: Iterable[str]) -> list[str]:
    """The columns of whole numbers or truth values with gaps, as pandas' own types allow, which cannot hold a mean."""
    present = [column for column in columns if column in frame.columns]
    return [column for column in present if frame[column].dtype.kind in "iub" and frame[column].isna().any()]


def _without_rows(frame: Any, columns: Sequence[str], ids: Sequence[str]) -> Any:
    """A frame without the rows that lack a value; whole numbers of labels and clients are no floats any more."""
    complete = frame.dropna(subset=columns)
    if len(frame) and not len(complete):
        lacking = frame[columns].isna().sum().idxmax()
        raise DataError(f"every row has a missing value, most often in column {lacking!r}; leave that column out.")
    floats = [column for column in ids if column in columns and complete[column].dtype.kind == "f"]
    return complete.astype({c: int for c in floats if frame[c].isna().any() and (complete[c] % 1 == 0).all()})


def only(columns: Sequence[str]) -> str | list[str]:
    """The name of a single column, or a list of several.

    >>> only(["ill"]), only(["height", "weight"])
    ('ill', ['height', 'weight'])
    """
    if not columns:
        raise DataError("data.label names no column.")
    return columns[0] if len(columns) == 1 else list(columns)


def read_frame(path: Path, texts: Collection[str] = ()) -> Any:
    """A CSV or parquet file as a pandas frame.

    Args:
        path: the file.
        texts: columns of a CSV file that hold texts, even if all of them look like numbers.
    """
    if path.is_file() and reader_of(path.name) != "table":
        raise DataError(f"{path} ends in neither .csv nor .parquet; write the table in one of these forms.")
    with reading(path, "cannot be read as a table"):
        try:
            return (_csv if path.name.lower().endswith(CSV) else _parquet)(readable_path(path), texts)
        except UnicodeDecodeError:
            raise DataError(f"{path} is not encoded in UTF-8; write it in that encoding.") from None


def tables_in(folder: Path) -> dict[str, Path]:
    """The tables in a folder, by their names without the ending."""
    tables: dict[str, Path] = {}
    for path in sorted(folder.glob("[!.]*")):
        if reader_of(path.name) == "table":
            name = re.sub(r"(\.csv(\.\w+)?|\.parquet)$", "", path.name, flags=re.IGNORECASE)
            if path != (first := tables.setdefault(name, path)):
                raise DataError(
                    f"{first.name} and {path.name} in {folder} have the same name but for its ending; rename one."
                )
    return tables


def read_frames(place: Path, client: str | None) -> tuple[Any, str | None]:
    """A table, or those of a folder as one, and its column of clients: of a folder without one, its files' names."""
    if not place.is_dir():
        return read_frame(place), client
    import pandas as pd

    frames = {name: read_frame(path) for name, path in tables_in(place).items()}
    if not frames:
        raise DataError(f"the folder {place} holds no tables, which end in .csv or .parquet.")
    (first, columns), *rest = ((name, set(frame.columns)) for name, frame in frames.items())
    for name, names in rest:
        if difference := sorted(map(str, names ^ columns)):
            raise DataError(
                f"of the tables in {place}, {first} and {name} differ in the columns {', '.join(difference)}."
            )
    if client is None:
        if FILE in columns:
            raise DataError(f"the tables in {place} have a column {FILE!r}: name it, data.client={FILE}, or rename it.")
        frames = {name: frame.assign(**{FILE: name}) for name, frame in frames.items()}
    if empty := [name for name, frame in frames.items() if not len(frame)]:
        warnings.warn(f"of the tables in {place}, {', '.join(empty)} have no rows.", stacklevel=user_stacklevel())
        frames = {name: frame for name, frame in frames.items() if len(frame)} or frames  # whose types are unknown
    return pd.concat(frames.values(), ignore_index=True), client or FILE


class _Unpacked(io.RawIOBase):
    """The bytes of a CSV file, packed or not, as long as memory can hold its cells as numbers."""

    def __init__(self, packed: BinaryIO, path: Path) -> None:
        self.packed, self.path, self.size, self.cells = packed, path, 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any, /) -> int:
        piece = self.packed.read(len(into))
        into[: len(piece)] = piece
        self.size += len(piece)
        self.cells += piece.count(b",") + piece.count(b"\n")
        check_memory(f"{self.path} unpacked", max(self.size, 8.0 * self.cells))
        return len(piece)


@contextmanager
def _unpacked(path: Path) -> Iterator[io.BufferedReader]:
    from pandas.io.common import get_handle

    with get_handle(path, "rb", compression="infer", is_text=False) as handles:
        yield io.BufferedReader(_Unpacked(handles.handle, path), PIECE)  # pyright: ignore[reportArgumentType]


def _csv(path: Path, texts: Collection[str]) -> Any:
    import pandas as pd

    with _unpacked(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        header = next((row for row in csv.reader(iter(lambda: text.readline(HEADER), "")) if row), [])
    if len(header) == 1 and (separator := next((name for sign, name in SEPARATORS.items() if sign in header[0]), None)):
        raise DataError(
            f"{path} separates its columns by {separator}; write it with commas, and with points in decimal numbers."
        )
    _check_header(header, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # of values beyond the header, which would be lost
        try:
            with _unpacked(path) as file:
                return pd.read_csv(file, dtype=dict.fromkeys(texts, str), index_col=False)
        except pd.errors.ParserWarning:
            raise DataError(
                f"{path} has more values in a row than the {len(header)} names in its header; name each column."
            ) from None


def _parquet(path: Path, texts: Collection[str]) -> Any:
    import pandas as pd
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _check_header(names, path)
        check_parquet(path, file)
    return pd.read_parquet(path)


def _check_header(names: Sequence[str], path: Path) -> None:
    """Raise a ``DataError`` if columns share a name, or are so many that a table of them takes minutes to read."""
    one_name_each(names, str(path))
    if len(names) > COLUMNS:
        raise DataError(
            f"{path} has {len(names):,} columns, and a table is read with at most {COLUMNS:,}; give wider data as one "
            "array x, in an npz file."
        )


def in_order(frame: Any, column: str, what: str) -> Any:
    """A pandas frame sorted by a column of numbers or dates; rows of the same time keep their order.

    >>> import pandas as pd
    >>> in_order(pd.DataFrame({"day": ["2026-02-01", "2026-01-31"], "x": [1, 2]}), "day", "visits")["x"].tolist()
    [2, 1]
    """
    import pandas as pd

    present([column], list(frame.columns), what)
    times = frame[column]
    if not pd.api.types.is_numeric_dtype(times):
        times = dates(times, f"{what}: column {column!r}")
    complete([times], f"{what}: column {column!r}")
    return frame.iloc[times.argsort(kind="stable")]


def dates(column: Any, what: str) -> Any:
    """A pandas column of dates as times in UTC; dates in digits all begin with the day, or all with the month.

    A number above 12 decides which; with dots the day comes first.

    >>> import pandas as pd
    >>> dates(pd.Series(["31/01/2026", "01/02/2026"]), "visits").dt.month.tolist()
    [1, 2]
    """
    import pandas as pd

    column = column.reset_index(drop=True)
    parts = column.dropna().astype(str).str.extract(IN_DIGITS).dropna()
    day_first = bool((parts[0].astype(int) > 12).any())
    month_first = bool((parts[2].astype(int) > 12).any())
    if day_first and month_first:
        raise DataError(f"{what} holds dates that begin with the day and others that begin with the month.")
    if len(parts) and not (day_first or month_first or (day_first := bool((parts[1] == ".").all()))):
        raise DataError(
            f"{what} holds dates like {column[parts.index[0]]!r}, which may begin with the day or with the month; "
            "write them as 2026-12-31."
        )
    try:
        in_digits = column.index.isin(parts.index)
        times = pd.to_datetime(column.mask(in_digits), utc=True, format="mixed")
        return times.fillna(pd.to_datetime(column.where(in_digits), utc=True, format="mixed", dayfirst=day_first))
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} holds neither numbers nor dates ({first_line(error)}).") from error


@sources.register
def text(
    path: str | Path,
    text: str = "text",
    label: str | None = "label",
    client: str | None = None,
    time: str | None = None,
    tokenizer: str = "words",
    words: Annotated[int, Range(2)] = 10_000,
    length: Count = 64,
) -> Source:
    """Texts of a CSV or parquet table as sequences of tokens: ``data=text:FILE data.text=COLUMN data.label=COLUMN``.

    Inputs are token numbers, int64 [N, length]. ``data.label=null`` is next-token prediction: each client's texts, one
    after the other, are cut into sequences, and targets [N, length] are the next token at each position.

    Args:
        path: the file, ``.csv`` or ``.parquet``; or a folder of them, by default one for each client.
        text: the column of texts.
        label: the target column; null predicts the next token instead.
        client: the column of natural clients; of a folder without one, the names of its files.
        time: the column by which rows are sorted, of numbers or dates; each client is tested on its last rows.
        tokenizer: ``words``, hashed into token numbers, or ``bytes`` of UTF-8; or a tokeniser of transformers, by its
            folder or its name on the hub. None is derived from the clients' texts.
        words: the number of tokens of ``words``.
        length: tokens per sequence; longer texts are cut, shorter ones padded.

    Raises:
        ConfigError: if hashed words were to be predicted.
        DataError: if the file cannot be read as a table, lacks a column or a text, or there is no such tokeniser.
    """
    from fedloom.data.user import as_source  # imports this

    if label is None and tokenizer == "words":
        raise ConfigError("hashed words cannot be predicted; choose data.tokenizer=bytes, or one of transformers.")
    place = Path(path).expanduser()
    (frame, client), name = read_frames(place, client), place.stem
    present([text, *(column for column in (label, client) if column is not None)], list(frame.columns), name)
    if time is not None:
        frame = in_order(frame, time, name)
    read = texts_of(frame, text, name)
    owners: Any = None if client is None else clients_of(frame[client], name)
    if label is None:
        lines: dict[Any, list[str]] = {}
        for source, owner in zip(read, [None] * len(read) if owners is None else owners.tolist(), strict=True):
            lines.setdefault(owner, []).append(source + "\n")
        numbers = (np.fromiter(chain(*tokens(texts, tokenizer)), np.int64) for texts in lines.values())
        pairs = [windows(sequence, length) for sequence in numbers]
        if not any(len(x) for x, _ in pairs):
            raise DataError(f"{name} has no client with more than {length} tokens; choose a smaller data.length.")
        inputs, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
        owners = None if owners is None else np.repeat(list(lines), [len(x) for x, _ in pairs])
    else:
        inputs = padded(tokens(read, tokenizer, words, length), tokenizer, length)
        targets = frame[label]
    size = vocabulary(tokenizer, words)
    source = as_source((inputs, targets), client=owners, classes=size if label is None else None, name=name)
    how = {"column": text, "tokenizer": tokenizer, "words": words, "length": length}
    settings = {"path": str(path), "label": label, "client": client, "time": time, "vocabulary": size, "texts": how}
    return replace(source, settings={**source.settings, **settings})


def windows(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text's tokens cut into sequences, and the next token at each position, [N, length] each.

    A remainder is dropped.

    >>> x, y = windows(np.arange(1, 7), 2)
    >>> x.tolist(), y.tolist()
    ([[1, 2], [3, 4]], [[2, 3], [4, 5]])
    """
    end = max(len(text) - 1, 0) // length * length
    return text[:end].reshape(-1, length), text[1 : end + 1].reshape(-1, length)


@sources.register
def hub(
    dataset: str,
    subset: str | None = None,
    features: tuple[str, ...] = (),
    label: tuple[str, ...] = ("label",),
    client: str | None = None,
    train: str = "train",
    test: str | None = None,
    seed: int = 0,
) -> Source:
    """Any data set of the Hugging Face hub, or a folder that its ``datasets`` library reads: ``data=hub:NAME``.

    Needs flwr-datasets (``pip install "fedloom[hub]"``) and, on first use, the network. Columns become inputs and
    targets as for user data: images become pixels in 0..1, several columns one vector, and texts categories.

    Args:
        dataset: name on the hub, like ``ylecun/mnist``, or a folder.
        subset: its configuration, if it has several.
        features: the input columns; by default the image or array column, or else all but label and client.
        label: the target column, or several of numbers.
        client: the column of natural clients.
        train: the split that is dealt to clients.
        test: the split that is the common test set; by default ``test`` if there is one.
        seed: seed of the random order of the samples.

    Raises:
        DataError: if flwr-datasets is missing, or the data set cannot be loaded or has no such split or column.
    """
    from fedloom.data.user import as_source  # this package is imported by it

    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    hub_of = import_extra("hub", "flwr_datasets", "data=hub")
    downloads = hub_of.FederatedDataset(dataset=dataset, subset=subset, partitioners={}, seed=seed)
    pool = _split(downloads, dataset, train)
    test_split = _split(downloads, dataset, test or "test", required=test is not None)
    info = pool.info
    name = dataset.rpartition("/")[2] or dataset
    source = as_source(pool, test=test_split, features=features or None, label=only(label), client=client, name=name)
    settings = {"dataset": dataset, "subset": subset, "train": train, "label": only(label)}
    licence, citation = info.license or "not stated", info.citation or ""
    return replace(source, licence=licence, citation=citation, settings=settings)


def _split(datasets: Any, dataset: str, split: str, required: bool = True) -> Any:
    """A split of a data set; None if it does not exist and is not ``required``."""
    try:
        return datasets.load_split(split)
    except Exception as error:  # the network, the hub and each file format fail in their own ways
        if not required and "not present in the dataset's splits" in str(error):
            return None
        raise DataError(f"the split {split!r} of {dataset!r} cannot be loaded ({first_line(error)}).") from error
