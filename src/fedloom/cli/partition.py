"""``fedloom partition``: who holds which data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.federation import Federation
from fedloom.data import label_picture, statistics
from fedloom.experiment.config import build_federation, resolve
from fedloom.experiment.config.files import split_words
from fedloom.experiment.console import make_console, print_raw, relpath, show_warnings

FORMATS = ("png", "svg", "pdf")
MOST_CLIENTS, MOST_CLASSES = 30, 26
LEVELS = " ▁▂▃▄▅▆▇█"


def command(arguments: argparse.Namespace) -> int:
    """Draw the label-by-client picture, and print it and its statistics."""
    console = make_console()
    show_warnings(console)
    base, overrides = split_words(arguments.words)
    config = resolve(overrides, base)
    path = Path(arguments.out) if arguments.out else config.out or Path("partition.png")
    if path.suffix.lstrip(".") not in FORMATS:
        raise ConfigError(f"the picture {str(path)!r} has no known format; {nearest(path.suffix.lstrip('.'), FORMATS)}")
    federation = build_federation(config)
    y = federation.train.arrays.y
    drawable = not y.is_floating_point() and y.ndim == 1
    if drawable:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            label_picture(federation, path)
        except OSError as error:
            raise ConfigError(f"the picture {str(path)!r} cannot be written: {error.strerror}.") from error
        if len(federation) <= MOST_CLIENTS and federation.classes <= MOST_CLASSES:
            console.print(grid(federation))
            console.print()
    console.print(table(statistics(federation)))
    console.print()
    where = f"picture: {relpath(path)}" if drawable else "no picture: the targets are not class numbers"
    print_raw(console, where)
    return 0


def grid(federation: Federation) -> Table:
    """Clients by labels; the height of a block is the number of samples."""
    classes = federation.classes
    split = federation.train
    keys = split.index.owners * classes + split.arrays.y.numpy()[split.index.rows]
    counts = np.bincount(keys, minlength=len(federation) * classes).reshape(-1, classes)  # [K, C]
    most = max(counts.max(), 1)
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    made.add_column("client", justify="right")
    made.add_column("samples", justify="right")
    names = split.arrays.names
    heads = [names[c] if names and len(names[c]) == 1 else str(c % 10) for c in range(classes)]
    made.add_column(" ".join(heads))
    for client, row in enumerate(counts):
        blocks = (LEVELS[-(-int(n) * (len(LEVELS) - 1) // most)] for n in row)
        name = federation.names[client] if federation.names else str(client)
        made.add_row(name, str(row.sum()), Text(" ".join(blocks), style="cyan"))
    return made


def table(found: dict[str, Any]) -> Table:
    """The statistics as two columns."""
    made = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    made.add_column(style="bold")
    made.add_column()
    words = {
        "samples": "training samples a client",
        "validation": "validation samples",
        "held_out": "clients' own test samples",
        "test": "common test samples",
        "classes_per_client": "classes a client",
        "label_entropy": "label entropy a client",
        "entropy_of_all": "label entropy of all",
    }
    for key, value in found.items():
        if isinstance(value, dict):
            said = "  ".join(f"{name} {_number(inner)}" for name, inner in value.items())
        else:
            said = _number(value)
        made.add_row(words.get(key, key), said)
    return made


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
