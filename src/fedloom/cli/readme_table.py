"""The README's table of methods, from the registry: ``python -m fedloom.cli.readme_table README.md`` refreshes it."""

from __future__ import annotations

import sys
from pathlib import Path

from fedloom.core.slots import SLOTS, label
from fedloom.methods import methods

BEGIN, END = "<!-- methods -->", "<!-- /methods -->"


def markdown() -> str:
    """One row per method: its parts that are not the identity, and its summary.

    >>> markdown().splitlines()[0]
    '| method | objective | drift | personal | adaptation | mixing | server | uplink | in words |'
    """
    rows = [["method", *SLOTS, "in words"], ["---"] * (len(SLOTS) + 2)]
    for entry in methods:
        made = entry.make()
        filled = [getattr(made, slot) for slot in SLOTS]
        parts = [part if isinstance(part, tuple) else () if part.is_identity else (part,) for part in filled]
        names = [" + ".join(label(part) for part in several) for several in parts]
        names[0] = names[0].replace("_", " ")
        words = entry.summary.replace("|", "\\|")
        rows.append([f"`{entry.name}`", *names, words])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def refreshed(text: str) -> str:
    """The text with the table between the markers regenerated."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{markdown()}\n{END}{tail}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(refreshed(path.read_text()))
