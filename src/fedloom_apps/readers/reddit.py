"""Reddit by user: next-word prediction, as prepared by LEAF."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.files import Files, reads
from fedloom.data.sources.table import windows
from fedloom_apps.readers import leaf

FILES = Files(
    "Reddit",
    (
        ("reddit/data/train/", "reddit/data/test/"),
        ("reddit/data/reddit_leaf/train/", "reddit/data/reddit_leaf/test/"),
    ),
    leaf.ORIGIN,
)
PAD, UNKNOWN = "<PAD>", "<UNK>"
Pairs = tuple[list[Sequence[str]], list[Sequence[str]]]


@sources.register
@reads(FILES)
def reddit(
    words: int = 10_000, length: int = 10, padded: bool = False, root: str | Path | None = None,
    validation: bool = False,
) -> Source:  # fmt: skip
    """Reddit (LEAF): next-word prediction on comments, by user.

    Reads the output of LEAF's scripts, ``reddit/data/{train,test}/*.json`` (or
    ``reddit/data/reddit_leaf/{train,test}``): comments as chunks of 10 words between ``<BOS>`` and ``<EOS>``, padded
    with ``<PAD>``. Inputs and targets are int64 [N, length]; the target of each word is the next. Token 0 is ``<PAD>``,
    1 any word outside the vocabulary, then come the most frequent words of the training comments. A user's own test
    samples are ``held_out=natural``.

    LEAF masks padding in its loss. Here a user's comments are concatenated and cut into sequences of ``length`` without
    padding (a remainder is dropped), so that loss and accuracy count words only. With ``padded=true`` LEAF's chunks are
    kept, and padding counts like words. LEAF also counts a predicted unknown word as wrong; the accuracy here does not.

    Args:
        words: size of the vocabulary, including padding and the unknown word.
        length: words per sequence; 10 if ``padded``.
        padded: whether to keep LEAF's chunks.
        validation: whether a user's comments in ``val``, beside ``train``, are its own samples for validation.
    """
    if words < 3 or length < 1 or (padded and length != 10):
        raise ConfigError(f"Reddit needs at least 3 words and length 1 (10 if padded), not {words} and {length}.")
    folders = FILES.obtain(root)
    folders += [folders[0].parent / "val"] if validation else []
    users = [{u: chunks(x, y, u, folder) for u, x, y in leaf.read_leaf(folder, "Reddit")} for folder in folders]
    count = Counter(word for x, _ in users[0].values() for chunk in x for word in chunk)
    vocabulary = vocabulary_of(count, words)
    parts = [read(part, vocabulary, None if padded else length) for part in users]
    names = tuple(vocabulary) + tuple(f"unused {n}" for n in range(len(vocabulary), words))
    train, *held_out = (Arrays(x, y, words, names) for x, y, _ in parts)
    test, *validation_sets = held_out
    return Source(
        name="reddit",
        train=train,
        test=test,
        validation=validation_sets[0] if validation_sets else None,
        licence=f"comments: their authors'; {leaf.LICENCE}",
        citation=bibtex("caldas2018leaf"),
        **natural_clients(parts[0][2], parts[1][2], "user ", parts[2][2] if validation_sets else None),
        settings={"words": words, "length": length, "padded": padded, "validation": validation},
    )


def chunks(x: Sequence[Any], y: Sequence[Any], user: str, folder: Path) -> Pairs:
    """A user's chunks of words and of next words."""
    try:
        inputs = [chunk for comment in x for chunk in comment]
        targets = [chunk for comment in y for chunk in comment["target_tokens"]]
    except (TypeError, KeyError) as error:
        raise DataError(f"{folder}: user {user!r} has comments that are not in LEAF's format ({error!r}).") from error
    if len(inputs) != len(targets) or not all(map(_is_chunk, chain(inputs, targets))):
        raise DataError(f"{folder}: user {user!r} has chunks that are not 10 words with 10 targets.")
    return inputs, targets


def _is_chunk(words: Any) -> bool:
    return isinstance(words, list) and len(words) == 10 and all(isinstance(word, str) for word in words)


def vocabulary_of(count: Mapping[str, int], words: int) -> dict[str, int]:
    """Token numbers: the most frequent words from 2 on, ties in alphabetical order.

    >>> vocabulary_of({"b": 3, "a": 3, "<PAD>": 9, "c": 1}, 4)
    {'<PAD>': 0, '<UNK>': 1, 'a': 2, 'b': 3}
    """
    ranked = sorted((word for word in count if word not in (PAD, UNKNOWN)), key=lambda word: (-count[word], word))
    return {word: number for number, word in enumerate([PAD, UNKNOWN, *ranked[: words - 2]])}


def read(
    users: Mapping[str, Pairs], vocabulary: Mapping[str, int], length: int | None
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Inputs, targets and users of one split: sequences of ``length`` without padding, or LEAF's chunks for None."""

    def numbers(chunk: Iterable[str]) -> np.ndarray:
        return np.array([vocabulary.get(word, 1) for word in chunk], dtype=np.int64)

    x, y, owners = [np.zeros((0, length or 10), np.int64)], [np.zeros((0, length or 10), np.int64)], []
    for user, (inputs, targets) in users.items():
        if length is None:
            a, b = numbers(chain(*inputs)).reshape(-1, 10), numbers(chain(*targets)).reshape(-1, 10)
        else:
            a, b = windows(numbers(word for word in chain(*inputs) if word != PAD), length)
        x.append(a)
        y.append(b)
        owners += [user] * len(a)
    return torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y)), np.array(owners, dtype=str)
