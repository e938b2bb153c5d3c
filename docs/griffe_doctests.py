"""Examples in docstrings are shown as code (an extension of Griffe, which reads the docstrings for the site)."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^|(?<=\n\n)|(?<=\n))((?:[ ]*>>> .*)(?:\n[ ]*\S.*)*)")


class Doctests(griffe.Extension):
    """Puts a fence around every block of lines that begins with ``>>>``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each of its examples, indented as they are."""

    def fence(match: re.Match[str]) -> str:
        lines = match[1].split("\n")
        indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
        return "\n".join([f"{indent}```pycon", *lines, f"{indent}```"])

    return EXAMPLE.sub(fence, text)
