"""The SuPerFed recipes run on a few images, resume, and report the expected results."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers.pictures import look_alike

from fedloom.core.federation import Arrays
from fedloom.data import federate
from fedloom.parts.personal import PFedMe

FOLDER = Path(__file__).parents[2] / "recipes" / "superfed"
Recipe = Callable[..., int]
Undrawn = Callable[[ModuleType], AbstractContextManager[None]]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """``recipe("table_2_3", "--table")`` does what ``python recipes/superfed/table_2_3.py --table`` does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name, *arguments: importlib.import_module(name).main([str(a) for a in arguments])


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like MNIST, with a few images that a network can tell apart."""
    look_alike(tmp_path / "data" / "MNIST" / "raw", 1000, 50)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))


@pytest.mark.usefixtures("digits")
def test_table_2_3_and_its_pictures(tmp_path: Path, recipe: Recipe, undrawn: Undrawn) -> None:
    out, runs, table = tmp_path / "out", tmp_path / "runs", importlib.import_module("table_2_3")
    where, by = ("--runs", runs, "--out", out), ("--settings", "text", "--seeds", 0)
    some = ("FedAvg", "FedPer", "APFL", "SuPerFed-MM")
    with undrawn(table):
        assert recipe("table_2_3", *where, *by, "--clients", 100, "--rounds", 1, "--only", *some) == 0
        assert recipe("table_2_3", *where, *by, "--clients", 100, "--rounds", 2, "--only", *some[2:]) == 0
    assert recipe("table_2_3", *where, *by, 1, "--clients", 100, "--rounds", 1, "--only", *some[:2]) == 0
    results = json.loads((out / "table_2_3.json").read_text())["runs"]["100"]
    assert {name: list(runs) for name, runs in results.items()} == {
        "FedAvg": ["0", "1"], "FedPer": ["0", "1"], "APFL": ["0"], "SuPerFed-MM": ["0"]
    }  # fmt: skip
    cells = {name: runs["0"] for name, runs in results.items()}
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
    assert re.search(r"\| FedPer \| 0, 1 \| 1, 1 \| \S+ ± \S+ \(\S+\) \| \S+ ± \S+ \(\S+ to \S+\) \|", text)
    assert (out / "table_2_3.png").read_bytes().startswith(b"\x89PNG")
    with undrawn(table):
        assert recipe("table_2_3", "--table", "--runs", tmp_path / "none", "--out", out, *by) == 0
    assert (out / "table_2_3.md").read_text() == text

    before = (runs / "k100" / "apfl" / "seed0" / "metrics.jsonl").read_text()
    assert recipe("figure_2_5", *where, *by, "--clients", 100, "--rounds", 2, "--only", "APFL", "SuPerFed-MM") == 0
    assert (runs / "k100" / "apfl" / "seed0" / "metrics.jsonl").read_text() == before, "finished runs stay as they are"
    by_seed = json.loads((out / "figure_2_5.json").read_text())["runs"]
    assert all(list(runs) == ["0"] for runs in by_seed.values())
    sweeps = {name: runs["0"] for name, runs in by_seed.items()}
    for name in ("APFL", "SuPerFed-MM"):
        assert len(sweeps[name]["mean"]) == 11
        assert sweeps[name]["clients"] == cells[name]["took part"]["count"]
        assert sweeps[name]["barrier"] >= 0
    deployed = sweeps["APFL"]["mean"]
    assert deployed[2] == pytest.approx(cells["APFL"]["took part"]["in"], abs=0.2), "α = .25 lies beside λ = .2"
    text = (out / "figure_2_5.md").read_text()
    assert (out / "figure_2_5.png").read_bytes().startswith(b"\x89PNG")
    assert recipe("figure_2_5", "--table", "--settings", "text", "--out", out) == 0
    assert (out / "figure_2_5.md").read_text() == text

    some = ("--seeds", 0, 1, "--rounds", 2, "--steps", 3, "--only", "FedAvg", "SuPerFed-MM")
    assert recipe("landscape", *where, *some) == 0
    by_seed = json.loads((out / "landscape.json").read_text())["runs"]
    assert all(list(runs) == ["0", "1"] for runs in by_seed.values())
    landscapes = {name: runs["0"] for name, runs in by_seed.items()}
    for run in landscapes.values():
        assert len(run["reach"]) == 2
        assert len(run["random_reach"]) == 10
        assert all(0 < distance < 350 for distance in (*run["reach"], *run["random_reach"]))
    assert min(landscapes["SuPerFed-MM"]["distances"]) > max(landscapes["FedAvg"]["distances"]), (
        "v was initialised elsewhere"
    )
    assert (out / "landscape.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("digits")
def test_table_2_6(tmp_path: Path, recipe: Recipe) -> None:
    out = tmp_path / "out"
    where = ("--runs", tmp_path / "runs", "--out", out)
    some = ("--settings", "pair .4", "symmetric .6", "--only", "FedAvg", "SuPerFed-LM")
    assert recipe("table_2_6", *where, *some, "--rounds", 1, "--seeds", 0, 1) == 0
    runs = json.loads((out / "table_2_6.json").read_text())["runs"]
    assert sorted(runs) == ["pair .4", "symmetric .6"]
    for cells in runs.values():
        assert list(cells) == ["FedAvg", "SuPerFed-LM"]
        for cell in (cell for by_seed in cells.values() for cell in by_seed.values()):
            assert all(0 <= cell[metric]["mean"] <= 1 for metric in ("accuracy", "ece", "mce"))
            assert cell["ece"]["mean"] <= cell["mce"]["mean"], "an average of gaps is at most the largest"
    text = (out / "table_2_6.md").read_text()
    assert "0.35 / 0.77 / 46.82" in text, "the published figures of SuPerFed-LM for pair .4"
    assert re.search(r"\| SuPerFed-LM \| 0, 1 \| 1, 1 \|( \d\S* ± \S+ \(\S+\) \|){3} \S+ ± \S+ \(\S+ to \S+\) \|", text)
    assert text.count("Not run.") == 2
    assert recipe("table_2_6", "--table", "--runs", tmp_path / "none", "--out", out) == 0
    assert (out / "table_2_6.md").read_text() == text


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight roles that each repeat a word of their own, and colour images of ten classes that differ by brightness."""
    folder = tmp_path / "data"
    folder.mkdir()
    words = ("never ", "more, ", "alas! ", "hark, ", "good ", "my lord ", "exit ", "enter ")
    speeches = [{"play": "p", "title": "P", "role": str(n), "text": word * 30} for n, word in enumerate(words)]
    (folder / "shakespeare.jsonl").write_text("\n".join(map(json.dumps, speeches)) + "\n")
    random = np.random.default_rng(0)
    y = np.arange(500) % 10
    x = (random.integers(0, 20, (500, 32, 32, 3)) + 20 * y[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "cifar10.npz", x_train=x, y_train=y, x_test=x[:50], y_test=y[:50])
    monkeypatch.setenv("FEDLOOM_DATA", str(folder))


@pytest.mark.usefixtures("lines")
def test_tables_2_4_2_5(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = importlib.import_module("settings")
    small = {"clients": 8, "source_settings": {"train": 80, "test": 0}, "model_settings": {"hidden": 8}}
    monkeypatch.setitem(columns.REDUCED, "shakespeare", replace(columns.REDUCED["shakespeare"], **small))
    out, runs = tmp_path / "out", tmp_path / "runs"
    where = ("--runs", runs, "--out", out)
    some = ("--columns", "cifar10_50", "cifar100_10", "shakespeare", "--only", "FedAvg", "SuPerFed-LM")
    assert recipe("tables_2_4_2_5", *where, *some, "--rounds", 1, "--seeds", 0) == 0
    message = capsys.readouterr().err
    assert message.startswith("cifar100_10 is skipped: CIFAR-100 is missing")
    assert message.count("\n") == 1
    results = json.loads((out / "tables_2_4_2_5_reduced.json").read_text())["columns"]
    assert sorted(results) == ["cifar10_50", "shakespeare"]
    assert results["shakespeare"]["clients"] == 8
    assert results["cifar10_50"]["changed"] == ["rounds: 1 instead of 500"]
    for name, metrics in (("cifar10_50", ["accuracy"]), ("shakespeare", ["accuracy", "top5"])):
        assert list(results[name]["runs"]) == ["FedAvg", "SuPerFed-LM"]
        for method, by_seed in results[name]["runs"].items():
            assert list(by_seed) == ["0"]
            run = by_seed["0"]
            assert list(run) == metrics
            for cell in run.values():
                assert cell["rounds"] == 1
                assert cell["took part"]["count"] == 5
                assert ("as published" in cell) == (method == "SuPerFed-LM")
            first, last = (run[metric]["validation"]["mean"][-1] for metric in (metrics[0], metrics[-1]))
            assert first <= last, "the right answer is among the first five at least as often"
    text = (out / "tables_2_4_2_5_reduced.md").read_text()
    assert "| 43.09 (24.56) |" in text, "the published figure of FedAvg on CIFAR-10"
    assert "| 83.97 (5.72) |" in text, "and the top-5 one of SuPerFed-LM on Shakespeare"
    assert "clients: 8 instead of 660; rounds: 1 instead of 500; source settings: train=80" in text
    assert "CIFAR-100, Dirichlet 10, 100 clients" in text.partition("Not run: ")[2]
    before = (runs / "reduced" / "shakespeare" / "t1" / "fedavg" / "seed0" / "metrics.jsonl").read_text()
    again = ("--columns", "shakespeare", "--only", "FedAvg", "--rounds", 1, "--seeds", 0, 1)
    assert recipe("tables_2_4_2_5", *where, *again) == 0
    after = (runs / "reduced" / "shakespeare" / "t1" / "fedavg" / "seed0" / "metrics.jsonl").read_text()
    assert after == before, "finished runs stay as they are"
    text = (out / "tables_2_4_2_5_reduced.md").read_text()
    assert re.search(r"\| FedAvg \| 0, 1 \| 1, 1 \| \S+ ± \S+ \(\S+\) \|", text)
    assert recipe("tables_2_4_2_5", "--table", "--runs", tmp_path / "none", "--out", out) == 0
    assert (out / "tables_2_4_2_5_reduced.md").read_text() == text


def test_the_columns_are_those_of_table_2_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    columns, shelf = importlib.import_module("settings"), importlib.import_module("common")
    settings = {
        "cifar10": (10, 10, 0.01), "cifar100": (5, 20, 0.01), "tiny_imagenet": (5, 20, 0.02), "femnist": (10, 10, 0.01),
        "shakespeare": (5, 50, 0.8),
    }  # fmt: skip
    shapes = {"cifar10": (10, 3, 32), "cifar100": (100, 3, 32), "tiny_imagenet": (200, 3, 64), "femnist": (62, 1, 28)}
    assert list(columns.REDUCED) == list(columns.PUBLISHED)
    for name, column in columns.PUBLISHED.items():
        local = column.local
        assert (local.epochs, local.batch_size, local.lr) == settings[column.source]
        assert (column.rounds, local.lr_decay, local.momentum, local.weight_decay) == (500, 0.99, 0.9, 1e-4)
        assert list(column.table) == list(shelf.METHODS)
        assert columns.changes(name, column) == []
        reduced = columns.REDUCED[name]
        assert f"rounds: {reduced.rounds} instead of 500" in columns.changes(name, reduced)
        assert reduced.local == local
        classes, colours, side = shapes.get(column.source, (80, 0, 80))
        x = torch.zeros(1, colours, side, side) if colours else torch.zeros(1, side, dtype=torch.int64)
        arrays = Arrays(x, torch.zeros(1, dtype=torch.int64), classes)
        sizes = []
        for version in (reduced, column):
            network = version.network(arrays)
            assert network(x).shape == (1, classes)
            sizes.append(sum(p.numel() for p in network.parameters()))
        assert (sizes[0] < sizes[1]) == (column.source != "cifar10")


@pytest.mark.usefixtures("digits")
def test_table_2_7(tmp_path: Path, recipe: Recipe, undrawn: Undrawn, monkeypatch: pytest.MonkeyPatch) -> None:
    table = importlib.import_module("table_2_7")
    monkeypatch.setitem(table.SCALES, "reduced", replace(table.SCALES["reduced"], clients=50, mus=(0.01,)))
    shelf = table.common
    few = partial(shelf.experiment, local=replace(shelf.LOCAL, epochs=2))
    monkeypatch.setattr(shelf, "experiment", few)
    out, runs = tmp_path / "out", tmp_path / "runs"
    where = ("--runs", runs, "--out", out, "--rounds", 5, "--seeds", 0, 1, "--only", "SuPerFed-MM")
    assert recipe("table_2_7", *where, "--starts", 0, 0.4, 0.8, "--nus", 0, 2, "--mus", 0.01) == 0
    assert len(list(runs.glob("reduced/superfed_mm/*"))) == 4, "ν 2, μ .01 and L .4 T is run once"
    results = json.loads((out / "table_2_7_reduced.json").read_text())
    starts, grid = results["starts"]["SuPerFed-MM"], results["grid"]["SuPerFed-MM"]
    assert list(starts) == ["0", "0.4", "0.8"]
    assert list(grid) == ["0 0.01", "2 0.01"]
    assert grid["2 0.01"] == starts["0.4"]
    assert all(list(by_seed) == ["0", "1"] for by_seed in (*starts.values(), *grid.values()))
    for run in (run for by_seed in (*starts.values(), *grid.values()) for run in by_seed.values()):
        assert 5 == run["late"]["clients"] <= run["own"]["clients"] <= run["took part"]["clients"] <= 25
        for group in (run["own"], run["late"]):
            assert len(group["accuracy"]) == len(group["loss"]) == 11
            top, at, low = table.best(group)
            assert top == group["accuracy"][round(10 * at)]
            assert all(top[0] >= mean for mean, _ in group["accuracy"])
            assert all(low[0] <= mean for mean, _ in group["loss"])
    for seed in "01":
        first, last = starts["0"][seed], starts["0.8"][seed]
        assert first["own"] == first["took part"], "with L 0 whoever took part has a trained local model"
        assert last["own"] == last["late"]
    text = (out / "table_2_7_reduced.md").read_text()
    assert "| 91.29 (6.28) | 2.53 (0.72) |" in text, "the published figures of model mixing with L .8 T"
    assert (out / "table_2_7_reduced.png").read_bytes().startswith(b"\x89PNG")
    with undrawn(table):
        assert recipe("table_2_7", "--table", "--out", out) == 0
    assert (out / "table_2_7_reduced.md").read_text() == text


def test_the_recipes_run_the_published_settings(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shelf, table = importlib.import_module("common"), importlib.import_module("table_2_3")
    assert list(shelf.METHODS) == list(table.PUBLISHED) == list(importlib.import_module("table_2_6").PUBLISHED)
    federation = federate("digits", "pathological", clients=20, validation=0.1)
    for name in shelf.METHODS:
        experiment = shelf.experiment(name, federation, rounds=8, seed=0)
        local = experiment.local
        assert (experiment.cohort, local.epochs, local.batch_size, local.lr, local.lr_decay) == (5, 10, 10, 0.01, 0.99)
        assert (local.momentum, local.weight_decay) == (0.9, 1e-4)
        assert experiment.evaluation.every == 2
        for settings, decay in ((shelf.TEXT, 0.99), (shelf.SCRIPTS, 0.999)):
            assert table.experiment(name, federation, 20, 0, settings).local.lr_decay == decay
    late = [table.experiment(f"SuPerFed-{kind}", federation, 20, 0, shelf.SCRIPTS).method for kind in ("MM", "LM")]
    assert [(method.personal.start_round, method.personal.nu) for method in late] == [(4, 1.0), (8, 2.0)]


@pytest.mark.parametrize("name", ["table_2_3", "table_2_6", "table_2_7", "figure_2_5", "landscape"])
def test_without_data_they_say_so(
    name: str, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert recipe(name, "--runs", tmp_path / "runs", "--out", tmp_path / "out") == 2
    assert "MNIST" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_default_rate_of_pfedme_is_the_best_of_those_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("pfedme_rate")
    stored = json.loads((FOLDER / "results" / "pfedme_rate.json").read_text())
    clients = {float(rate): sum(run["clients"] for run in seeds.values()) for rate, seeds in stored["runs"].items()}
    assert {len(seeds) for seeds in stored["runs"].values()} == {3}
    assert max(clients, key=lambda rate: clients[rate]) == PFedMe().personal_lr
    assert module.page(stored).rstrip() == (FOLDER / "results" / "pfedme_rate.md").read_text().rstrip()
