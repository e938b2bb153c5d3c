"""``fedloom list``: what there is to choose from, read from the registries."""

from __future__ import annotations

import argparse
import difflib
import inspect
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.core.documentation import documentation
from fedloom.core.errors import ConfigError, FedLoomError, nearest
from fedloom.core.method import Method
from fedloom.core.registry import Entry, Registry
from fedloom.core.slots import SLOTS, label
from fedloom.experiment.config import resolve, schema
from fedloom.experiment.config.values import default, expected, shown
from fedloom.experiment.console import make_console

KINDS = {
    "methods": ("method=", "named compositions of parts"),
    "parts": ("method.<slot>=", "what methods are made of; any can replace another in its slot"),
    "data": ("data=", "where samples come from"),
    "partitions": ("partition=", "who holds which samples"),
    "noises": ("noise=", "wrong training labels"),
    "targets": ("target=", "label distributions for which a model is wanted"),
    "models": ("model=", "networks"),
    "engines": ("engine=", "how clients' work is carried out"),
    "settings": ("", "all other keys"),
}
GROUP_OF = {
    "methods": "method",
    "data": "data",
    "partitions": "partition",
    "noises": "noise",
    "targets": "target",
    "models": "model",
    "engines": "engine",
}


def command(arguments: argparse.Namespace) -> int:
    """Print an overview, a table, or everything about one name."""
    console = make_console()
    words = list(arguments.words)
    if not words:
        overview(console)
        return 0
    kind = next((kind for kind in KINDS if words[0] in (kind, kind.removesuffix("s"))), None)
    if kind is None:
        everything = {entry.name for _, registry in registries("") for entry in registry}
        if len(words) > 1 or words[0] not in everything:
            close = difflib.get_close_matches(words[0], everything, n=1)
            hint = f"did you mean {close[0]!r}? Lists are: {', '.join(KINDS)}." if close else nearest(words[0], KINDS)
            raise ConfigError(f"there is nothing named {words[0]!r} to list; {hint}")
        words = ["", *words]
    if len(words) > 2:
        raise ConfigError("fedloom list takes one kind and one name, like fedloom list methods feddyn.")
    if len(words) == 2:
        details(console, kind or "", words[1])
    elif kind == "settings":
        console.print(settings_table())
    elif kind == "parts":
        console.print(parts_table())
    else:
        assert kind is not None
        console.print(table(kind))
    return 0


def registries(kind: str) -> list[tuple[str, Registry[Any]]]:
    """The registries of a kind, or all of them, each with the key that chooses from it."""
    groups = [(group, schema.GROUPS[group]) for listed, group in GROUP_OF.items() if kind in (listed, "")]
    slots = [(f"method.{slot}", registry) for slot, registry in SLOTS.items()] if kind in ("parts", "") else []
    return groups + slots


def overview(console: Console) -> None:
    """How many there are of each kind."""
    made = _plain_table()
    for kind, (key, what) in KINDS.items():
        names = [entry.name for _, registry in registries(kind) for entry in registry]
        made.add_row(f"fedloom list {kind}", Text(key), what + (f" ({len(set(names))})" if kind in GROUP_OF else ""))
    console.print(made)


def table(kind: str) -> Table:
    """All of one kind: name, what it is, settings with their defaults; for methods also their parts."""
    group = GROUP_OF[kind]
    made = _table("name", "what it is", "settings and their defaults", *(["parts"] if kind == "methods" else []))
    for entry in schema.GROUPS[group]:
        made.add_row(*_row(entry), *([Text(parts_of(entry))] if kind == "methods" else []))
    return made


def _row(entry: Entry[Any]) -> list[Text]:
    summary = entry.summary.replace("``", "")
    return [Text(entry.name, style="bold cyan"), Text(summary), Text(settings_of(entry))]


def parts_table() -> Table:
    """All parts by slot."""
    made = _table("slot", "name", "what it does", "settings and their defaults")
    for slot, registry in SLOTS.items():
        for number, entry in enumerate(registry):
            first = Text(slot if not number else "", style="bold")
            made.add_row(first, *_row(entry), end_section=number == len(registry) - 1)
    return made


def settings_table() -> Table:
    """All keys that are not chosen by name, with type, default and meaning."""
    made = _table("key", "default", "type", "meaning")
    values = resolve().values
    for group in schema.GROUPS:
        listed = next(kind for kind, g in GROUP_OF.items() if g == group)
        made.add_row(Text(group, style="bold cyan"), values[group]["name"], "a name", f"see fedloom list {listed}")
    for key, scalar in schema.SCALARS.items():
        said = documentation(scalar.owner)[1].get(key, "")
        kind = expected(scalar.parameter.annotation)
        made.add_row(Text(key, style="bold cyan"), Text(_bare(values[key])), Text(kind), Text(said))
    for record, factory in schema.RECORDS.items():
        said = documentation(factory)[1]
        for name, parameter in schema.signature(factory).items():
            key, value = f"{record}.{name}", _bare(values[record][name])
            row = (Text(value), Text(expected(parameter.annotation)), Text(said.get(name, "")))
            made.add_row(Text(key, style="bold cyan"), *row)
    return made


def details(console: Console, kind: str, name: str) -> None:
    """Everything about one name: description, settings, parts, citation."""
    found = [(key, registry[name]) for key, registry in registries(kind) if name in registry]
    if not found:
        names = [entry.name for _, registry in registries(kind) for entry in registry]
        raise ConfigError(f"there is no {kind.removesuffix('s') or 'thing'} {name!r}; {nearest(name, set(names))}")
    for number, (key, entry) in enumerate(found):
        if number:
            console.rule(style="dim")
        text, helps = documentation(entry.factory)
        console.print(Text(f"{key}={entry.name}", style="bold cyan"))
        console.print(Text(text))
        parameters = schema.parameters(entry)
        if parameters:
            prefix = f"{key}." if key != "method.objective" else f"{key}.{entry.name}."
            made = _table("setting", "default", "type", "meaning")
            for setting, parameter in parameters.items():
                value = default(entry.factory, parameter)
                kind_of, said = expected(parameter.annotation), helps.get(setting, "")
                required = value is inspect.Parameter.empty
                row = ("required" if required else _bare(value), kind_of, said)
                made.add_row(Text(f"{prefix}{setting}", style="bold cyan"), *map(Text, row))
            console.print()
            console.print(made)
        if key == "method":
            _method(console, entry)
        elif citation := getattr(entry.factory, "citation", ""):
            console.print()
            console.print(Text(citation, style="dim"))


def _method(console: Console, entry: Entry[Method]) -> None:
    try:
        method = entry.make()
    except FedLoomError:  # it has settings without a default
        return
    made = _plain_table()
    for place, part in method.parts.items():
        said = (inspect.getdoc(part) or "").partition("\n")[0]
        made.add_row(Text(place.partition(".")[0], style="bold"), Text(label(part)), Text(said))
    console.print()
    console.print(made)
    citations = list(method.citations())
    if citations:
        console.print()
        console.print(Text("\n\n".join(citations), style="dim"))


def settings_of(entry: Entry[Any]) -> str:
    """Settings with their defaults, in a line."""
    found = []
    for name, parameter in schema.parameters(entry).items():
        value = default(entry.factory, parameter)
        found.append(name if value is inspect.Parameter.empty else f"{name}={_bare(value)}")
    return "  ".join(found)


def parts_of(entry: Entry[Method]) -> str:
    """The parts of a method that do something, besides cross entropy."""
    try:
        method = entry.make()
    except FedLoomError:
        return ""
    named = {place.partition(".")[0]: label(part) for place, part in method.parts.items() if not part.is_identity}
    terms = [label(term) for term in method.objective]
    if terms == ["cross_entropy"]:
        named.pop("objective", None)
    else:
        named["objective"] = "+".join(terms)
    return "  ".join(f"{slot}={name}" for slot, name in named.items())


def _bare(value: Any) -> str:
    """A value without quotes, as it is typed."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_bare, value))}]"
    return value if isinstance(value, str) and value else shown(value)


def _table(*heads: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for number, head in enumerate(heads):
        made.add_column(head, no_wrap=not number, overflow="fold")
    return made


def _plain_table() -> Table:
    made = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    for _ in range(3):
        made.add_column()
    return made
