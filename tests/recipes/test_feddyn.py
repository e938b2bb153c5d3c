"""The FedDyn recipes run and report the expected results."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.pictures import look_alike
from matplotlib.figure import Figure

from fedloom.data import federate
from fedloom.experiment.runtime import reason_against_bf16

FOLDER = Path(__file__).parents[2] / "recipes" / "feddyn"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``recipe("table_a4", "--table")`` does what ``python recipes/feddyn/table_a4.py --table`` does; its exit code."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name, *arguments: importlib.import_module(name).main([str(a) for a in arguments])


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A folder that looks like MNIST, with a few images that a network can tell apart."""
    look_alike(tmp_path / "data" / "MNIST" / "raw", 1000, 100)
    return tmp_path / "data"


def test_table_a4_runs_and_writes_the_table_again(
    tmp_path: Path, recipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("table_a4")
    grids = {method: list(module.grid(method)) for method in module.METHODS}
    assert {method: len(points) for method, points in grids.items()} == {
        "FedDyn": 18, "SCAFFOLD": 6, "FedAvg": 6, "FedProx": 12
    }  # fmt: skip
    monkeypatch.setattr(module, "grid", lambda method: [replace(point, work=1) for point in grids[method][:4]])
    monkeypatch.setattr(module, "SURVIVORS", 2)
    assert recipe("table_a4", "--seeds", 0, "--settings", "type1", "--limit", 1, "--draws", 1, "--out", tmp_path) == 0
    results = json.loads((tmp_path / "table_a4.json").read_text())["settings"]["type1"]
    tried = {name: len(points) for name, points in results["grid"].items()}
    assert tried == dict.fromkeys(module.METHODS, 4 + 2)
    assert [run["cost"] for run in results["draws"]["0"]["runs"].values()] == [1, 2, 1, 1]
    assert [run["rounds"] for run in results["draws"]["0"]["runs"].values()] == [1, 1, 1, 1]
    assert 1.4 < results["draws"]["0"]["optimum"] < 1.6

    text = (tmp_path / "table_a4.md").read_text()
    assert re.search(r"\| type1 \| 1\.5.* \| 1\+ \(17\) \| 2\+ \(88\) \| 1\+ \(20\) \| 1\+ \(18\) \|", text)
    assert (tmp_path / "table_a4.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "table_a4.md").unlink()
    assert recipe("table_a4", "--table", "--out", tmp_path) == 0
    assert (tmp_path / "table_a4.md").read_text() == text


def test_mnist_runs_goes_on_and_writes_the_table_again(
    tmp_path: Path, digits: Path, recipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(digits))
    cases, out = importlib.import_module("mnist_dirichlet").CASES, tmp_path / "out"
    for name, case in cases.items():  # the paper's epochs, or SCAFFOLD's steps
        monkeypatch.setitem(cases, name, replace(case, work=dict.fromkeys(case.work, 3)))
    for rounds, names in ((1, ("SCAFFOLD", "FedDyn")), (2, ("SCAFFOLD",)), (1, ("FedAvg", "FedProx"))):
        where = ("--seeds", 0, "--runs", tmp_path / "runs", "--out", out)
        assert recipe("mnist_dirichlet", *where, "--rounds", rounds, "--only", *names) == 0
    runs = json.loads((out / "mnist_dirichlet.json").read_text())["runs"]
    rounds_and_costs = {name: (seeds["seed0"]["rounds"], seeds["seed0"]["cost"]) for name, seeds in runs.items()}
    assert rounds_and_costs == {"SCAFFOLD": (2, 2), "FedDyn": (1, 1), "FedAvg": (1, 1), "FedProx": (1, 1)}
    text = (out / "mnist_dirichlet.md").read_text()
    assert "| 98.2 % | SCAFFOLD | 4+ | 4+ | 208 |" in text
    assert recipe("mnist_dirichlet", "--table", "--runs", tmp_path / "none", "--out", out) == 0
    assert (out / "mnist_dirichlet.md").read_text() == text


def test_cifar_runs_and_says_what_the_paper_sent(
    tmp_path: Path, recipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    random, out = np.random.default_rng(0), tmp_path / "out"
    x, y = random.integers(0, 255, (200, 32, 32, 3), dtype=np.uint8), np.arange(200) % 10
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    module = importlib.import_module("cifar")
    few = partial(federate, "cifar10", clients=20, held_out=0.0)
    monkeypatch.setattr(module, "deal", lambda data, split, seed: few(module.SPLITS[split], seed=seed))
    arguments = ("--settings", "cifar10_dir3_all", "cifar10_iid", "--only", "SCAFFOLD", "--rounds", 1, "--seeds", 0)
    assert recipe("cifar", *arguments, "--runs", tmp_path / "runs", "--out", out) == 0
    text = (out / "cifar10_dir3_all.md").read_text()
    assert text.startswith("# CIFAR-10, 100 clients, 100 % participation, Dirichlet .3")
    assert "| 80.2 % | SCAFFOLD | 2+ | 2+ | 504 |" in text
    run = json.loads((out / "cifar10_iid.json").read_text())["runs"]["SCAFFOLD"]["seed0"]
    assert (run["rounds"], run["cost"], run["average"]) == (1, 2, [run["average"][0]])
    if reason_against_bf16("cpu") is None:
        fast = ("--settings", "cifar10_iid", *arguments[3:], "--precision", "bf16")
        assert recipe("cifar", *fast, "--runs", tmp_path / "runs", "--out", out) == 0
        command = json.loads((out / "cifar10_iid.json").read_text())["command"]
        assert command == "python recipes/feddyn/cifar.py --settings cifar10_iid --precision bf16"
        places = [tmp_path / "runs" / name / "SCAFFOLD" / "seed0" for name in ("cifar10_iid", "cifar10_iid-bf16")]
        exact, rounded = (json.loads((place / "metrics.jsonl").read_text())["train/loss"] for place in places)
        assert exact != rounded
    (out / "cifar10_iid.md").unlink()
    assert recipe("cifar", "--table", "--runs", tmp_path / "none", "--out", out) == 0
    assert (out / "cifar10_iid.md").exists()
    assert not (out / "cifar100_iid.md").exists()


def test_mnist_says_what_is_missing(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "FEDLOOM_DATA"} | {"HOME": "/nonexistent"}
    command = [sys.executable, str(FOLDER / "mnist_dirichlet.py"), "--runs", str(tmp_path), "--out", str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 2
    assert process.stderr.startswith("MNIST is missing")
    assert process.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_medians_say_what_was_not_reached(recipe: Callable[..., int]) -> None:
    book = importlib.import_module("common")
    never = float("inf")
    assert book.cell([], []) == "-"
    assert book.cell([30, 20, 25], [30, 20, 25]) == "25 (20 to 30)"
    assert book.cell([30, 20, never], [30, 20, 500]) == "30 (20 to 500+)"
    assert book.cell([never, never, 20], [500, 500, 20]) == "500+ (20 to 500+)"
    assert book.cell([never, 20], [40, 20]) == "30+ (20 to 40+)"


def test_the_picture_joins_looks_that_are_rounds_apart(
    tmp_path: Path, recipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = importlib.import_module("cifar").study("cifar10_dir6")
    curve = [None, 0.5, None, 0.7]
    run = {"rounds": 4, "cost": 2, "average": curve, "global": [None, 0.4, None, 0.6]}
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    study.picture({"runs": {"SCAFFOLD": {"seed0": run}}}, tmp_path / "picture.png")
    lines = [axis.lines[0].get_xydata().tolist() for axis in figures[0].axes]
    assert lines == [[[4, 50], [8, 70]], [[4, 40], [8, 60]]]
