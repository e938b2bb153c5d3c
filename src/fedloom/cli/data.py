"""``fedloom data``: which data sets are here, and what is in one of them."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli.partition import FORMATS, MOST_CLASSES, MOST_CLIENTS, grid
from fedloom.core.errors import ConfigError, DataError, nearest
from fedloom.core.federation import Federation
from fedloom.data import Source, federate, label_picture, partitions, sources
from fedloom.data.sources.files import PLACES, Files, roots
from fedloom.data.sources.gallery import gallery
from fedloom.experiment.config import resolve
from fedloom.experiment.config.files import split_words
from fedloom.experiment.config.values import typed
from fedloom.experiment.console import make_console, print_raw, relpath, show_warnings


def command(arguments: argparse.Namespace) -> int:
    """Print what is here; or, of one data set, what is in it, with pictures if asked for."""
    console = make_console()
    show_warnings(console)
    if not arguments.words:
        if arguments.out:
            raise ConfigError("--out needs the name of a data set, like: fedloom data mnist --out mnist.png.")
        console.print(overview())
        console.print()
        print_raw(console, f"looked in: {' and '.join(map(str, roots()))}")
        return 0
    name, *overrides = arguments.words
    if "=" in name:
        raise ConfigError(f"fedloom data takes the name of a data set first; {nearest(name, sources.names())}")
    sources[name]  # refuses unknown names
    out = Path(arguments.out) if arguments.out else None
    if out and out.suffix.lstrip(".") not in FORMATS:
        raise ConfigError(f"the picture {str(out)!r} has no known format; {nearest(out.suffix.lstrip('.'), FORMATS)}")
    source, federation = load(name, overrides)
    show(console, name, source, federation, overrides)
    if out:
        draw(console, source, federation, out)
    return 0


def overview() -> Table:
    """Every source: whether its files are here, how large they are, and where they are or would be."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    made.add_column("data", no_wrap=True)
    made.add_column("here", no_wrap=True)
    made.add_column("size", justify="right", no_wrap=True)
    made.add_column("files", overflow="fold")
    for entry in sources:
        files = PLACES.get(entry.name)
        if files is None:
            needs = any(p.default is p.empty for p in entry.parameters.values())
            row = ("yours" if needs else "always", "", "any file, with data.path=…" if needs else "none needed")
        elif paths := files.look():
            row = ("yes", said_size(sum(map(size_of, paths))), where(files, paths))
        else:
            row = ("no", "", f"expected: {files.expected()}")
        made.add_row(Text(entry.name, style="bold cyan"), *map(Text, row))
    return made


def where(files: Files, paths: list[Path]) -> str:
    """The folder that holds all of them, or the file."""
    return relpath(paths[0]) if len(paths) == 1 else f"{relpath(Path(os.path.commonpath(paths)))}/"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; what was decoded and kept there is not counted."""
    if path.is_file():
        return path.stat().st_size
    found = 0
    for folder, _, names in os.walk(path):
        found += sum(os.stat(os.path.join(folder, n)).st_size for n in names if not n.startswith("fedloom-"))
    return found


def said_size(size: float) -> str:
    """Bytes in words.

    >>> said_size(999), said_size(184_801_644), said_size(6.9e9)
    ('1 kB', '185 MB', '6.9 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{max(size / 1e3, 1):.0f} kB"


def load(name: str, overrides: list[str]) -> tuple[Source, Federation]:
    """The source, and its training pool dealt to clients: the natural ones if it has them and none are asked for."""
    base, words = split_words([f"data={name}", *overrides])
    config = resolve(words, base)
    settings = {key: value for key, value in config["data"].items() if key != "name"}
    source = sources.make(name, **typed(sources[name].parameters, settings))
    chosen, clients = dict(config["partition"]), config["clients"]
    asked = {word.partition("=")[0] for word in words}
    natural = source.groups is not None or source.federation is not None
    if natural and not any(key.partition(".")[0] == "partition" for key in asked):
        chosen, clients = {"name": "natural"}, clients if "clients" in asked else None
    kind = chosen.pop("name")
    partition = partitions.make(kind, **typed(partitions[kind].parameters, chosen))
    return source, federate(source, partition, clients, config["seed"], held_out=0.0)


def show(console: Console, name: str, source: Source, federation: Federation, overrides: list[str]) -> None:
    """All that is known of it, in words and tables."""
    console.print(Text(f"{name}: {sources[name].summary.replace('``', '')}", style="bold"))
    print_raw(console, f"licence: {source.licence}")
    if (files := PLACES.get(name)) and not any("root=" in word for word in overrides) and (paths := files.look()):
        about = f"files: {where(files, paths)} ({said_size(sum(map(size_of, paths)))}{checked(files, paths)})"
        print_raw(console, about)
    console.print()
    console.print(splits(source))
    console.print()
    console.print(statistics_table(source, federation))
    y = source.train.y
    drawable = y.ndim == 1 and not y.is_floating_point()
    if drawable and len(federation) <= MOST_CLIENTS and federation.classes <= MOST_CLASSES:
        console.print()
        console.print(grid(federation))


def checked(files: Files, paths: list[Path]) -> str:
    """Whether files with a published checksum have it."""
    said = ""
    for path in paths:
        kind, _, wanted = files.checksums.get(path.name, "").partition(" ")
        if wanted:
            with open(path, "rb") as file:
                same = hashlib.file_digest(file, kind).hexdigest() == wanted
            said += f"; {path.name} {'has' if same else 'does not have'} its published {kind}"
    return said


def splits(source: Source) -> Table:
    """Shapes and classes."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for head in ("", "samples", "shape", "values", "targets", "memory"):
        made.add_column(head, justify="right" if head in ("samples", "memory") else "left", overflow="fold")
    for title, arrays in (("training pool", source.train), ("common test set", source.test)):
        if not len(arrays):
            made.add_row(title, "0", "", "", "", "")
            continue
        x, y = arrays.x, arrays.y
        kind = str(x.dtype).removeprefix("torch.")
        values = f"{kind}, {x.min().item():.3g} to {x.max().item():.3g}"
        aim = (
            "numbers"
            if y.is_floating_point()
            else f"{arrays.classes} classes" + (f" at {y.shape[1]} places" if y.ndim > 1 else "")
        )
        shape = " × ".join(map(str, x.shape[1:]))
        made.add_row(title, f"{len(x):,}", shape, values, aim, said_size(x.nbytes + y.nbytes))
    return made


def statistics_table(source: Source, federation: Federation) -> Table:
    """Clients, samples, and how many each client has: mean, standard deviation over clients, least and most."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for head in ("clients", "", "samples", "mean", "std", "min", "max"):
        made.add_column(head, justify="right" if head else "left")
    sizes = federation.train.index.sizes
    kind: dict[str, Any] = federation.provenance.get("partition", {})
    row = (f"{sizes.mean():,.2f}", f"{np.std(sizes):,.2f}", f"{sizes.min():,}", f"{sizes.max():,}")
    made.add_row(f"{len(sizes):,}", str(kind.get("name", "its own")), f"{sizes.sum():,}", *row)
    return made


def draw(console: Console, source: Source, federation: Federation, out: Path) -> None:
    """Samples by class into ``out``, and labels by client beside it; what cannot be drawn is said."""
    beside = out.with_name(f"{out.stem}-clients{out.suffix}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for title, path, make in (
            ("samples", out, lambda: gallery(source.train, source.name, out)),
            ("clients", beside, lambda: label_picture(federation, beside)),
        ):
            try:
                make()
                said = f"{title}: {relpath(path)}"
            except DataError as error:
                said = f"{title}: {error}"
            print_raw(console, said)
    except OSError as error:
        raise ConfigError(f"the picture {str(out)!r} cannot be written: {error.strerror}.") from error
