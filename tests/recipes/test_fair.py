"""The fairness recipes run on small stand-ins for the real data and report the expected results."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.pictures import look_alike

FOLDER = Path(__file__).parents[2] / "recipes" / "fair"
ROUNDS = 2


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The settings, with a handful of patients and pictures behind them and eight clients instead of a thousand."""
    data = tmp_path / "data"
    hospitals(data / "heart")
    look_alike(data / "FashionMNIST" / "raw", 300, 100)
    monkeypatch.setenv("FEDLOOM_DATA", str(data))
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("common")
    module.load.cache_clear()
    module.deal.cache_clear()
    few = replace(module.SETTINGS["fashion_dirichlet"], clients=8, cohort=3, lrs=(0.03, 0.3))
    monkeypatch.setitem(module.SETTINGS, "fashion_dirichlet", few)
    hidden = replace(module.SETTINGS["fashion_dirichlet_unseen"], clients=8, cohort=3)
    monkeypatch.setitem(module.SETTINGS, "fashion_dirichlet_unseen", hidden)
    for name, seeds in (("heart", (0,)), ("heart_published", (0, 1))):
        monkeypatch.setitem(module.SETTINGS, name, replace(module.SETTINGS[name], tuning=seeds))
    return module


@pytest.fixture
def recipe(trials: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """``recipe("silo", "--data", "heart")`` runs it for two rounds; returns the folder of its results."""

    def run(name: str, *arguments: object, code: int = 0) -> Path:
        where = ("--runs", tmp_path / "runs", "--out", tmp_path / "out", "--rounds", ROUNDS)
        assert importlib.import_module(name).main([str(a) for a in (*arguments, *where)]) == code
        return tmp_path / "out"

    return run


@pytest.mark.skipif(not os.environ.get("FEDLOOM_DATA"), reason="FEDLOOM_DATA names no folder with MNIST")
def test_every_writer_of_mnist_is_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    common = importlib.import_module("common")
    common.load.cache_clear()
    common.deal.cache_clear()
    (clients,) = re.findall(r"5 of (\d+) clients", common.SETTINGS["mnist_writers"].words)
    with pytest.warns(UserWarning, match=f"keeps {clients} of 836 natural ids"):
        assert len(common.deal("mnist_writers", 2)) == int(clients)


def test_patients_are_scaled_by_their_own_hospitals_training_patients(trials: ModuleType) -> None:
    for seed in (0, 2):
        federation = trials.deal("heart_published", seed)
        assert len(federation.train.index.rows) + len(federation.held_out.index.rows) == 160
        for client in range(4):
            x = federation.train.client(client).x.double()
            assert np.abs(x.mean(0).numpy()).max() < 1e-6
            deviations = x.std(0, correction=0).numpy()
            assert (np.isclose(deviations, 1, atol=1e-5) | (deviations == 0)).all()


def test_validation_samples_leave_training_alone(trials: ModuleType) -> None:
    plain, aside = trials.deal("heart_published", 2), trials.deal("heart_published", 2, 0.25)
    for client in range(4):
        assert set(aside.held_out.index[client]) == set(plain.held_out.index[client])
        train, validation = set(aside.train.index[client]), set(aside.validation.index[client])
        assert not train & validation
        assert train | validation == set(plain.train.index[client])
        assert len(validation) == 8


def test_six_silos_and_a_minority_hold_turned_images(trials: ModuleType) -> None:
    federation, source = trials.deal("six_silos", 1), trials.load("six_silos")
    assert [len(federation.train.index[silo]) for silo in range(6)] == [50, 50, 50, 50, 40, 22]
    source_images = {image.numpy().tobytes() for image in source.train.x}
    for silo, turns in enumerate((0, 0, 0, 1, 2, 3)):
        images = federation.train.client(silo).x.rot90(-turns, (-2, -1))
        assert {image.contiguous().numpy().tobytes() for image in images} <= source_images
    fashion = trials.SETTINGS["fashion_dirichlet"]
    trials.SETTINGS["few"] = replace(trials.SETTINGS["minority"], source=fashion.source)
    federation = trials.deal("few", 1)
    del trials.SETTINGS["few"]
    assert len(federation) == 40
    sizes = [len(federation.train.index[client]) + len(federation.held_out.index[client]) for client in range(40)]
    assert sizes == [10] * 40
    turned = [image.contiguous().numpy().tobytes() not in source_images for client in range(40)
              for image in federation.train.client(client).x]  # fmt: skip
    assert all(turned[: 4 * 8])
    assert not all(turned[4 * 8 :])


def hospitals(folder: Path) -> None:
    """Forty patients each, sick when they are old."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        lines = []
        for _ in range(40):
            age = int(random.integers(30, 80))
            sick = int(age + random.normal(0, 10) > 55)
            pain, pressure, fat, rest = (random.integers(*ends) for ends in ((1, 5), (100, 180), (150, 300), (0, 3)))
            pulse, peak = random.integers(90, 190), round(random.random(), 1)
            lines.append(f"{age},1,{pain},{pressure},{fat},0,{rest},{pulse},0,{peak},?,?,?,{sick}")
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")


def test_silo_chooses_on_its_own_seed_and_compares(recipe: Callable[..., Path], trials: ModuleType) -> None:
    out = recipe("silo", "--data", "heart_published", "--seeds", 2, 4)
    results = json.loads((out / "silo.json").read_text())["data"]["heart_published"]
    points = {name: len(tried) for name, tried in results["grid"].items()}
    assert points == {"AFL": 3, "q-FedAvg": 3, "TERM": 3, "FedMGDA+": 9, "PropFair": 3}
    assert results["chosen"]["AAggFF"] == {"cdf": "frechet"}
    for method, tried in results["grid"].items():
        best = max(tried, key=lambda trial: (trial["worst10"], trial["mean"]))
        assert best["point"] == f"{method} {trials.text(results['chosen'][method])}, rate 0.01"
    runs = results["runs"]
    plain = ["FedAvg", "uniform", "AFL", "q-FedAvg", "TERM", "FedMGDA+", "PropFair", "AAggFF"]
    assert list(runs) == [*plain, "AAggFF, held out", "AAggFF, samples", "AAggFF, samples, held out"]
    assert results["chosen"]["AAggFF, held out"] == {"cdf": "frechet", "response": "validation"}
    assert results["tuning"] == [0, 1]
    assert all(list(seeds) == ["2", "4"] for seeds in runs.values())  # never the tuning seed
    assert all(run["rounds"] == ROUNDS and run["failures"] == 0 for seeds in runs.values() for run in seeds.values())
    assert all(sum(run["last_p"]) == pytest.approx(1, abs=1e-3) for run in runs["AAggFF"].values())

    assert all(run["kl"] == pytest.approx(0, abs=1e-5) for run in runs["uniform"].values())
    text = (out / "silo.md").read_text()
    assert "weight of worst 10 %" in text
    assert re.search(r"\| FedAvg \| .* \| - \|\n", text)
    assert re.search(r"\| AAggFF \| .* \| frechet \|\n", text)
    assert "| FedAvg | 84.42 | 65.22 |" in text  # the paper's
    assert re.search(r"\| TERM \| [+-]\d+\.\d\d ± \d+\.\d\d \([+-].* to [+-].*\) \|", text)
    assert (out / "silo.png").read_bytes().startswith(b"\x89PNG")


def test_stored_results_are_not_run_again_and_the_table_is_written_again(recipe: Callable[..., Path]) -> None:
    out = recipe("silo", "--data", "heart", "--only", "AAggFF", "FedAvg", "--seeds", 2)
    results, text = json.loads((out / "silo.json").read_text()), (out / "silo.md").read_text()
    results["notes"] = ["It holds."]
    (out / "silo.json").write_text(json.dumps(results))
    recipe("silo", "--table")
    assert (out / "silo.md").read_text() == f"{text.rstrip()}\n\n## What holds and what does not\n\n- It holds.\n"
    for place in (out.parent / "runs").rglob("metrics.jsonl"):
        place.unlink()
    recipe("silo", "--data", "heart", "--only", "AAggFF", "FedAvg", "--seeds", 2)
    assert list(results["data"]["heart"]["runs"]) == ["FedAvg", "AAggFF"]
    assert not list((out.parent / "runs").rglob("metrics.jsonl"))


def test_device_takes_fedavgs_rate_and_tries_every_cdf(recipe: Callable[..., Path], trials: ModuleType) -> None:
    out = recipe("device", "--data", "fashion_dirichlet", "--seeds", 2, 4)
    results = json.loads((out / "device.json").read_text())["data"]["fashion_dirichlet"]
    best = max(results["rates"], key=lambda trial: trial["mean"])
    assert results["lr"] in (0.03, 0.3)
    assert best["point"] == f"FedAvg, rate {results['lr']:g}"
    assert len(results["grid"]["AAggFF"]) == len(trials.CDFS) == 6
    assert "AFL" not in results["runs"]
    assert results["runs"]["uniform"]["2"]["last_p"] == pytest.approx([1 / 3] * 3, abs=1e-4)
    assert len(results["runs"]["AAggFF"]["2"]["last_p"]) == 3
    assert results["chosen"]["AAggFF, samples, visits"] == results["chosen"]["AAggFF"] | {
        "prior": "samples",
        "step": "visits",
    }
    assert set(results["runs"]["FedAvg"]["2"]["averaged"]) == set(trials.FIGURES)
    assert "| averaged model | average |" in (out / "device.md").read_text()
    assert "did not train" not in (out / "device.md").read_text()
    recipe("device", "--data", "fashion_dirichlet_unseen", "--only", "FedAvg", "AAggFF", "--seeds", 2)
    data = json.loads((out / "device.json").read_text())["data"]
    unseen = data["fashion_dirichlet_unseen"]
    assert all(unseen[key] == results[key] for key in ("lr", "rates", "chosen", "grid")), "they are not searched again"
    run = unseen["runs"]["AAggFF"]["2"]  # six clients trained, two did not
    assert run["mean"] == pytest.approx((3 * run["seen"]["mean"] + run["unseen"]["mean"]) / 4, abs=1e-5)
    assert "| average, trained | average, did not train |" in (out / "device.md").read_text()


def test_plug_keeps_the_settings_that_an_algorithm_has_alone(
    recipe: Callable[..., Path], trials: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithms = importlib.import_module("plug_and_play").ALGORITHMS
    for name, (preset, axes) in algorithms.items():
        monkeypatch.setitem(algorithms, name, (preset, {key: values[1:] or values for key, values in axes.items()}))
    out = recipe("plug_and_play", "--data", "heart", "fashion_dirichlet", "--seeds", 2)
    data = json.loads((out / "plug_and_play.json").read_text())["data"]
    published = {"heart": ["FedProx, as published"], "fashion_dirichlet": []}
    for name, results in data.items():
        assert list(results["runs"]) == ["FedAvg", "FedProx", *published[name], "FedAdam", "FedYogi", "FedAdagrad"]
        assert all(list(pair["alone"]) == list(pair["with"]) == ["2"] for pair in results["runs"].values())
        assert set(results["chosen"]) == set(results["runs"])
        tuned = [algorithm for algorithm in results["runs"] if algorithm in results["grid"]]
        assert tuned == ["FedProx", "FedAdam", "FedYogi", "FedAdagrad"]
        for algorithm in tuned:
            best = max(results["grid"][algorithm], key=lambda trial: trial["mean"])["point"]
            assert best == f"{algorithm} {trials.text(results['chosen'][algorithm])}, rate {results['lr']:g}"
    heart = data["heart"]["runs"]["FedAdam"]
    assert heart["alone"]["2"]["last_p"] != heart["with"]["2"]["last_p"]
    text = (out / "plug_and_play.md").read_text()
    assert "| 84.34 / 65.44 |" in text
    assert "| 84.84 / 67.00 |" in text


def test_cdfs_sums_the_objective(recipe: Callable[..., Path], trials: ModuleType) -> None:
    out = recipe("responses", "--data", "heart", "--seeds", 2)
    runs = json.loads((out / "responses.json").read_text())["data"]["heart"]["runs"]
    assert list(runs) == ["FedAvg", *trials.CDFS]
    for row in runs.values():
        assert len(row["2"]["curve"]) == ROUNDS
        assert row["2"]["curve"][-1] == pytest.approx(row["2"]["objective"], rel=1e-3)
    records = [
        json.loads(line) for line in next((out.parent / "runs").glob("heart/FedAvg,*/seed2/metrics.jsonl")).open()
    ]
    assert sum(r["mixing/objective"] for r in records) == pytest.approx(runs["FedAvg"]["2"]["objective"], abs=1e-4)
    assert (out / "responses.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_here_is_said_and_left_out(recipe: Callable[..., Path], capsys: pytest.CaptureFixture) -> None:
    out = recipe("silo", "--data", "berka", "heart", "--only", "FedAvg", "--seeds", 2)
    assert capsys.readouterr().err.startswith("berka is skipped: ")
    assert list(json.loads((out / "silo.json").read_text())["data"]) == ["heart"]
    for name in ("silo", "plug_and_play", "responses"):
        recipe(name, "--data", "berka", code=2)


def test_it_starts_as_a_script(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "FEDLOOM_DATA"} | {"HOME": "/nonexistent"}
    command = [
        sys.executable,
        str(FOLDER / "silo.py"),
        "--data",
        "heart",
        "--runs",
        str(tmp_path),
        "--out",
        str(tmp_path),
    ]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 2
    assert process.stderr.startswith("heart is skipped: Heart disease is missing")
    assert not list(tmp_path.iterdir())


def test_cells(trials: ModuleType) -> None:
    leaves = importlib.import_module("plots")
    assert leaves.best({"a": [0.5], "b": [0.7], "c": [0.70001], "d": []}, smaller=False) == ["b", "c"]
    assert leaves.best({"a": [0.5], "b": [0.7]}, smaller=True) == ["a"]
    figures = {"worst10": 0.5, "averaged": {"worst10": 0.6}}
    aaggff = {"2": figures, "4": figures | {"worst10": 0.7}, "6": {"worst10": 0.5}}
    results = {"runs": {"FedAvg": {"2": figures | {"worst10": 0.4}, "4": figures}, "AAggFF": aaggff}}
    table = leaves.gains(results, "worst10").splitlines()
    assert table[0] == "| worst 10 % | minus FedAvg | minus AAggFF |"
    assert table[-1] == "| AAggFF | +15.00 ± 5.00 (-48.53 to +78.53) |  |"
    assert leaves.figure(aaggff, "averaged worst10") == {"2": 0.6, "4": 0.6}
