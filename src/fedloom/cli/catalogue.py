"""All choices and settings, read from registries and signatures: what ``fedloom list`` shows."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.applications import applications, at
from fedloom.base.documentation import bibtex, documentation
from fedloom.base.errors import ConfigError, FedLoomError, nearest
from fedloom.base.registry import Entry
from fedloom.base.settings import EMPTY, format_unquoted, signature, type_in_words
from fedloom.config.keys import METHOD, RUN
from fedloom.config.schema import CommandSchema
from fedloom.config.sections import Choice, Record, Value
from fedloom.core.method import Method
from fedloom.core.slots import label
from fedloom.data import augmentations
from fedloom.experiment.console import make_console, plain_table, print_raw
from fedloom.metrics import registry as metrics

SCHEMAS: tuple[CommandSchema, ...] = tuple(
    at(application.schema) for application in applications().values() if application.schema
)
Row = dict[str, str]
Piece = dict[str, Any]
"""A table, ``rows`` with a ``title`` if there are several, or the details of a name."""

KINDS: dict[str, list[tuple[str, Choice]]] = {
    key if key in ("data", "devices") else f"{key}s": [(key, section)]
    for key, section in RUN.sections.items()
    if isinstance(section, Choice)
}
KINDS["parts"] = [(f"method.{slot}", choice) for slot, choice in METHOD.slots.items()]
KINDS |= {
    slot[:-1] + "ies" if slot.endswith("y") else f"{slot}s": [(f"method.{slot}", choice)]
    for slot, choice in METHOD.slots.items()
}
KINDS |= {"augmentations": [("augment", Choice(augmentations))], "metrics": []}
KINDS |= {
    kind: [(c.key, at(c.place))] for application in applications().values() for kind, c in application.choices.items()
}
KINDS["settings"] = []
"""The choices of each kind, with their keys."""


def look_up(words: Sequence[str]) -> list[Piece]:
    """What ``fedloom list`` shows for these words: a kind, a name, or both; plain data."""
    typed = words[0].lower()
    kind = next((kind for kind in KINDS if typed in (kind, kind.removesuffix("s"), kind[:-3] + "y")), "")
    everything = {name for kind in KINDS for name in names_of(kind)}
    if not kind and not {typed, typed.replace("-", "_")} & everything:
        if typed in {schema.command for schema in SCHEMAS}:
            raise ConfigError(f"fedloom {typed} is a command; its keys are listed by fedloom list settings {typed}.")
        close = difflib.get_close_matches(typed, [*KINDS, *everything], n=1)
        hint = f"did you mean {close[0]!r}? Lists are: {', '.join(KINDS)}." if close else nearest(words[0], KINDS)
        raise ConfigError(f"there is no list and no entry named {words[0]!r}; {hint}")
    names = words[1:] if kind else words
    if len(names) > 1:
        raise ConfigError("fedloom list takes one kind and one name, like fedloom list methods feddyn.")
    if kind == "settings":
        return [{"title": title, "rows": list(rows)} for title, rows in settings(*names)]
    if names and kind != "metrics":
        return list(details(kind, names[0]))
    return [{"rows": [*metric_rows(*names)] if kind == "metrics" else [*rows_of(kind)]}]


def names_of(kind: str) -> list[str]:
    """All names of a kind."""
    return metrics.names() if kind == "metrics" else [n for _, choice in KINDS[kind] for n in choice.registry.names()]


def rows_of(kind: str) -> Iterator[Row]:
    """A row for each name of a kind: description, settings with defaults; for methods also their parts."""
    for key, choice in KINDS[kind]:
        for entry in choice.registry:
            defaults = ((name, p.default) for name, p in choice.parameters(entry.name).items())
            line = "  ".join(name if value is EMPTY else f"{name}={format_unquoted(value)}" for name, value in defaults)
            row = {"slot": key.removeprefix("method.")} if kind == "parts" else {}
            row |= {"name": entry.name, "description": entry.summary.replace("``", ""), "settings and defaults": line}
            yield row | ({"parts": parts_of(preset(entry))} if kind == "methods" else {})


def metric_rows(name: str = "") -> Iterator[Row]:
    """A row for each metric, or for one."""
    for metric in map(metrics.lookup, [name] if name else metrics.names()):
        better = {"max": "larger", "min": "smaller"}[metric.direction]
        yield {
            "name": metric.name,
            "description": metric.summary.replace("``", ""),
            "better": better,
            "targets": ", ".join(metric.suits),
        }


def settings(of: str = "") -> Iterator[tuple[str, Iterator[Row]]]:
    """All keys with default, type and meaning, by title; of other commands those that differ from ``fedloom run``.

    Args:
        of: a command, for all of its keys, or a section, like ``judge``.
    """
    commands = {schema.command: schema for schema in SCHEMAS}
    if of in commands:
        yield f"fedloom {of}", keys_of(commands[of], lambda key: True)
    elif of:
        owners = [schema for schema in SCHEMAS if of in {*schema.sections, *schema.aliases}]
        if not owners:
            sections = {key for schema in SCHEMAS for key in (*schema.sections, *schema.aliases)}
            raise ConfigError(f"no command and no key is called {of!r}; {nearest(of, {*commands, *sections})}")
        yield f"fedloom {owners[0].command}", keys_of(owners[0], lambda key: key == of)
    else:
        yield "", keys_of(RUN, lambda key: True)
        for schema in SCHEMAS[1:]:
            same = {key for key, section in schema.sections.items() if section == RUN.sections.get(key)}
            differing = keys_of(schema, lambda key, same=same: key not in same)
            yield f"fedloom {schema.command}, where it differs from fedloom run", differing


def keys_of(schema: CommandSchema, selected: Callable[[str], bool]) -> Iterator[Row]:
    """A row for each key of a command."""
    values = schema.resolve().values
    for short, key in schema.aliases.items():
        if selected(short):
            choice, _, setting = key.partition(".")
            yield key_row(short, values[choice][setting], "see there", f"short for {key}")
    for key, section in schema.sections.items():
        if not selected(key):
            continue
        if isinstance(section, Choice):
            kind = next(
                kind for kind, choices in KINDS.items() if any(c.registry is section.registry for _, c in choices)
            )
            yield key_row(key, values[key]["name"], "a name", f"see fedloom list {kind}")
        elif isinstance(section, Value):
            meanings = documentation(section.owner)[1]
            yield key_row(key, values[key], type_in_words(section.parameter.annotation), meanings.get(key, ""))
        elif isinstance(section, Record):
            meanings = documentation(section.factory)[1]
            for name, p in signature(section.factory).items():
                yield key_row(f"{key}.{name}", values[key][name], type_in_words(p.annotation), meanings.get(name, ""))


def key_row(key: str, value: Any, kind: str, meaning: str) -> Row:
    """One key with its default, type and meaning, in which Python's ``None`` is the ``null`` that is typed."""
    meaning = re.sub(r"\bNone\b", "null", meaning)
    return {
        "key": key,
        "default": "required" if value is EMPTY else format_unquoted(value),
        "type": kind,
        "meaning": meaning,
    }


def details(kind: str, name: str) -> Iterator[dict[str, Any]]:
    """The details of a name: description, settings, parts, citation; once for each key that takes it."""
    pairs = {
        (key, choice.registry.kind): choice
        for candidate in KINDS
        if kind in (candidate, "")
        for key, choice in KINDS[candidate]
    }
    matches = [(key, c) for (key, _), c in pairs.items() if c.registry.canonical(name) in c.registry]
    is_metric = not kind and name.lower().replace("-", "_") in names_of("metrics")
    if not matches and not is_metric:
        raise ConfigError(f"there is no {kind.removesuffix('s')} {name!r}; {nearest(name, names_of(kind))}")
    for key, choice in matches:
        entry = choice.registry[name]
        text, helps = documentation(entry.factory)
        prefix = f"{key}.{entry.name}" if key == "method.objective" else key
        keys = [
            key_row(f"{prefix}.{setting}", p.default, type_in_words(p.annotation), helps.get(setting, ""))
            for setting, p in choice.parameters(entry.name).items()
        ]
        method = preset(entry) if choice is METHOD else None
        citations = list(method.citations()) if method else [bibtex(getattr(entry.factory, "citation", ""))]
        yield {"key": key, "name": entry.name, "description": text, "settings": keys,
               "parts": composition(method) if method else [], "citations": [c for c in citations if c]}  # fmt: skip
    if is_metric:
        yield {"rows": [*metric_rows(name)]}


def composition(method: Method) -> list[Row]:
    """The parts of a method."""
    return [
        {
            "slot": place.partition(".")[0],
            "part": label(part),
            "description": (inspect.getdoc(part) or "").partition("\n")[0],
        }
        for place, part in method.parts.items()
    ]


def preset(entry: Entry[Method]) -> Method | None:
    """A method with its defaults; None if some settings have none."""
    try:
        return entry.make()
    except FedLoomError:
        return None


def parts_of(method: Method | None) -> str:
    """The parts of a method that are not the identity, other than cross entropy."""
    if method is None:
        return ""
    labels = {place.partition(".")[0]: label(part) for place, part in method.parts.items() if not part.is_identity}
    labels["objective"] = "+".join(map(label, method.objective))
    return "  ".join(
        f"{slot}={name}" for slot, name in labels.items() if (slot, name) != ("objective", "cross_entropy")
    )


def command(arguments: argparse.Namespace) -> int:
    """Print a table of one kind, or the details of one name."""
    console, pieces = make_console(), look_up(arguments.words)
    if arguments.json:
        print_raw(console, json.dumps(plain(pieces), indent=1, ensure_ascii=False))
        return 0
    for number, piece in enumerate(pieces):
        for line in render(piece, number):
            console.print(line)
    return 0


def plain(pieces: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The pieces for programs: the rows of all tables in one list, with the name of their command if there is one."""
    entries = []
    for piece in pieces:
        rows = piece.get("rows", [piece])
        entries += [{"command": piece["title"], **row} for row in rows] if "title" in piece else rows
    return entries


def render(piece: Mapping[str, Any], number: int) -> Iterator[Table | Text]:
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
    grid, before = plain_table(*rows[0]), ""
    for row in rows:
        cells = [Text(value, style="bold cyan" if head in ("name", "key") else "") for head, value in row.items()]
        if "slot" in row:
            cells[0] = Text("" if row["slot"] == before else row["slot"], style="bold")
            before = row["slot"]
        grid.add_row(*cells)
    return grid
