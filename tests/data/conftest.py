"""A fixture of the tests of readers."""

from pathlib import Path

import pytest


@pytest.fixture
def no_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers see only what a test writes."""
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
