"""A user's texts on disk: a column of a CSV or parquet table."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.table import in_order, read_frame


@sources.register
def text(
    path: str | Path,
    text: str = "text",
    label: str | None = "label",
    client: str | None = None,
    time: str | None = None,
    tokenizer: str = "words",
    words: int = 10_000,
    length: int = 64,
) -> Source:
    """Texts of a CSV or parquet table as sequences of tokens: ``data=text:FILE data.text=COLUMN data.label=COLUMN``.

    Inputs are token numbers, int64 [N, length]. ``data.label=null`` is next-token prediction: each client's texts, one
    after the other, are cut into sequences, and targets [N, length] are the next token at each position.

    Args:
        path: the file, ``.csv`` or ``.parquet``.
        text: the column of texts.
        label: the target column; null predicts the next token instead.
        client: the column of natural clients.
        time: the column by which rows are sorted, of numbers or dates; each client is tested on its last rows.
        tokenizer: ``words``, hashed into token numbers, or ``bytes`` of UTF-8; or a tokeniser of transformers, by its
            folder or its name on the hub. None of them is made from the clients' texts.
        words: the number of tokens of ``words``.
        length: tokens per sequence; longer texts are cut, shorter ones padded.

    Raises:
        ConfigError: if ``words`` or ``length`` is too small, or hashed words were to be predicted.
        DataError: if the file cannot be read as a table, lacks a column or a text, or there is no such tokeniser.
    """
    from fedloom.data.own import as_source, texts  # this package is imported by it
    from fedloom.data.own.columns import present
    from fedloom.data.own.tables import clients_of

    if words < 2 or length < 1:
        raise ConfigError(f"texts need at least 2 words and a length of at least 1, not {words} and {length}.")
    if label is None and tokenizer == "words":
        raise ConfigError("hashed words cannot be predicted; choose data.tokenizer=bytes, or one of transformers.")
    place = Path(path).expanduser()
    frame, name = read_frame(place), place.stem
    present([text, *(column for column in (label, client) if column is not None)], list(frame.columns), name)
    if time is not None:
        frame = in_order(frame, time, name)
    read = texts.texts_of(frame, text, name)
    owners: Any = None if client is None else clients_of(frame[client], name)
    if label is None:
        mine: dict[Any, list[str]] = {}
        for one, owner in zip(read, [None] * len(read) if owners is None else owners.tolist(), strict=True):
            mine.setdefault(owner, []).append(one + "\n")
        tokens = (np.fromiter(chain(*texts.tokens(written, tokenizer)), np.int64) for written in mine.values())
        pairs = [windows(one, length) for one in tokens]
        inputs, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
        owners = None if owners is None else np.repeat(list(mine), [len(x) for x, _ in pairs])
        if not len(inputs):
            raise DataError(f"{name} has no client with more than {length} tokens; choose a smaller data.length.")
    else:
        inputs = texts.padded(texts.tokens(read, tokenizer, words, length), tokenizer, length)
        targets = frame[label]
    size = texts.vocabulary(tokenizer, words)
    one = as_source((inputs, targets), client=owners, classes=size if label is None else None, name=name)
    how = {"column": text, "tokenizer": tokenizer, "words": words, "length": length}
    settings = {"path": str(path), "label": label, "client": client, "time": time, "vocabulary": size, "texts": how}
    return replace(one, settings={**one.settings, **settings})


def windows(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text's tokens cut into sequences, and the next token at each position, [N, length] each.

    A remainder is dropped.

    >>> x, y = windows(np.arange(1, 7), 2)
    >>> x.tolist(), y.tolist()
    ([[1, 2], [3, 4]], [[2, 3], [4, 5]])
    """
    end = max(len(text) - 1, 0) // length * length
    return text[:end].reshape(-1, length), text[1 : end + 1].reshape(-1, length)
