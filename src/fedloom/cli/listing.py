"""``fedloom list``: tables of all choices and settings.

They follow from the installed code alone, so that what was shown before is read from a file, without importing PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.experiment.atomic import write_whole
from fedloom.experiment.console import make_console, plain_table, print_raw

PACKAGE = Path(__file__).parents[1]


def command(arguments: argparse.Namespace) -> int:
    """Print a table of one kind, or the details of one name."""
    console, pieces = make_console(), remembered(arguments.words)
    if arguments.json:
        print_raw(console, json.dumps(plain(pieces), indent=1, ensure_ascii=False))
        return 0
    for number, piece in enumerate(pieces):
        for one in shown(piece, number):
            console.print(one)
    return 0


def remembered(words: Sequence[str]) -> list[dict[str, Any]]:
    """What ``catalogue.look_up`` returns, from the file of an earlier call if the code has not changed since."""
    if "torch" in sys.modules:  # no time to save, and the caller may have registered entries
        return import_module("fedloom.cli.catalogue").look_up(words)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom" / "lists"
    path = home / f"{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}.json"
    code = fingerprint()
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if (stored["code"], stored["words"]) == (code, list(words)):
            return stored["pieces"]
    pieces = import_module("fedloom.cli.catalogue").look_up(words)
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"code": code, "words": list(words), "pieces": pieces}).encode())
    return pieces


def fingerprint() -> str:
    """Changes whenever a file of the package does."""
    found = sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in PACKAGE.rglob("*.py"))
    return hashlib.sha256(repr((found, sys.version)).encode()).hexdigest()


def plain(pieces: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The same for programs: rows of tables in one list, those of a command with its name."""
    found = []
    for piece in pieces:
        rows = piece.get("rows", [piece])
        found += [{"command": piece["title"], **row} for row in rows] if "title" in piece else rows
    return found


def shown(piece: Mapping[str, Any], number: int) -> Iterator[Table | Text]:
    """A table, or the details of a name as text and tables."""
    if "rows" in piece:
        if piece.get("title"):
            yield Text(f"\n{piece['title']}:")
        yield table(piece["rows"])
        return
    yield Text("\n" * bool(number) + f"{piece['key']}={piece['name']}", style="bold cyan")
    yield Text(piece["description"])
    for rows in (piece["settings"], piece["parts"]):
        if rows:
            yield Text()
            yield table(rows)
    if piece["citations"]:
        yield Text("\n" + "\n\n".join(piece["citations"]), style="dim")


def table(rows: Sequence[Mapping[str, str]]) -> Table:
    """A table of rows with equal keys; a slot is printed once."""
    made, before = plain_table(*rows[0]), ""
    for row in rows:
        cells = [Text(value, style="bold cyan" if head in ("name", "key") else "") for head, value in row.items()]
        if "slot" in row:
            cells[0] = Text("" if row["slot"] == before else row["slot"], style="bold")
            before = row["slot"]
        made.add_row(*cells)
    return made
