"""A name says what is inside: no variable, parameter or function is called by a bare participle or pronoun."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# fmt: off
WORDS = {
    "found", "made", "told", "given", "held", "kept", "seen", "mine", "chosen", "said", "shown", "drawn", "done",
    "spent", "asked", "wanted", "taken", "one", "own", "known", "whole", "apart", "others", "theirs", "named",
    "measured", "counted", "checked", "needed", "written", "begun", "caught", "gone", "swept", "having", "another",
}
# fmt: on
CONTRACTS = {("federation.py", "seen"), ("timeline.py", "done"), ("arrivals.py", "done"), ("engine.py", "asked")}
CONTRACTS |= {("context.py", "own"), ("architectures.py", "own"), ("model.py", "known")}
"""Where such a word is a public name: clients that training has seen, arrivals, a metric of deployments, what a
personal part gives to all parts, the module of a client's own network, the share of a target known from a client."""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_no_name_is_a_bare_participle_or_pronoun() -> None:
    files = [
        path
        for folder in ("src", "recipes", "examples", "benchmarks", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(files) > 600
    assert not [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in files
        for line, name in names(ast.parse(path.read_text()))
        if name.strip("_") in WORDS and (path.name, name) not in CONTRACTS
    ]
