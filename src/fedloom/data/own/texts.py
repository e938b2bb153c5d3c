"""Texts as sequences of tokens, without a vocabulary that clients would have to agree on."""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, in_one_line
from fedloom.data.own.columns import present
from fedloom.data.own.tables import complete, is_frame

PAD = 0
BYTES = 257  # and padding


def tokens(
    texts: Iterable[str], tokenizer: str = "words", words: int = 10_000, length: int | None = None
) -> list[list[int]]:
    """The tokens of each text, at most the first ``length``; 0 is left for padding.

    Args:
        texts: N texts.
        tokenizer: ``words``: lower-case words and punctuation, hashed (Weinberger et al., ICML 2009): word w is token
            1 + crc32(w) mod (``words`` - 1), so that no list of words is needed, and rare words may share a token;
            ``bytes``: 1 + each byte of UTF-8; otherwise a tokeniser of transformers, a folder or a name on its hub.
        words: the number of tokens of ``words``, with padding, at least 2.
        length: the largest number of tokens of a text; None has no limit.

    >>> tokens(["Hé!"], "bytes"), tokens(["a b", "B A"], "words", 1000)
    ([[73, 196, 170, 34]], [[172, 930], [930, 172]])

    Raises:
        DataError: if transformers is missing, or has no such tokeniser.
    """
    if tokenizer == "words":
        found = ([1 + zlib.crc32(word.encode()) % (words - 1) for word in words_of(text)] for text in texts)
    elif tokenizer == "bytes":
        found = ([1 + byte for byte in text.encode()] for text in texts)
    else:
        limit: dict[str, Any] = {} if length is None else {"truncation": True, "max_length": length}
        found = _of_transformers(tokenizer)(list(texts), **limit)["input_ids"]
    return [list(row[:length]) for row in found]


def words_of(text: str) -> Iterator[str]:
    """BERT's basic tokenisation: lower-case words without accents; punctuation and Chinese characters are words.

    >>> list(words_of("Café-au-lait, 2 mg?"))
    ['cafe', '-', 'au', '-', 'lait', ',', '2', 'mg', '?']
    """
    word = ""
    for letter in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(letter)
        if kind == "Mn" or (kind[0] == "C" and letter not in "\t\n\r"):
            continue
        alone = kind[0] == "P" or letter in "$+<=>^`|~" or "\u4e00" <= letter <= "\u9fff"
        if alone or letter.isspace():
            if word:
                yield word
            word = ""
            if alone:
                yield letter
        else:
            word += letter
    if word:
        yield word


def vocabulary(tokenizer: str, words: int) -> int:
    """The number of tokens, with padding.

    >>> vocabulary("words", 500), vocabulary("bytes", 500)
    (500, 257)
    """
    return words if tokenizer == "words" else BYTES if tokenizer == "bytes" else len(_of_transformers(tokenizer))


def padded(rows: Sequence[Sequence[int]], tokenizer: str, length: int) -> np.ndarray:
    """Rows of at most ``length`` tokens as int64 [N, length].

    A tokeniser of transformers pads as its network was trained; other texts end at the last position, where a recurrent
    network reads its result.

    >>> padded([[5, 6], [7]], "bytes", 3).tolist()
    [[0, 5, 6], [0, 0, 7]]
    """
    left, pad = True, PAD
    if tokenizer not in ("words", "bytes"):
        made = _of_transformers(tokenizer)
        left, pad = made.padding_side == "left", made.pad_token_id or PAD
    found = np.full((len(rows), length), pad, dtype=np.int64)
    for number, row in enumerate(rows):
        found[number, length - len(row) if left else 0 :][: len(row)] = row
    return found


def texts_of(frame: Any, column: str, what: str) -> list[str]:
    """A pandas column of texts.

    Raises:
        DataError: if there is no such column, some texts are missing, or it holds something else.
    """
    present([column], list(frame.columns), what)
    complete([frame[column]], f"{what}: column {column!r}")
    found = frame[column].tolist()
    if not all(isinstance(one, str) for one in found):
        raise DataError(f"{what}: column {column!r} does not hold texts; data=table:FILE reads numbers and categories.")
    return found


def in_tokens(x: Any, *, column: str, tokenizer: str, words: int, length: int) -> Any:
    """Texts, a list or the column of a frame, as padded tokens, int64 [N, length]; anything else unchanged.

    >>> in_tokens(["Hi"], column="text", tokenizer="bytes", words=2, length=3).tolist()
    [[0, 73, 106]]

    Raises:
        DataError: if a frame has no such column, or it does not hold texts.
    """
    if is_frame(x):
        x = texts_of(x, column, "the table of inputs")
    listed = x.tolist() if isinstance(x, np.ndarray) and x.dtype.kind in "OU" else x
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        return x
    return padded(tokens(listed, tokenizer, words, length), tokenizer, length)


@cache
def _of_transformers(name: str) -> Any:
    try:
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"the tokeniser {name!r} is neither words nor bytes, and transformers is not installed; "
            'pip install "fedloom[text]" brings it.'
        ) from error
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the hub and each file format fail in their own ways
        raise DataError(f"there is no tokeniser {name!r} ({in_one_line(error)}).") from error
