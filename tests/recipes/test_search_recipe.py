"""The search recipe runs, and its page agrees with its results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("optuna")

FILE = Path(__file__).parents[2] / "recipes" / "search" / "compositions.py"


@pytest.fixture
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compositions", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_searches_are_compared(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("data=digits", "clients=4", "rounds=2", "model=logistic", "search.budget=10",
             "search.methods=[fedavg,fedrep]")  # fmt: skip
    monkeypatch.setattr(recipe, "DATA", {"digits": words})
    monkeypatch.setattr(recipe, "COMMON", (*recipe.COMMON, "search.seeds=2"))
    monkeypatch.setattr(recipe, "RUNS", tmp_path / "runs")
    assert recipe.main(["--data", "digits", "--seeds", "0", "50", "--out", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "compositions.json").read_text())["runs"]["digits"]
    assert set(runs) == {"compositions", "random", "named"}
    page = (tmp_path / "compositions.md").read_text()
    d = [100 * (runs["compositions"][s]["score"] - runs["named"][s]["score"]) for s in ("0", "50")]
    assert f"compositions - named: {sum(d) / 2:+.1f}" in page
    methods = {"fedavg", "fedrep"}
    assert all(run["label"] in methods for run in runs["named"].values())
