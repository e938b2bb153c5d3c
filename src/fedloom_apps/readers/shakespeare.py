"""Shakespeare by role: next-character prediction, as prepared by LEAF."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.files import check_memory
from fedloom.base.rng import stream
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, sources
from fedloom.data.sources.files import reads
from fedloom_apps.readers import leaf

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's
CODE = np.full(256, ALPHABET.index(" "), dtype=np.uint8)  # other characters become a space
CODE[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))
LENGTH = 80
SPACES = np.full(LENGTH, CODE[ord(" ")])
FILES = leaf.leaf_files("Shakespeare", "shakespeare", ("shakespeare.jsonl",))


@sources.register
@reads(FILES)
def shakespeare(
    train: int | None = 2000,
    test: int | None = 400,
    split: Literal["time", "random"] = "time",
    least: int = 2,
    seed: int = 0,
    root: str | Path | None = None,
) -> Source:
    r"""Shakespeare (LEAF): next-character prediction from 80 characters of context, by role.

    Reads ``shakespeare.jsonl`` (one speech per line, in the order of the plays: ``play``, ``title``, ``role``,
    ``text``) or LEAF's ``shakespeare/data/{train,test}/*.json``. Inputs are int64 [N, 80], targets int64 [N]: indices
    into LEAF's alphabet of 80 characters, with a space for any other character. A client's own test samples are
    ``held_out=natural``.

    As in LEAF, a client is a role in a play. Each speech is one line (line breaks and repeated spaces become one space)
    that ends in ``\n`` and is preceded by 80 spaces; every character is a target, and its input is the 80 characters
    before it. LEAF then draws test samples at random from the same speeches, whose characters have mostly been trained
    on (``split=random``). By default a role's test samples here come from later speeches. Stage directions within a
    speech, like ``[Aside]``, are kept.

    Args:
        train: training samples per role (FedDyn: 2000), the first ones in the play; roles with fewer are left out.
            With null, all: 2.8 GB of memory for the 4.3 million of the 37 plays.
        test: test samples per role (FedDyn: 400); with null, a fifth of the role's samples.
        split: ``time`` (test speeches follow training speeches) or ``random`` (as in LEAF).
        least: samples that a role must have if ``train`` and ``test`` are null.
        seed: seed of the random split.
    """
    if min(1 if train is None else train, 1 if test is None else test + 1) < 1:
        raise ConfigError(f"train must be at least 1 and test at least 0, not {train} and {test}.")
    paths = FILES.obtain(root)
    if paths[0].is_file():
        speeches = read_speeches(paths[0]).items()
        samples_of = {
            role: divide(texts, train, test, split, stream(seed, "split", n))
            for n, (role, texts) in enumerate(speeches)
        }
    else:
        tests = read_windows(paths[1]) if len(paths) > 1 else {}
        samples_of = {
            role: published(role, windows, tests, train, test) for role, windows in read_windows(paths[0]).items()
        }
    roles = {r: p for r, p in samples_of.items() if p and len(p[0].starts) + len(p[1].starts) >= least}
    if not roles:
        raise DataError(f"no role of {paths[0]} has {train} training and {test} test samples; request fewer.")
    roles = dict(sorted(roles.items()))
    groups, groups_test = (np.repeat(np.arange(len(roles)), [len(p[k].starts) for p in roles.values()]) for k in (0, 1))
    return Source(
        name="shakespeare",
        train=arrays([parts[0] for parts in roles.values()]),
        test=arrays([parts[1] for parts in roles.values()]),
        licence="public domain",
        citation=bibtex("caldas2018leaf"),
        groups=groups,
        groups_test=groups_test if len(groups_test) else None,
        group_names=tuple(roles),
        settings={"train": train, "test": test, "split": split, "least": least, "seed": seed},
    )


class RoleSamples(NamedTuple):
    """Text as indices into the alphabet, and the start of each sample's 80 characters; its target follows them."""

    code: np.ndarray  # uint8 [characters]
    starts: np.ndarray  # int64 [n]

    def only(self, part: slice | np.ndarray | None) -> RoleSamples:
        """Some of the samples."""
        return RoleSamples(self.code, self.starts[:0] if part is None else self.starts[part])


def encode(text: str) -> np.ndarray:
    r"""Indices of characters in the alphabet, uint8; other characters become a space.

    >>> "".join(ALPHABET[place] for place in encode("To be?\t$\u20ac5"))
    'To be?   5'
    """
    return CODE[np.minimum(np.frombuffer(text.encode("utf-32-le", "replace"), "<u4"), 255)]


def read_speeches(path: Path) -> dict[str, list[str]]:
    """The speeches of every role in order; roles are named ``play: role``."""
    roles: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines if line]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is truncated or does not hold one JSON object per line ({error}).") from error
    for line, speech in enumerate(records, 1):
        if not isinstance(speech, dict) or any(not isinstance(speech.get(k), str) for k in ("play", "role", "text")):
            raise DataError(f"{path}, speech {line} has no play, role and text.")
        roles.setdefault(f"{speech['play']}: {speech['role']}", []).append(speech["text"])
    return roles


def samples(speeches: Sequence[str]) -> tuple[RoleSamples, np.ndarray]:
    r"""All samples of a role's speeches, and the number of samples of each speech.

    >>> role, sizes = samples(["Who's\nthere?", "Nay."])
    >>> "".join(ALPHABET[role.code[start + 80]] for start in role.starts), sizes.tolist()
    ("Who's there?\nNay.\n", [13, 5])
    """
    lines = [encode(re.sub("  +", " ", speech.replace("\n", " ")) + "\n") for speech in speeches]
    sizes = np.array([len(line) for line in lines])
    code = np.concatenate([piece for line in lines for piece in (SPACES, line)])
    begin = np.repeat(np.cumsum(sizes + LENGTH) - sizes - LENGTH, sizes)
    return RoleSamples(code, begin + np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)), sizes


def divide(
    speeches: Sequence[str], train: int | None, test: int | None, split: str, draw: np.random.Generator
) -> tuple[RoleSamples, RoleSamples] | None:
    """A role's training and test samples; None if it has too few."""
    pairs, sizes = samples(speeches)
    total, end = int(sizes.sum()), np.cumsum(sizes)
    m = total // 5 if test is None else test
    n = max(total - m, 1) if train is None else train
    if n + m > total:
        return None
    if split == "random":
        order = draw.permutation(total)
        return pairs.only(np.sort(order[:n])), pairs.only(np.sort(order[n : n + m]))
    if train is None:  # at least one whole speech, and as many as leave enough for testing
        n = start = int(end[max(np.searchsorted(end, n, side="right") - 1, 0)])
        m = total - n if test is None else test
    else:
        start = int(end[np.searchsorted(end, n)])  # the end of the speech in which training ends
    return (pairs.only(slice(n)), pairs.only(slice(start, start + m))) if start + m <= total else None


def published(
    role: str, windows: RoleSamples, tests: dict[str, RoleSamples], train: int | None, test: int | None
) -> tuple[RoleSamples, RoleSamples] | None:
    """A role's training and test samples as split by LEAF; None if it has too few."""
    test_windows = tests.get(role, windows.only(None))
    enough = len(windows.starts) >= (train or 1) and (not tests or len(test_windows.starts) >= (test or 0))
    return (windows.only(slice(train)), test_windows.only(slice(test))) if enough else None


def read_windows(folder: Path) -> dict[str, RoleSamples]:
    """The samples in LEAF's files, by role."""
    roles = {}
    for user, x, y in leaf.read_leaf(folder, "Shakespeare"):
        if any(not isinstance(text, str) or len(text) != LENGTH for text in x):
            raise DataError(f"{folder}: role {user!r} has an input that is not {LENGTH} characters.")
        if any(not isinstance(letter, str) or len(letter) != 1 for letter in y):
            raise DataError(f"{folder}: role {user!r} has a target that is not one character.")
        if x:
            code = encode("".join(text + letter for text, letter in zip(x, y, strict=True)))
            roles[user] = RoleSamples(code, np.arange(len(x)) * (LENGTH + 1))
    return roles


def arrays(parts: Sequence[RoleSamples]) -> Arrays:
    """The samples of all roles as int64, filled in place."""
    n = sum(len(part.starts) for part in parts)
    check_memory("Shakespeare", n * (LENGTH + 1) * 9)
    x, y = torch.empty(n, LENGTH, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
    start = 0
    for code, starts in parts:
        stop = start + len(starts)
        x[start:stop] = torch.from_numpy(np.lib.stride_tricks.sliding_window_view(code, LENGTH)[starts])
        y[start:stop] = torch.from_numpy(code[starts + LENGTH])
        start = stop
    return Arrays(x, y, len(ALPHABET), tuple(ALPHABET))
