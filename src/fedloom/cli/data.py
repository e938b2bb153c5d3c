"""``fedloom data`` and ``fedloom partition``: the data sets on this machine, and how data are spread over clients."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.base.errors import ConfigError, DataError, nearest
from fedloom.base.files import writing
from fedloom.config import Config, resolve
from fedloom.config.keys import DATA, RUN, Shared, build_federation
from fedloom.config.overrides import one_recipe, split_words
from fedloom.core.federation import Federation
from fedloom.core.targets import are_numbers
from fedloom.data import Source, save_partition, sources, statistics
from fedloom.data.sources.files import Files, files_of, roots
from fedloom.experiment.console import format_size, make_console, plain_table, print_raw, relpath, show_warnings

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


def partition(arguments: argparse.Namespace) -> int:
    """Draw labels by client; print them and their statistics."""
    console = make_console()
    show_warnings(console)
    config, out, path = config_and_path(arguments, "partition.png")
    federation = build_federation(config)
    if arguments.save is not None:
        save_partition(federation, arguments.save)
    has_classes = federation.train.arrays.has_classes
    message = "no figure: the targets are not class numbers"
    if has_classes:
        message = f"figure: {relpath(path)}"
        try:
            from fedloom.data.plots import plot_labels
        except ConfigError as error:
            if out:
                raise
            message = f"no figure: {error}"
        else:
            write_picture(path, lambda: plot_labels(federation, path))
    if arguments.json:
        figure = str(path.resolve()) if path.exists() else None
        print_raw(console, json.dumps({"statistics": statistics(federation), "figure": figure}, indent=1))
        return 0
    show_clients(console, federation)
    console.print()
    print_raw(console, message)
    return 0


def config_and_path(arguments: argparse.Namespace, name: str) -> tuple[Config, Path | str | None, Path]:
    """The configuration of a command line, the path of the figure that it asks for, if any, and the path to use."""
    recipes, words = split_words(arguments.words)
    config = resolve(words, one_recipe(recipes))
    out = arguments.out or config.out
    return config, out, picture_path(out) if out else free_path(name)


def show_clients(console: Console, federation: Federation) -> None:
    """Print which client holds which labels, if that fits a terminal, and statistics of all clients."""
    is_small = len(federation) <= MOST_CLIENTS and federation.classes <= MOST_CLASSES
    if federation.train.arrays.has_classes and is_small:
        console.print(grid(federation))
        print_raw(console, legend(federation))
    table = plain_table()
    table.add_row(Text("partition", style="bold"), federation.provenance["partition"]["name"])
    for key, value in statistics(federation).items():
        configs = value.items() if isinstance(value, dict) else [("", value)]
        text = "  ".join(f"{name} {_number(inner)}".strip() for name, inner in configs)
        table.add_row(Text(WORDS.get(key, key), style="bold"), text)
    console.print(table)


def picture_path(out: Path | str) -> Path:
    """The path of a figure."""
    path = Path(out)
    if (kind := path.suffix.lstrip(".")) not in FORMATS:
        raise ConfigError(f"the figure {str(path)!r} has no known format; {nearest(kind, FORMATS)}")
    if path.exists():
        raise ConfigError(f"there is a file {str(path)!r} already; choose another --out, or remove it first.")
    return path


def free_path(name: str) -> Path:
    """A path of that name; if there is one already, the first free of name-2, name-3 and so on."""
    first = Path(name)
    numbered = (first.with_stem(f"{first.stem}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], numbered) if not path.exists())


def write_picture(path: Path, draw: Callable[[], Any]) -> None:
    """Draw into a file, whose folder is created."""
    with writing(f"the figure {str(path)!r}", ConfigError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draw()


def grid(federation: Federation) -> Table:
    """A table of clients by labels; the height of a block is the number of samples."""
    classes, split = federation.classes, federation.train
    keys = split.index.owners * classes + split.arrays.y.numpy()[split.index.rows]
    counts = np.bincount(keys, minlength=len(federation) * classes).reshape(-1, classes)  # [K, C]
    most = max(counts.max(), 1)
    names = split.arrays.names
    heads = [names[c] if names and len(names[c]) == 1 else str(c % 10) for c in range(classes)]
    table = plain_table("client", "samples", " ".join(heads), numbers=("client", "samples"))
    for client, row in enumerate(counts):
        blocks = (LEVELS[-(-int(n) * (len(LEVELS) - 1) // most)] for n in row)
        name = federation.names[client] if federation.names else str(client)
        table.add_row(name, str(row.sum()), Text(" ".join(blocks), style="cyan"))
    return table


def legend(federation: Federation) -> str:
    """The names of the classes that a ``grid`` numbers; empty if there are none, or it shows them."""
    names = federation.train.arrays.names
    numbered = any(len(name) > 1 for name in names)
    return f"classes: {', '.join(f'{c} {name}' for c, name in enumerate(names))}\n" if numbered else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def command(arguments: argparse.Namespace) -> int:
    """List all data sets, or describe one, with figures on request."""
    console = make_console()
    show_warnings(console)
    if not arguments.words:
        if arguments.out:
            raise ConfigError("--out needs the name of a data set, like: fedloom data mnist --out mnist.png.")
        console.print(overview())
        console.print()
        print_raw(console, f"searched: {' and '.join(map(str, roots()))}")
        return 0
    typed, *words = arguments.words
    if "=" in typed:
        raise ConfigError(f"fedloom data takes the name of a data set first; {nearest(typed, sources.names())}")
    name, _ = sources.shorthand(typed)
    sources[name]  # refuses unknown names
    path = arguments.out or next((word.removeprefix("out=") for word in words if word.startswith("out=")), None)
    out = picture_path(path) if path else None
    clients = picture_path(out.with_name(f"{out.stem}-clients{out.suffix}")) if out else None
    source, federation = load(typed, words)
    show(console, name, source, federation, moved=any("root=" in word for word in words))
    if out and clients:
        from fedloom.data.plots import plot_labels, plot_samples  # which needs an extra

        draw(console, "samples", out, lambda: plot_samples(source.train, source.name, out))
        draw(console, "clients", clients, lambda: plot_labels(federation, clients))
    return 0


def overview() -> Table:
    """A table of all sources: whether their files were found, their size, and where they are or are expected."""
    table = plain_table("data", "found", "size", "files", numbers=("size",))
    for entry in sources:
        files = files_of(entry)
        if files is None:
            needs = any(p.default is p.empty for p in entry.parameters.values())
            row = ("yours" if needs else "always", "", "any file, with data.path=…" if needs else "none needed")
        elif paths := files.look():
            row = ("yes", format_size(sum(map(size_of, paths))), folder_of(paths))
        else:
            row = ("no", "", f"expected: {files.expected()}")
        table.add_row(Text(entry.name, style="bold cyan"), *map(Text, row))
    return table


def folder_of(paths: list[Path]) -> str:
    """The folder that holds all of them, or the file."""
    return relpath(paths[0]) if len(paths) == 1 else f"{relpath(Path(os.path.commonpath(paths)))}/"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder, without FedLoom's own caches."""
    if path.is_file():
        return path.stat().st_size
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("fedloom-"))
    return sum(file.stat().st_size for file in files)


def load(name: str, overrides: list[str]) -> tuple[Source, Federation]:
    """The source and its federation; natural clients, if there are any, unless a partition is given."""
    recipes, words = split_words([f"data={name}", "held_out=0", *overrides])
    base = one_recipe(recipes)
    shared = Shared()
    source = shared("source", RUN.resolve(words, base)["data"], DATA.instantiate)
    has_partition = any(word.partition("=")[0].partition(".")[0] == "partition" for word in words)
    if source.groups is not None and not has_partition:
        words = ["partition=natural", *words]
    return source, build_federation(RUN.resolve(words, base), shared)


def show(console: Console, name: str, source: Source, federation: Federation, moved: bool) -> None:
    """Print the description of a source."""
    console.print(Text(f"{name}: {sources[name].summary.replace('``', '')}", style="bold"))
    print_raw(console, f"licence: {source.licence}")
    if (files := files_of(sources[name])) and not moved and (paths := files.look()):
        size = format_size(sum(map(size_of, paths)))
        print_raw(console, f"files: {folder_of(paths)} ({size}{checksums(files, paths)})")
    console.print()
    console.print(splits(source))
    console.print()
    show_clients(console, federation)


def checksums(files: Files, paths: list[Path]) -> str:
    """Text on whether files match their published checksums."""
    message = ""
    for path in paths:
        kind, _, expected = files.checksums.get(path.name, "").partition(" ")
        if expected:
            with open(path, "rb") as file:
                digest = hashlib.new(kind)
                for piece in iter(lambda: file.read(1 << 20), b""):
                    digest.update(piece)
            same = digest.hexdigest() == expected
            message += f"; {path.name} {'matches' if same else 'does not match'} its published {kind}"
    return message


def splits(source: Source) -> Table:
    """A table of the splits: samples, shapes, values and targets."""
    table = plain_table("", "samples", "shape", "values", "targets", "memory", numbers=("samples", "memory"))
    for title, arrays in (("training pool", source.train), ("common test set", source.test)):
        if not len(arrays):
            table.add_row(title, "0", "", "", "", "")
            continue
        x, y = arrays.x, arrays.y
        values = f"{str(x.dtype).removeprefix('torch.')}, {x.min().item():.3g} to {x.max().item():.3g}"
        targets = f"{arrays.classes} classes" + (f" at {y.shape[1]} places" if y.ndim > 1 else "")
        targets = "numbers" if are_numbers(y) else targets
        shape = " × ".join(map(str, x.shape[1:]))
        table.add_row(title, f"{len(x):,}", shape, values, targets, format_size(x.nbytes + y.nbytes))
    return table


def draw(console: Console, what: str, path: Path, make: Callable[[], object]) -> None:
    """Write a figure and print its path, or why it cannot be drawn."""
    try:
        write_picture(path, make)
        print_raw(console, f"{what}: {relpath(path)}")
    except DataError as error:
        print_raw(console, f"{what}: {error}")
