"""What was compared: the sentence, facts and warnings at the head of the page, and the table of settings."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.experiment.report.groups import Group, settings, shared
from fedloom.experiment.report.html import escape, facts, named, table
from fedloom.experiment.report.table import Cell, Table
from fedloom.experiment.report.target import targets

_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("data", ("data.name", "data")),
    ("partition", ("partition.name", "partition")),
    ("model", ("model.name", "model")),
    ("clients", ("clients",)),
    ("participation", ("participation",)),
    ("rounds", ("rounds",)),
    ("engine", ("engine.name", "engine")),
)

_PROBLEM = ("data.", "partition.", "model.")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def sentence(groups: Sequence[Group]) -> str:
    """What the page is about.

    Names at most six methods.
    """
    methods = list(dict.fromkeys(member.method for member in groups))
    runs = sum(len(member.runs) for member in groups)
    named = methods if len(methods) <= 6 else [*methods[:5], f"{len(methods) - 5} more"]
    data = shared(groups, "data.name", "data")
    begin = f"{_joined(named)}{f' on {data}' if data else ''}: "
    variants = f" in {len(groups)} variants" if len(groups) > len(methods) else ""
    return f"{begin}{_count(len(methods), 'method')}{variants}, {_count(runs, 'run')}."


def header(groups: Sequence[Group]) -> str:
    """The sentence, the conditions in common, and the groups with their lines."""
    pairs = []
    for name, keys in _FACTS:
        present = any(key in run.config for key in keys for member in groups for run in member.runs)
        if present:
            pairs.append((name, shared(groups, *keys) or "differs"))
    seeds = list(dict.fromkeys(run.seed for member in groups for run in member.runs))
    pairs.append(("seed" if len(seeds) == 1 else "seeds", ", ".join(seeds[:8]) + (" …" if len(seeds) > 8 else "")))
    if goals := targets(groups):
        pairs.append(("target", "; ".join(goal.text for goal in goals)))
    items = "".join(f"<li>{named(member.style, member.label)}</li>" for member in groups)
    return f'<p class="lead">{escape(sentence(groups))}</p>{facts(pairs)}<ul class="legend">{items}</ul>'


def settings_section(groups: Sequence[Group]) -> str:
    """Settings that differ, a warning when the problem itself does, and what is in common behind a fold."""
    differ, common = settings(groups)
    pieces = []
    if moved := [
        key for key, _ in differ if key.startswith(_PROBLEM) or key in ("data", "partition", "model", "clients")
    ]:
        pieces.append(
            '<p class="warn">These runs do not solve the same problem: they differ in '
            f"{escape(_joined(moved[:6]))}. Compare their figures with that in mind.</p>"
        )
    if differ:
        rows = [[Cell(key), *map(Cell, values)] for key, values in differ]
        heads = ["setting", *(member.label for member in groups)]
        shown = Table("settings", "Settings that differ", heads, rows, words=frozenset(range(len(heads))))
        pieces.append(table(shown, wide=True))
    if common:
        rows = [[Cell(key), Cell(value)] for key, value in common]
        shown = Table("common", "Settings in common", ["setting", "value"], rows, words=frozenset({1}))
        words = f"{_count(len(common), 'setting')} in common"
        pieces.append(f"<details><summary>{words}</summary>{table(shown, wide=True)}</details>")
    return "".join(pieces)
