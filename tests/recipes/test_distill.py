"""The distillation recipes run for a few passes, resume, and write their tables."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.federation import Arrays
from fedloom.models import macs, models
from fedloom_apps.distill import Splits, Subset

FOLDER = Path(__file__).parents[2] / "recipes" / "distill"
PNG = b"\x89PNG"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A recipe as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def clothes(count: int, seed: int) -> Arrays:
    """Images that look like Fashion-MNIST only in their shape."""
    draw = torch.Generator().manual_seed(seed)
    return Arrays(torch.rand(count, 1, 28, 28, generator=draw), torch.arange(count) % 10, 10)


def test_students(tmp_path: Path, recipe: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch):
    students = recipe("students")
    train, validation, test = (Subset(clothes(*about)) for about in ((40, 0), (10, 1), (20, 2)))
    monkeypatch.setattr(students, "data", lambda samples: Splits(train, validation, test))
    out, runs = tmp_path / "out", tmp_path / "runs"

    def call(*words: object) -> int:
        return students.main([str(w) for w in ("--runs", runs, "--out", out, "--epochs", 1, "--short", *words)])

    assert call("--seeds", 0, "--only", "equal passes/CE", "equal passes/DiSK", "as published/SimKD") == 0
    results = json.loads((out / "students.json").read_text())["runs"]
    passes = {name: run["0"]["passes"] for name, run in results.items()}
    assert passes == {"equal passes/CE": 5, "equal passes/DiSK": 5, "as published/SimKD": 2, "as published/CE": 1}
    teacher = (runs / "teacher" / "metrics.jsonl").read_text()
    assert call("--seeds", 0, 1, "--only", "equal passes/CE", "equal passes/DiSK", "equal passes/SimKD + DiSK") == 0
    assert (runs / "teacher" / "metrics.jsonl").read_text() == teacher
    text = (out / "students.md").read_text()
    assert "| SimKD + DiSK |" in text
    assert "as published" in text.lower()
    assert (out / "students.png").read_bytes().startswith(PNG)
    assert students.main(["--table", "--runs", str(tmp_path / "none"), "--out", str(out)]) == 0
    assert (out / "students.md").read_text() == text


def test_the_students_are_a_hundred_times_smaller(recipe: Callable[[str], Any]):
    students = recipe("students")
    sizes = []
    for about in (students.TEACHER, students.STUDENT):
        rest = {key: value for key, value in about.items() if key != "name"}
        model = models.make(about["name"], classes=10, inputs=(1, 28, 28), **rest)
        sizes.append((sum(p.numel() for p in model.parameters()), macs(model, (1, 28, 28))))
    assert sizes == [(1_663_370, 12_273_152), (15_910, 15_880)]


def test_tables(tmp_path: Path, recipe: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch):
    tables = recipe("tables")
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 200), ("test", 100)):
        arrays[f"x_{split}"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 100
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "cifar100.npz", **arrays)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    for name, network in (("resnet10_l", "resnet10_xxs"), ("resnet32x4", "resnet10_xxs"), ("wrn_40_2", "resnet10_s")):
        monkeypatch.setitem(tables.NETWORKS, name, tables.NETWORKS[network])
    common = ["--epochs", "1", "--batch-size", "50", "--device", "cpu", "--runs", str(tmp_path / "runs")]
    common += ["--out", str(tmp_path / "out")]
    assert tables.main(["--table", "6.3", "--only", "resnet10_l > resnet10_xxs", *common]) == 0
    text = (tmp_path / "out" / "table_6_3.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| resnet10_l | resnet10_xxs"))
    assert "(71.99)" in row
    assert row.endswith("(4.92) |")
    disk = next((tmp_path / "runs").rglob("disk-*/summary.json"))
    assert json.loads(disk.read_text())["passes"] == 4
    assert tables.main(["--table", "6.3", "--write", *common]) == 0
    assert (tmp_path / "out" / "table_6_3.md").read_text() == text


def test_convolutional(tmp_path: Path, recipe: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch):
    small, random = recipe("convolutional"), np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 60), ("test", 20)):
        arrays[f"x_{split}"] = random.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 10
    np.savez(tmp_path / "cifar10.npz", **arrays)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    words = ["--data", "cifar10", "--teacher", "resnet10_xs", "--teacher-passes", "6", "--passes", "5"]
    words += ["--batch-size", "30", "--students", "resnet10_xxs", "--seeds", "0"]
    assert small.main([*words, *places]) == 0
    results = json.loads((tmp_path / "out" / "convolutional.json").read_text())["runs"]["cifar10"]
    assert results["teacher"]["passes"] == 6
    by_method = results["resnet10_xxs"]
    assert list(by_method) == list(small.METHODS)
    assert {run["0"]["passes"] for run in by_method.values()} == {5}
    assert [name for name, run in by_method.items() if run["0"]["right"] is not None] == [
        "DiSK, eq. (6.5)",
        "DiSK, a pass a round",
        "DiSK as coded",
    ]
    text = (tmp_path / "out" / "convolutional.md").read_text()
    assert "| DiSK as coded |" in text
    assert small.main(["--table", *places]) == 0
    assert (tmp_path / "out" / "convolutional.md").read_text() == text


def test_published_figures_are_complete(recipe: Callable[[str], Any]):
    tables = recipe("tables")
    for page in tables.PAGES.values():
        for data, rows in page.published.items():
            assert data in page.data
            assert set(rows) == set(page.pairs)
            assert {len(row) for row in rows.values()} == {1 + len(page.columns)}
    small = tables.PAGES["6.4"].published["cifar100"]
    assert small["resnet32x4", "wrn_16_2"] == (81.45, 74.26, 76.28, 77.67, 74.70, 75.65, 77.17)


@pytest.mark.parametrize("name", ["students", "tables", "convolutional"])
def test_without_data_they_say_so(
    name: str,
    tmp_path: Path,
    recipe: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    words = ["--table", "6.4"] if name == "tables" else []
    assert recipe(name).main([*words, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    assert "FEDLOOM_DATA" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
