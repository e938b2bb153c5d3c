"""``fedloom partition``: how data are distributed over clients."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from fedloom.config import build_federation, resolve
from fedloom.config.overrides import split_words
from fedloom.core.errors import ConfigError, nearest
from fedloom.core.federation import Federation
from fedloom.data import statistics
from fedloom.data.plots import plot_labels
from fedloom.experiment.console import make_console, plain_table, print_raw, relpath, show_warnings

FORMATS = ("png", "svg", "pdf")
MOST_CLIENTS, MOST_CLASSES = 30, 26
LEVELS = " ▁▂▃▄▅▆▇█"
WORDS = {
    "samples": "training samples per client",
    "validation": "validation samples",
    "held_out": "clients' own test samples",
    "test": "common test samples",
    "classes_per_client": "classes per client",
    "label_entropy": "label entropy per client",
    "entropy_of_all": "label entropy of all samples",
}


def command(arguments: argparse.Namespace) -> int:
    """Draw labels by client; print them and their statistics."""
    console = make_console()
    show_warnings(console)
    base, words = split_words(arguments.words)
    config = resolve(words, base)
    given = arguments.out or config.out
    path = picture_path(given) if given else free("partition.png")
    federation = build_federation(config)
    has_classes = federation.train.arrays.has_classes
    if has_classes:
        write_picture(path, lambda: plot_labels(federation, path))
    if arguments.json:
        figure = str(path.resolve()) if has_classes else None
        print_raw(console, json.dumps({"statistics": statistics(federation), "figure": figure}, indent=1))
        return 0
    if has_classes and is_small(federation):
        console.print(grid(federation))
        print_raw(console, legend(federation))
    made = plain_table()
    for key, value in statistics(federation).items():
        found = value.items() if isinstance(value, dict) else [("", value)]
        said = "  ".join(f"{name} {_number(inner)}".strip() for name, inner in found)
        made.add_row(Text(WORDS.get(key, key), style="bold"), said)
    console.print(made)
    console.print()
    drawn = f"figure: {relpath(path)}" if has_classes else "no figure: the targets are not class numbers"
    print_raw(console, drawn)
    return 0


def picture_path(given: Path | str) -> Path:
    """The path of a figure.

    Raises:
        ConfigError: for an unknown format, or if there is a file already.
    """
    path = Path(given)
    if (kind := path.suffix.lstrip(".")) not in FORMATS:
        raise ConfigError(f"the figure {str(path)!r} has no known format; {nearest(kind, FORMATS)}")
    if path.exists():
        raise ConfigError(f"there is a file {str(path)!r} already; choose another --out, or remove it first.")
    return path


def free(name: str) -> Path:
    """A path of that name; if there is one already, the first free of name-2, name-3 and so on."""
    first = Path(name)
    numbered = (first.with_stem(f"{first.stem}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], numbered) if not path.exists())


def write_picture(path: Path, draw: Callable[[], Any]) -> None:
    """Draw into a file, whose folder is created.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw()
    except OSError as error:
        raise ConfigError(f"the figure {str(path)!r} cannot be written: {error.strerror}.") from error


def is_small(federation: Federation) -> bool:
    """Whether the table of clients and classes fits a terminal."""
    return len(federation) <= MOST_CLIENTS and federation.classes <= MOST_CLASSES


def grid(federation: Federation) -> Table:
    """A table of clients by labels; the height of a block is the number of samples."""
    classes, split = federation.classes, federation.train
    keys = split.index.owners * classes + split.arrays.y.numpy()[split.index.rows]
    counts = np.bincount(keys, minlength=len(federation) * classes).reshape(-1, classes)  # [K, C]
    most = max(counts.max(), 1)
    names = split.arrays.names
    heads = [names[c] if names and len(names[c]) == 1 else str(c % 10) for c in range(classes)]
    made = plain_table("client", "samples", " ".join(heads), numbers=("client", "samples"))
    for client, row in enumerate(counts):
        blocks = (LEVELS[-(-int(n) * (len(LEVELS) - 1) // most)] for n in row)
        name = federation.names[client] if federation.names else str(client)
        made.add_row(name, str(row.sum()), Text(" ".join(blocks), style="cyan"))
    return made


def legend(federation: Federation) -> str:
    """The names of the classes that a ``grid`` numbers; empty if there are none, or it shows them."""
    names = federation.train.arrays.names
    numbered = any(len(name) > 1 for name in names)
    return f"classes: {', '.join(f'{c} {name}' for c, name in enumerate(names))}\n" if numbered else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
