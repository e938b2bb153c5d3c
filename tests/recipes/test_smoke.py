"""The recipe of first runs works, and its table agrees with its stored results."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedloom.core.local import Local

FOLDER = Path(__file__).parents[2] / "recipes" / "smoke"


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke", FOLDER / "smoke.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "smoke", module)
    spec.loader.exec_module(module)
    return module


def test_a_case_runs_and_is_told(smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    cases = {
        "digits": smoke.Case("digits", smoke.SKEWED, "mlp", Local(epochs=5, batch_size=10), 6, 3, 6),
        "mine": smoke.Case("digits", smoke.SKEWED, "logistic", Local(epochs=2), 2, 6, 6, on="clients"),
        "heart": smoke.CASES["heart"],
    }
    monkeypatch.setattr(smoke, "CASES", cases)
    monkeypatch.setattr(sys, "argv", ["smoke.py", "--out", str(tmp_path / "out")])
    assert smoke.main() == 0
    assert "heart: Heart disease is missing" in capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "smoke.json").read_text())
    assert list(results) == ["digits", "mine"]
    assert results["digits"]["accuracy"]["6"] > 0.5
    assert "| digits | 6 (dirichlet_balanced) |" in (tmp_path / "out" / "smoke.md").read_text()


def test_the_stored_table_is_up_to_date(smoke: ModuleType) -> None:
    results = json.loads((FOLDER / "results" / "smoke.json").read_text())
    assert set(results) <= set(smoke.CASES)
    assert all(map(smoke.learned, results.values()))
    assert (FOLDER / "results" / "smoke.md").read_text() == smoke.table(results)
