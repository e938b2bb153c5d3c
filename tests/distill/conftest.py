"""Fixtures of distillation, and the command line in this process in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import distilling
from helpers.distilling import Problem

from fedloom.cli import main
from fedloom.tasks.distill import Splits


@pytest.fixture
def vectors() -> Problem:
    return distilling.vectors()


@pytest.fixture
def images() -> Problem:
    return distilling.images()


@pytest.fixture
def digits() -> Splits:
    return Splits.of("digits")


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = main(list(words))
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call
