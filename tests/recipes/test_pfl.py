"""The recipe of personalised meta-learning runs on a few images and resumes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "recipes" / "pfl"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module ``recipes/pfl/tables.py`` at a size for five clients of twenty images."""
    monkeypatch.syspath_prepend(str(FOLDER))
    name = "pfl_tables"  # another folder has tables.py too
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / "tables.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    module = sys.modules[name]
    tiny = replace(module.SCALES["reduced"], clients=5, samples=20, steps=2, batch=10, rounds=4, trial=1, every=2)
    monkeypatch.setitem(module.SCALES, "reduced", tiny)
    return module


@pytest.fixture
def run(recipe: Any) -> Callable[..., int]:
    """Does what ``python recipes/pfl/tables.py ...`` does; returns its exit code."""
    return lambda *arguments: recipe.main([str(a) for a in arguments])


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like CIFAR-10: 200 images to learn and 1000 to test, a patch of light for each class."""
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 200), ("test", 1000)):
        y = np.arange(count) % 10
        x = random.integers(0, 60, (count, 32, 32, 3), dtype=np.uint8)
        for row, label in enumerate(y):
            x[row, 3 * label : 3 * label + 4] += 190
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "cifar10.npz", **arrays)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))


@pytest.mark.usefixtures("photographs")
@pytest.mark.filterwarnings("ignore:partition:UserWarning")
def test_tables_run_go_on_and_are_written_again(
    tmp_path: Path, recipe: Any, run: Callable[..., int], undrawn: Callable[[ModuleType], AbstractContextManager[None]]
) -> None:
    out = tmp_path / "out"
    where = ("--runs", tmp_path / "runs", "--out", out)
    some = ("FedAvg", "Per-FedAvg", "PFLDyn (Proto)", "PFLScaf (MAML)")
    with undrawn(recipe.common):
        assert run(*where, "--rounds", 2, "--seeds", 0, "--only", *some[1:3]) == 0
    trials = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").glob("*/trials/*.json")}
    assert len(trials) == 4, "two splits; MAML's rate and one alpha"
    assert run(*where, "--seeds", 0, 1, "--only", *some, "P-Avg (Proto)") == 0
    assert {p: p.stat().st_mtime_ns for p in trials} == trials, "settings were chosen once"
    cells = json.loads((out / "tables.json").read_text())["cells"]
    assert set(cells) == {"acid 5", "alid 5"}
    for cell in cells.values():
        curves = cell["curves"]
        assert set(curves) == {*some, "P-Avg (Proto)", "FedAvg + Proto", "FedAvg + MAML"}
        assert {name: tuple(by_seed) for name, by_seed in curves.items()} == dict.fromkeys(curves, ("0", "1"))
        runs = [(name, curve) for name, by_seed in curves.items() for curve in by_seed.values()]
        assert {(name, curve["cost"]) for name, curve in runs} == {
            (name, 2 if name.startswith("PFLScaf") else 1) for name in curves
        }
        for _, curve in runs:
            assert tuple(curve["round"]) in ((2, 4), (4,))
            for worst, mean, best in zip(curve["worst"], curve["mean"], curve["best"], strict=True):
                assert 0 <= worst <= mean <= best <= 1
        assert cell["picked"]["alpha"]["PFLDyn (Proto)"] in (0.1, 0.01)
        assert set(cell["picked"]["trials"]["Per-FedAvg"]) == {"(0.1, 1)", "(0.01, 1)"}
    text = (out / "tables.md").read_text()
    assert "| *thesis: 88.8* | *>1000* | *221* | *392* | *666* | *>1000* | *783* | *>4.5x* | *3.5x (P-Avg)* |" in text
    assert "| FedAvg + Proto |" in text
    first, second = (cells["acid 5"]["curves"]["PFLDyn (Proto)"][seed]["average mean"][-1] for seed in "01")
    assert f" | {50 * (first + second):.1f} ± {50 * abs(first - second):.1f} |" in text
    assert (out / "tables.png").read_bytes().startswith(b"\x89PNG")
    with undrawn(recipe.common):
        assert run("--table", "--out", out) == 0
    assert (out / "tables.md").read_text() == text


@pytest.mark.usefixtures("photographs")
@pytest.mark.filterwarnings("ignore:partition:UserWarning")
def test_clients_train_on_all_their_images_and_are_tested_on_others(recipe: Any) -> None:
    for split in ("acid", "alid"):
        dealt = recipe.data(recipe.sources.make("cifar10"), split, 5, recipe.SCALES["reduced"], 0)
        assert set(dealt.train.index.sizes) == {20}
        assert set(dealt.held_out.index.sizes) == {100}
        assert dealt.held_out.arrays is not dealt.train.arrays


def test_every_method_is_its_adaptation_and_its_drift(recipe: Any) -> None:
    for name in recipe.common.METHODS:
        method = recipe.method(name, alpha=0.03, inner=(0.01, 5))
        parts = {"MAML": "Maml", "Proto": "Prototypes"}
        adaptation = next((part for word, part in parts.items() if word in name), "Adaptation")
        assert type(method.adaptation).__name__ == ("Maml" if name == "Per-FedAvg" else adaptation)
        assert method.adaptation.trains == (name not in recipe.UNADAPTED)
        if adaptation == "Maml":
            assert (method.adaptation.lr, method.adaptation.steps) == (0.01, 5)
        drift = "FedDynDrift" if "Dyn" in name else "Scaffold" if "Scaf" in name or name == "SCAFFOLD" else "Drift"
        assert type(method.drift).__name__ == drift
        if drift == "FedDynDrift":
            assert method.drift.alpha == 0.03
    assert all(not part.trains for part in recipe.adaptations("FedAvg", (0.1, 1)).values())


def test_transmissions_count_what_is_sent(recipe: Any) -> None:
    looks = recipe.common
    curves = {
        "Per-FedAvg": {"round": [4, 8], "mean": [0.3, 0.5], "cost": 1},
        "PFLDyn (Proto)": {"round": [4, 8], "mean": [0.5, 0.6], "cost": 1},
        "PFLScaf (Proto)": {"round": [4, 8], "mean": [0.4, 0.55], "cost": 2},
    }
    assert looks.targets(curves, "mean") == [0.6, 0.5]
    assert [looks.transmissions_to(curve, "mean", 0.5) for curve in curves.values()] == [8, 4, 16]
    assert looks.transmissions_to(curves["Per-FedAvg"], "mean", 0.6) == float("inf")
    assert looks.gain(4, 8, 8) == "2.0x"


def test_letters_choose_alpha_on_a_seed_of_its_own(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tables", recipe)
    letters = importlib.import_module("letters")
    tiny = {"clients": 4, "samples": 20, "tested": 10, "steps": 2, "batch": 10, "rounds": 4, "trial": 1, "every": 2}
    monkeypatch.setattr(letters, "SCALE", replace(letters.SCALE, **tiny, shrink=1))
    digits = recipe.sources.make("digits")
    monkeypatch.setattr(recipe.sources, "make", lambda name: {"emnist_l": digits}[name])
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    with pytest.warns(UserWarning, match="leaves out"):
        assert letters.main(["--splits", "alid", "--seeds", "0", "1", "--only", *letters.METHODS[:2], *where]) == 0
    results = json.loads((tmp_path / "out" / "letters.json").read_text())["splits"]["alid"]
    assert {name: list(tried) for name, tried in results["trials"].items()} == {"PFLDyn (Proto)": ["0.1", "0.01"]}
    assert {name: list(runs) for name, runs in results["runs"].items()} == {n: ["0", "1"] for n in letters.METHODS[:2]}
    text = (tmp_path / "out" / "letters.md").read_text()
    first, second = (results["runs"]["PFLDyn (Proto)"][seed]["average mean"][-1] for seed in "01")
    assert f"| PFLDyn (Proto) | 0, 1 | {50 * (first + second):.2f} ± " in text
    assert letters.main(["--table", *where]) == 0
    assert (tmp_path / "out" / "letters.md").read_text() == text
    base = {"0": {"round": [2, 4], "average mean": [0.5, 0.7], "cost": 1}}
    costlier = {"0": {"round": [2, 4], "average mean": [0.6, 0.7], "cost": 2}}
    assert letters.transmissions(costlier, base) == "8 (1 of 1)"


def test_costs_are_measured_against_fedavg(tmp_path: Path, recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = importlib.import_module("costs")
    assert costs.main(["--repeats", "2", "--steps", "2", "--model", "fedssa_cnn", "--out", str(tmp_path)]) == 0
    rows = [line.split("|") for line in (tmp_path / "costs.md").read_text().splitlines() if line.startswith("| ")]
    ratio = {row[1].strip(): row[3].strip() for row in rows[2:]}
    assert ratio["FedAvg"] == "1.0"
    assert float(ratio["MAML, 5 steps, second order"]) > float(ratio["MAML, 1 step, first order"]) > 1
    assert "MAML" in capsys.readouterr().out


def test_without_data_it_says_so(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert run("--runs", tmp_path / "runs", "--out", tmp_path / "out") == 2
    assert "CIFAR-10" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_published_figures_stand_beside_the_data_that_they_are_of(
    recipe: Any, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = recipe.common.read(recipe.common.RESULTS / "tables.json")
    assert "*thesis: 87.5*" in recipe.common.tables(stored)
    other = recipe.common.tables(stored | {"data": "mini_imagenet"})
    assert "on miniImageNet (Acar, thesis, table A.7)" in other
    assert "*thesis:" not in other
    assert run("--data", "mini_imagenet", "--runs", tmp_path / "runs", "--out", tmp_path / "out") == 2
    assert "miniImageNet is missing" in capsys.readouterr().err
