"""Summaries and parameter descriptions, read from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Examples):\s*$")


def documentation(factory: Any) -> tuple[str, Mapping[str, str]]:
    """A docstring's description, without examples, and what it says of each parameter.

    >>> documentation(documentation)[1]["factory"]
    'a function or a class; a class has what its bases say too.'

    Args:
        factory: a function or a class; a class has what its bases say too.
    """
    text: list[str] = []
    helps: dict[str, str] = {}
    for owner in reversed(inspect.getmro(factory)[:-1]) if inspect.isclass(factory) else [factory]:
        text, found = _documentation(inspect.cleandoc(owner.__doc__ or "").replace("``", ""))
        helps |= found
    return "\n".join(text).strip(), helps


def _documentation(doc: str) -> tuple[list[str], dict[str, str]]:
    text: list[str] = []
    helps: dict[str, str] = {}
    section = name = ""
    for line in doc.splitlines():
        if line.startswith(">>>"):
            section = "Example"
        elif heading := SECTION.match(line):
            section = heading[1]
        elif not section:
            text.append(line)
        elif section == "Args" and line.startswith("    "):
            head = re.match(r"^    (\w+): (.*)$", line)
            if head:
                name, helps[head[1]] = head[1], head[2]
            elif name and line.strip():
                helps[name] += f" {line.strip()}"
        elif line.strip() and not line.startswith((" ", "...")) and section != "Example":
            section = ""
            text.append(line)
    return text, helps
