"""The command line, called in this process in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fedloom.cli import main


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Answer]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = main(list(words))
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call
