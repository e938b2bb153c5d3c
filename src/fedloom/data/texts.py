"""Texts as tokens: words, bytes, or those of a tokeniser of transformers."""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from fedloom.base.errors import DataError, import_extra, in_one_line
from fedloom.data.columns import complete, present

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
    """
    if tokenizer == "words":
        numbers = ([1 + zlib.crc32(word.encode()) % (words - 1) for word in words_of(text)] for text in texts)
    elif tokenizer == "bytes":
        numbers = ([1 + byte for byte in text.encode()] for text in texts)
    else:
        limit: dict[str, Any] = {} if length is None else {"truncation": True, "max_length": length}
        numbers = _of_transformers(tokenizer)(list(texts), **limit)["input_ids"]
    return [list(row[:length]) for row in numbers]


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
        options = _of_transformers(tokenizer)
        left, pad = options.padding_side == "left", options.pad_token_id or PAD
    matrix = np.full((len(rows), length), pad, dtype=np.int64)
    for number, row in enumerate(rows):
        matrix[number, length - len(row) if left else 0 :][: len(row)] = row
    return matrix


def texts_of(frame: Any, column: str, what: str) -> list[str]:
    """A pandas column of texts."""
    present([column], list(frame.columns), what)
    complete([frame[column]], f"{what}: column {column!r}")
    texts = frame[column].tolist()
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{what}: column {column!r} does not hold texts; data=table:FILE reads numbers and categories.")
    return texts


@cache
def _of_transformers(name: str) -> Any:
    transformers = import_extra("text", "transformers", f"a tokeniser {name!r}, which is neither words nor bytes,")
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the hub and each file format fail in their own ways
        raise DataError(f"there is no tokeniser {name!r} ({in_one_line(error)}).") from error
