"""``fedloom list``: tables of all choices and settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.cli.catalogue import look_up
from fedloom.experiment.console import make_console, plain_table, print_raw


def command(arguments: argparse.Namespace) -> int:
    """Print a table of one kind, or the details of one name."""
    console, pieces = make_console(), look_up(arguments.words)
    if arguments.json:
        print_raw(console, json.dumps(plain(pieces), indent=1, ensure_ascii=False))
        return 0
    for number, piece in enumerate(pieces):
        for one in shown(piece, number):
            console.print(one)
    return 0


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
