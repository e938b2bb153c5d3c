"""BERT's WordPiece: text to numbers, from a vocabulary file."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedloom.core.errors import DataError

PAD, UNKNOWN, FIRST, BETWEEN = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
LONGEST = 100
"""A longer word is unknown."""


def read_vocabulary(path: Path) -> dict[str, int]:
    """The pieces of a ``vocab.txt``: one a line, numbered from 0.

    Raises:
        DataError: if it is no text, a piece is there twice, or a special piece is missing.
    """
    try:
        pieces = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a vocabulary: {error}.") from error
    found = {piece: number for number, piece in enumerate(pieces)}
    if missing := [piece for piece in (PAD, UNKNOWN, FIRST, BETWEEN) if piece not in found]:
        raise DataError(f"{path} is not a BERT vocabulary: it lacks {', '.join(missing)}.")
    if len(found) < len(pieces):
        raise DataError(f"{path} has the same piece twice.")
    return found


def words(text: str) -> Iterator[str]:
    """Lower-case words without accents; punctuation marks and Chinese characters are words of their own.

    >>> list(words("Café-au-lait, 2 mg?"))
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


def pieces(word: str, vocabulary: Mapping[str, int]) -> list[int]:
    """The longest piece that a word begins with, then of the rest (marked ``##``), and so on; or the unknown.

    >>> pieces("undone", {"[UNK]": 0, "un": 1, "##do": 2, "##ne": 3, "##d": 4}), pieces("x", {"[UNK]": 0})
    ([1, 2, 3], [0])
    """
    found, start = [], 0
    while start < len(word) <= LONGEST:
        mark = "##" if start else ""
        end = next((end for end in range(len(word), start, -1) if mark + word[start:end] in vocabulary), None)
        if end is None:
            return [vocabulary[UNKNOWN]]
        found.append(vocabulary[mark + word[start:end]])
        start = end
    return found or [vocabulary[UNKNOWN]]


def pair(first: str, second: str, vocabulary: Mapping[str, int], length: int) -> list[int]:
    """Two texts as ``[CLS] first [SEP] second [SEP]``, filled up with ``[PAD]``.

    If they are too long, the longer one loses its last pieces, one at a time.
    """
    a, b = ([number for word in words(text) for number in pieces(word, vocabulary)] for text in (first, second))
    while len(a) + len(b) + 3 > length:
        (a if len(a) > len(b) else b).pop()
    row = [vocabulary[FIRST], *a, vocabulary[BETWEEN], *b, vocabulary[BETWEEN]]
    return row + [vocabulary[PAD]] * (length - len(row))
