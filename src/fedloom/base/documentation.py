"""Summaries and parameter descriptions, extracted from docstrings, and citations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Examples?):\n((?: +.*\n?|\n)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^>>>[\s\S]*?(?:\n\n|\Z)", re.MULTILINE)
LITERAL = re.compile(r"^::\n\n|(?<=\S)(:):$", re.MULTILINE)
"""The sign before equations."""
ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def documentation(factory: Callable[..., Any]) -> tuple[str, Mapping[str, str]]:
    """A docstring's text without sections and examples, and its description of each parameter.

    >>> documentation(documentation)[1]["factory"]
    'a function or a class; base classes contribute their parameters.'

    Args:
        factory: a function or a class; base classes contribute their parameters.
    """
    text, helps = "", {}
    for owner in reversed(inspect.getmro(factory)[:-1]) if inspect.isclass(factory) else [factory]:
        doc = inspect.cleandoc(owner.__doc__ or "").replace("``", "") + "\n"
        for heading, body in SECTION.findall(doc):
            if heading == "Args":
                helps |= {name: " ".join(words.split()) for name, words in ARGUMENT.findall(body)}
        text = EXAMPLE.sub("", LITERAL.sub(r"\1", SECTION.sub("", doc)))
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return text, helps


def bibtex(citation: str) -> str:
    """The entries of ``citations.bib`` for keys separated by commas; any other text unchanged.

    >>> bibtex("darlow2018cinic").partition(",")[0]
    '@article{darlow2018cinic'
    """
    entries = _bibliography()
    keys = [key.strip() for key in citation.split(",")]
    return "\n".join(entries[key] for key in keys) if entries.keys() >= {*keys} else citation.strip()


@cache
def _bibliography() -> dict[str, str]:
    text = (files("fedloom") / "citations.bib").read_text(encoding="utf-8").rstrip()
    return {entry.partition("{")[2].partition(",")[0]: entry for entry in re.split(r"\n(?=@)", text)}
