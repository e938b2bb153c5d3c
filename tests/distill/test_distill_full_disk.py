"""A full disk is named, and there is a way on to the bits of an undisturbed run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from helpers.commands import Cli

from fedloom.experiment import atomic

WORDS = ("-q", "method=kd", "teacher=two_nn", "model=logistic", "epochs=2", "teacher_epochs=1")
MODELS = ("model.safetensors", "teacher/model.safetensors")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts of the paths for which the disk has no room."""
    full: list[str] = []
    write = atomic.write_synced

    def crowded(path: Path, blob: bytes) -> None:
        if any(part in str(path) for part in full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    monkeypatch.setattr(atomic, "write_synced", crowded)
    return full


@pytest.mark.parametrize("first", ["teacher", "all"])
def test_a_teacher_without_room_is_trained_again(first: str, cli: Cli, tmp_path: Path, disk: list[str]) -> None:
    """After making room the teacher is continued by itself, or with its student."""
    assert cli("distill", *WORDS, "out=whole").code == 0
    disk.append("safetensors")
    answer = cli("distill", *WORDS, "out=there")
    assert answer.code == 2
    assert answer.err == (
        "fedloom: the run there/teacher is not complete: round 1: no checkpoint could be written (No space left on "
        "device); the one before it is untouched; make room and continue with resume=there.\n"
    )
    assert cli("distill", "-q", "resume=there").err == answer.err
    disk.clear()
    for place in ("there/teacher", "there") if first == "teacher" else ("there",):
        answer = cli("distill", "-q", f"resume={place}")
        assert (answer.code, answer.err) == (0, "")
    for name in MODELS:
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_student_without_room_is_no_success(cli: Cli, tmp_path: Path, disk: list[str]) -> None:
    assert cli("distill", *WORDS, "out=whole").code == 0
    disk.append("there/.model.safetensors")
    answer = cli("distill", *WORDS, "out=there")
    assert answer.code == 2
    assert "fedloom: the run there is not complete: the summary could not be written (No space left" in answer.err
    disk.clear()
    assert cli("distill", "-q", "resume=there").code == 0
    assert (tmp_path / "there" / MODELS[0]).read_bytes() == (tmp_path / "whole" / MODELS[0]).read_bytes()
