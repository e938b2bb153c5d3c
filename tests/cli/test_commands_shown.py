"""Every command shown in README, docs and help texts is accepted, with the data available on every machine."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.marks import exhaustive

from fedloom.cli import commands, help_of, overview

ROOT = Path(__file__).parents[2]
TRAINS = ("run", "online", "distill", "synthesize", "search")
ELSEWHERE = re.compile("is missing|are missing|no file|no folder|is not installed|can(not)? be imported|No such file")
"""What is said of data sets, packages and a reader's own modules, which this machine need not have."""


COMMANDS = "run|online|distill|synthesize|search|list|data|partition|devices"


def command_lines() -> Iterator[str]:
    """Command lines without comments, joined where they continue on the next line."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S)]
    for text in [*blocks, overview(), *map(help_of, commands().values())]:
        for line in re.sub(r" \\\n\s*", " ", text).splitlines():
            match = re.match(rf"\s*(fedloom (?:{COMMANDS})\b.*)", line)
            if match and not re.search(r"[|<\[]key|…\]| \| |COMMAND|<slot>", match[1]):
                yield re.split(r"\s{3,}", match[1].partition(" #")[0])[0].strip()


def runnable(line: str) -> list[str]:
    """The words of a command line without run directories, which are examples; the result may be empty."""
    words = shlex.split(line)[1:]
    if any(word.startswith("data=generated") for word in words):
        return []
    return [word for word in words if not re.search("runs/|DIR", word)]


def blocks() -> Iterator[tuple[str, str]]:
    """The blocks of shell commands on each page; placeholders stand for words."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
            if language in ("", "bash", "sh") and re.match(r"(fedloom|pip|python|make|source) ", block):
                yield f"{page.relative_to(ROOT)}: {block.splitlines()[0]}", re.sub(r"<[\w-]+>", "WORD", block)


LINES = sorted({line for line in command_lines() if runnable(line)})


def once() -> Iterator[Any]:
    """All lines, the longest first; exhaustive are those that only repeat words of longer ones, up to numbers."""
    words_before: set[str] = set()
    for line in sorted(LINES, key=lambda line: -len(line)):
        words = {re.sub(r"\d[\d.]*", "0", word) for word in shlex.split(line)}
        yield pytest.param(line, marks=[] if words - words_before else exhaustive)
        words_before |= words


def test_there_are_many_commands():
    assert len(LINES) > 60
    assert {shlex.split(line)[1] for line in LINES} >= {*TRAINS, "list", "data", "partition", "devices"}


def test_help_texts_name_every_option() -> None:
    for name, application in commands().items():
        options = [word.rstrip("=") for option in application.options for word in option.split()]
        assert not [option for option in options if option not in help_of(application)], name


def test_what_is_shown_can_be_pasted_into_a_shell():
    for name, block in blocks():
        read = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert read.returncode == 0, f"{name}: {read.stderr}"


@pytest.mark.filterwarnings("ignore:partition .alid.")
@pytest.mark.parametrize("line", [*once()])
def test_a_command_that_is_shown_is_accepted(
    line: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "nothing"))
    (tmp_path / "recipe.yaml").write_text("method: feddyn\n")
    words = runnable(line)
    code, _, err = cli(*words, *(["--dry-run"] if words[0] in TRAINS else []))
    assert code == 0 or ELSEWHERE.search(err), err
