"""The recipe of networks of two sizes runs on a few images, resumes, and counts rounds correctly."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers.pictures import write_split

FOLDER = Path(__file__).parents[2] / "recipes" / "fedhen"
Undrawn = Callable[[ModuleType], AbstractContextManager[None]]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("tables")


@pytest.fixture
def garments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like Fashion-MNIST, with 300 images to learn and 20 to test."""
    random = np.random.default_rng(0)
    folder = tmp_path / "data" / "FashionMNIST" / "raw"
    for split, count in (("train", 300), ("t10k", 20)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count) % 10
        write_split(folder, split, images, labels, ".gz")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))


@pytest.mark.usefixtures("garments")
def test_it_runs_goes_on_and_writes_the_table_again(tmp_path: Path, recipe: ModuleType, undrawn: Undrawn) -> None:
    out = tmp_path / "out"

    def call(*arguments: Any) -> int:
        return recipe.main([str(a) for a in ("--runs", tmp_path / "runs", "--out", out, *arguments)])

    with undrawn(recipe):
        assert call("--rounds", 2, "--splits", "iid", "--only", "FedHeN", "Decouple", "--seeds", 0, 1) == 0
        assert call("--rounds", 1, "--splits", "dirichlet", "--only", "NoSide", "--seeds", 0) == 0
    assert call("--rounds", 4, "--splits", "iid", "--only", "FedHeN", "--seeds", 0) == 0
    cells = json.loads((out / "tables.json").read_text())["runs"]["iid"]
    assert {name: {s: (run["rounds"], run["at"]) for s, run in runs.items()} for name, runs in cells.items()} == {
        "FedHeN": {"0": (4, [2, 4]), "1": (2, [2])},
        "Decouple": {"0": (2, [2]), "1": (2, [2])},
    }
    text = (out / "tables.md").read_text()
    assert "| iid | simple | 84.4 % | 289 | 805 | 943 | 2.8 |" in text
    assert (out / "tables.png").read_bytes().startswith(b"\x89PNG")
    with undrawn(recipe):
        assert call("--table") == 0
    assert (out / "tables.md").read_text() == text


def test_rounds_and_gains_by_hand(recipe: ModuleType) -> None:
    def cell(*accuracies: float) -> dict[str, Any]:
        return {"at": [2, 4, 6], "simple": list(accuracies)}

    cells = {"FedHeN": cell(0.5, 0.7, 0.8), "NoSide": cell(0.3, 0.4, 0.6018), "Decouple": cell(0.2, 0.65, 0.62)}
    assert recipe.targets(cells, "simple") == pytest.approx([0.601, 0.591])
    assert recipe.row([cells], "simple", 0) == ["60.1 %", "4", "6", "4", "1.00"]
    other = {"FedHeN": cell(0.71, 0.7, 0.8), "NoSide": cell(0.3, 0.6, 0.701), "Decouple": cell(0.2, 0.701, 0.62)}
    assert recipe.row([other], "simple", 1) == ["69.1 %", "2", "6", "4", "2.00"]
    assert recipe.row([cells, other], "simple", 0) == ["65.1 ± 5.0 %", "3 ± 1", "6 ± 0", "4 ± 0", "1.50 ± 0.50"]
    assert recipe.row([{"NoSide": cell(0.3, 0.6, 0.7)}], "simple", 0) == ["70.0 %", "-", "6", "-", "-"]


def test_half_of_the_hundred_clients_are_simple(recipe: ModuleType) -> None:
    for method in recipe.METHODS.values():
        assert sum(method.personal.uses(i, lambda: None, 0)[0].level for i in range(recipe.CLIENTS)) == 50


def test_without_data_it_says_so(
    tmp_path: Path, recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    call: Callable[[list[str]], int] = recipe.main
    assert call(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    assert "FashionMNIST is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
