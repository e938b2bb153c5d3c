"""The recipes of personal models run on a handful of images, go on where they were, and say what they are told to."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "recipes" / "superfed"
Recipe = Callable[..., int]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """``recipe("table_2_3", "--table")`` does what ``python recipes/superfed/table_2_3.py --table`` does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name, *arguments: importlib.import_module(name).main([str(a) for a in arguments])


def write_idx(path: Path, array: np.ndarray) -> None:
    shape = b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes())


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like MNIST, with a few images that a network can tell apart."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, samples in (("train", 1000), ("t10k", 50)):
        labels = np.arange(samples) % 10
        images = random.integers(0, 50, (samples, 28, 28))
        images[np.arange(samples), labels] += 200
        write_idx(raw / f"{split}-images-idx3-ubyte", images)
        write_idx(raw / f"{split}-labels-idx1-ubyte", labels)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))


@pytest.mark.usefixtures("digits")
def test_table_2_3_and_its_pictures(tmp_path: Path, recipe: Recipe) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    where = ("--runs", runs, "--out", out)
    some = ("FedAvg", "FedPer", "APFL", "SuPerFed-MM")
    assert recipe("table_2_3", *where, "--clients", 100, "--rounds", 1, "--only", *some) == 0
    assert recipe("table_2_3", *where, "--clients", 100, "--rounds", 2, "--only", *some[2:]) == 0
    cells = json.loads((out / "table_2_3.json").read_text())["runs"]["100"]
    assert {name: (cell["rounds"], cell["at"]) for name, cell in cells.items()} == {
        "FedAvg": (1, [1]),
        "FedPer": (1, [1]),
        "APFL": (2, [1, 2]),
        "SuPerFed-MM": (2, [1, 2]),
    }
    for name, cell in cells.items():
        assert 5 <= cell["took part"]["count"] <= 5 * cell["rounds"]
        assert ("as published" in cell) == name.startswith("SuPerFed")
    best = cells["SuPerFed-MM"]["as published"]["mean"][-1]
    assert all(best >= cells["SuPerFed-MM"][at]["mean"][-1] for at in ("validation", "lambda .5", "lambda 0"))
    text = (out / "table_2_3.md").read_text()
    assert "99.19 (0.92)" in text, "the published figure of APFL"
    assert "## 100 clients, 1, 2 rounds" in text
    assert (out / "table_2_3.png").read_bytes().startswith(b"\x89PNG")
    assert recipe("table_2_3", "--table", "--runs", tmp_path / "none", "--out", out) == 0
    assert (out / "table_2_3.md").read_text() == text

    before = (runs / "k100" / "apfl" / "seed0" / "metrics.jsonl").read_text()
    assert recipe("figure_2_5", *where, "--rounds", 2, "--only", "APFL", "SuPerFed-MM") == 0
    assert (runs / "k100" / "apfl" / "seed0" / "metrics.jsonl").read_text() == before, "finished runs stay as they are"
    swept = json.loads((out / "figure_2_5.json").read_text())["runs"]
    for name in ("APFL", "SuPerFed-MM"):
        assert len(swept[name]["mean"]) == 11
        assert swept[name]["clients"] == cells[name]["took part"]["count"]
        assert swept[name]["barrier"] >= 0
    deployed = swept["APFL"]["mean"]
    assert deployed[2] == pytest.approx(cells["APFL"]["took part"]["in"], abs=0.2), "α = .25 lies beside λ = .2"
    text = (out / "figure_2_5.md").read_text()
    assert recipe("figure_2_5", "--table", "--out", out) == 0
    assert (out / "figure_2_5.md").read_text() == text

    assert recipe("landscape", *where, "--rounds", 2, "--steps", 3, "--only", "FedAvg", "SuPerFed-MM") == 0
    drawn = json.loads((out / "landscape.json").read_text())["runs"]
    for run in drawn.values():
        assert all(0 < reached <= distance for reached, distance in zip(run["reach"], run["distances"], strict=True))
    assert min(drawn["SuPerFed-MM"]["distances"]) > max(drawn["FedAvg"]["distances"]), "v was initialised elsewhere"
    assert (out / "landscape.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("digits")
def test_table_2_6(tmp_path: Path, recipe: Recipe) -> None:
    out = tmp_path / "out"
    where = ("--runs", tmp_path / "runs", "--out", out)
    some = ("--settings", "pair .4", "symmetric .6", "--only", "FedAvg", "SuPerFed-LM")
    assert recipe("table_2_6", *where, *some, "--rounds", 1) == 0
    runs = json.loads((out / "table_2_6.json").read_text())["runs"]
    assert sorted(runs) == ["pair .4", "symmetric .6"]
    for cells in runs.values():
        assert list(cells) == ["FedAvg", "SuPerFed-LM"]
        for cell in cells.values():
            assert all(0 <= cell[metric]["mean"] <= 1 for metric in ("accuracy", "ece", "mce"))
            assert cell["ece"]["mean"] <= cell["mce"]["mean"], "an average of gaps is at most the largest"
    text = (out / "table_2_6.md").read_text()
    assert "0.35 / 0.77 / 46.82" in text, "the published figures of SuPerFed-LM for pair .4"
    assert text.count("Not run.") == 2
    assert recipe("table_2_6", "--table", "--runs", tmp_path / "none", "--out", out) == 0
    assert (out / "table_2_6.md").read_text() == text


def test_the_recipes_run_the_published_settings(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shelf, table = importlib.import_module("shelf"), importlib.import_module("table_2_3")
    assert list(shelf.METHODS) == list(table.PUBLISHED) == list(importlib.import_module("table_2_6").PUBLISHED)
    from fedloom.data import federate

    federation = federate("digits", "pathological", clients=20, validation=0.1)
    for name in shelf.METHODS:
        made = shelf.experiment(name, federation, rounds=8, seed=0)
        local = made.local
        assert (made.cohort, local.epochs, local.batch_size, local.lr, local.lr_decay) == (5, 10, 10, 0.01, 0.99)
        assert (local.momentum, local.weight_decay) == (0.0 if name == "SCAFFOLD" else 0.9, 1e-4)
        assert made.evaluation.every == 2


@pytest.mark.parametrize("name", ["table_2_3", "table_2_6", "figure_2_5", "landscape"])
def test_without_data_they_say_so(
    name: str, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert recipe(name, "--runs", tmp_path / "runs", "--out", tmp_path / "out") == 2
    assert "MNIST" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
