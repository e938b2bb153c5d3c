"""MQP: pairs of medical questions by doctor, tokenised with BERT's WordPiece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.files import Files, reads
from fedloom.data.texts import words_of
from fedloom_apps.readers.formats import read_table

FILES = Files(
    "MQP",
    (("mqp/mqp.csv", "mqp/vocab.txt"),),
    "https://github.com/curai/medical-question-pair-dataset (mqp.csv) and "
    "https://huggingface.co/distilbert/distilbert-base-uncased (vocab.txt)",
    {"mqp.csv": "md5 06c0121fe60cefa3cdf4d49a637dcaa6"},
)


@sources.register
@reads(FILES)
def mqp(length: int = 200, root: str | Path | None = None) -> Source:
    """MQP: 3048 pairs of medical questions, similar or not, by doctor.

    Reads ``mqp/mqp.csv`` (without a header: doctor, question, question, label) and ``mqp/vocab.txt``, the vocabulary of
    the uncased DistilBERT; the transformers library is not needed. Inputs are int64 [N, length]: ``[CLS] first
    question [SEP] second question [SEP]``, padded with ``[PAD]`` (token 0), which models mask. The 11 doctors are the
    natural clients. There is no common test set: a client's own test pairs are a fraction of its pairs (``held_out``).

    Args:
        length: tokens per sequence; longer pairs are truncated.
    """
    if length < 5:
        raise ConfigError(f"MQP needs sequences of at least 5 tokens, not {length}.")
    table, vocab = FILES.obtain(root)
    vocabulary = read_vocabulary(vocab)
    rows = list(read_table(table, header=False, width=4))
    if strange := next((row for row in rows if row[3] not in ("0", "1") or not row[0].isdecimal()), None):
        raise DataError(
            f"{table} has a row for doctor {strange[0]!r} with label {strange[3]!r}, not a number and 0 or 1."
        )
    x = torch.tensor([pair(first, second, vocabulary, length) for _, first, second, _ in rows])
    train = Arrays(x, torch.tensor([int(row[3]) for row in rows]), 2, ("different", "similar"))
    return Source(
        name="mqp",
        train=train,
        test=train.take(np.zeros(0, np.int64)),
        licence="as stated in its repository",
        citation=bibtex("mccreery2020effective"),
        **natural_clients([int(row[0]) for row in rows], prefix="doctor "),
        settings={"length": length, "vocabulary": len(vocabulary)},
    )


PAD, UNKNOWN, FIRST, BETWEEN = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
LONGEST = 100  # longer words are unknown


def read_vocabulary(path: Path) -> dict[str, int]:
    """The tokens of a ``vocab.txt``, one per line, with their numbers."""
    try:
        pieces = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a vocabulary: {error}.") from error
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    if missing := [piece for piece in (PAD, UNKNOWN, FIRST, BETWEEN) if piece not in vocabulary]:
        raise DataError(f"{path} is not a BERT vocabulary: it lacks {', '.join(missing)}.")
    if len(vocabulary) < len(pieces):
        raise DataError(f"{path} has the same piece twice.")
    return vocabulary


def pieces(word: str, vocabulary: Mapping[str, int]) -> list[int]:
    """WordPiece: greedily the longest token that matches, with ``##`` inside the word; or the unknown token.

    >>> pieces("undone", {"[UNK]": 0, "un": 1, "##do": 2, "##ne": 3, "##d": 4}), pieces("x", {"[UNK]": 0})
    ([1, 2, 3], [0])
    """
    result, start = [], 0
    while start < len(word) <= LONGEST:
        mark = "##" if start else ""
        end = next((end for end in range(len(word), start, -1) if mark + word[start:end] in vocabulary), None)
        if end is None:
            return [vocabulary[UNKNOWN]]
        result.append(vocabulary[mark + word[start:end]])
        start = end
    return result or [vocabulary[UNKNOWN]]


def pair(first: str, second: str, vocabulary: Mapping[str, int], length: int) -> list[int]:
    """Token numbers of ``[CLS] first [SEP] second [SEP]``, padded to ``length``.

    If they are too long, the longer text is truncated, one token at a time.
    """
    a, b = ([number for word in words_of(text) for number in pieces(word, vocabulary)] for text in (first, second))
    while len(a) + len(b) + 3 > length:
        (a if len(a) > len(b) else b).pop()
    row = [vocabulary[FIRST], *a, vocabulary[BETWEEN], *b, vocabulary[BETWEEN]]
    return row + [vocabulary[PAD]] * (length - len(row))
