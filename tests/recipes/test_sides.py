"""The recipe of stronger local losses runs on a few images and resumes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedloom.data.partitions import Acid

FOLDER = Path(__file__).parents[2] / "recipes" / "sides"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Does what ``python recipes/sides/table_7_1.py ...`` does; returns its exit code."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda *arguments: importlib.import_module("table_7_1").main([str(a) for a in arguments])


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like CIFAR-10, with 60 images to learn and 20 to test."""
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 60), ("test", 20)):
        arrays[f"x_{split}"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 10
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "cifar10.npz", **arrays)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))


@pytest.mark.usefixtures("photographs")
def test_table_7_1_runs_goes_on_and_writes_the_table_again(
    tmp_path: Path, recipe: Callable[..., int], undrawn: Callable[[ModuleType], AbstractContextManager[None]]
) -> None:
    module = importlib.import_module("table_7_1")
    out = tmp_path / "out"
    where = ("--runs", tmp_path / "runs", "--out", out, "--epochs", 1)
    some = ("--only", "FedAvg cross entropy", "FedDyn both")
    with undrawn(module):
        assert recipe(*where, "--seeds", 0, 1, "--rounds", 2, *some) == 0
    teacher_metrics = tmp_path / "runs" / "table_7_1" / "seed0" / "teacher" / "metrics.jsonl"
    teacher = teacher_metrics.read_text()
    assert recipe(*where, "--seeds", 0, "--rounds", 4, "--only", "FedDyn both", "FedAvg robustness") == 0
    assert teacher_metrics.read_text() == teacher, "it was trained once"
    runs = json.loads((out / "table_7_1.json").read_text())["runs"]
    progress = {
        (name, seed): (cell["done"], cell["rounds"]) for name, seeds in runs.items() for seed, cell in seeds.items()
    }
    assert progress == {
        ("teacher", "0"): (1, [1]),
        ("teacher", "1"): (1, [1]),
        ("FedAvg cross entropy", "0"): (2, [2]),
        ("FedAvg cross entropy", "1"): (2, [2]),
        ("FedDyn both", "0"): (4, [2, 4]),
        ("FedDyn both", "1"): (2, [2]),
        ("FedAvg robustness", "0"): (4, [2, 4]),
    }
    assert all(len(cell["average"]) == len(cell["rounds"]) for name in runs if name != "teacher"
               for cell in runs[name].values())  # fmt: skip
    text = (out / "table_7_1.md").read_text()
    assert "average of all clients' last models reaches" in text
    assert "| FedDyn | both |" in text
    assert "250 (6.54)" in text
    assert "(2 of 2)" in text, "all seeds of FedAvg reach the target"
    assert (out / "table_7_1.png").read_bytes().startswith(b"\x89PNG")
    with undrawn(module):
        assert recipe("--table", "--runs", tmp_path / "none", "--out", out) == 0
    assert (out / "table_7_1.md").read_text() == text


@pytest.mark.usefixtures("photographs")
def test_the_scale_of_the_thesis_has_files_of_its_own_and_the_published_target(
    tmp_path: Path, recipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = importlib.import_module("table_7_1").SCALES
    networks = {key: getattr(scales["reduced"], key) for key in ("student", "teacher")}
    few = replace(
        scales["thesis"], data="cifar10", partition=Acid(10, 20, 10), clients=3, cohort=2, every=1, **networks
    )
    monkeypatch.setitem(scales, "thesis", few)
    where = ("--runs", tmp_path / "runs", "--out", tmp_path / "out")
    short = ("--seeds", 0, "--rounds", 1, "--epochs", 1, "--only", "FedAvg distillation")
    assert recipe("--scale", "thesis", *where, *short) == 0
    assert {path.name.partition(".")[0] for path in (tmp_path / "out").iterdir()} == {"table_7_1_thesis"}
    page = (tmp_path / "out" / "table_7_1_thesis.md").read_text()
    assert "reaches the published test accuracy, 67.0 %" in page
    assert "| FedAvg | distillation | - (0 of 1) |" in page
    assert "table_7_1.py --scale thesis`, seeds 0." in page


def test_the_table_is_about_the_average_model_where_all_runs_recorded_it(recipe: Callable[..., int]) -> None:
    module = importlib.import_module("table_7_1")

    def cell(**more: list[float]) -> dict:
        return {"done": 4, "rounds": [2, 4], "accuracy": [0.2, 0.3], "left_out": 0.0, **more}

    runs = {module.BASE: {"0": cell(average=[0.1, 0.25])}, "FedDyn both": {"0": cell(average=[0.1, 0.5])}}
    page = module.table({"command": "", "runs": runs})
    assert "Rounds until the average of all clients' last models reaches" in page
    assert "| FedDyn | both | 4 (1 of 1) | 50.0 | 50.0 |" in page
    runs["FedAvg both"] = {"0": cell()}  # an older run
    page = module.table({"command": "", "runs": runs})
    assert "Rounds until the server's model reaches" in page
    assert "was not recorded in all runs." in page
    assert "| FedDyn | both | 4 (1 of 1) | 30.0 | 30.0 |" in page


def test_every_cell_of_the_table_is_its_loss_and_its_drift(recipe: Callable[..., int]) -> None:
    cases = importlib.import_module("table_7_1").CASES
    assert len(cases) == 8
    for name, method in cases.items():
        assert method.drift.is_identity == name.startswith("FedAvg")
        assert method.needs("teacher") == name.endswith(("distillation", "both"))
        assert method.needs("twin") == name.endswith(("robustness", "both"))


def test_without_data_it_says_so(
    tmp_path: Path, recipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert recipe("--runs", tmp_path / "runs", "--out", tmp_path / "out") == 2
    assert "CIFAR-10" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
