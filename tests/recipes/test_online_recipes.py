"""The recipes of online meta-learning run on small stand-ins for the real images."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pictures import look_alike

from fedloom.base.errors import ClientError
from fedloom.core.federation import Arrays
from fedloom.data import Source
from fedloom_apps.online.streams import KWay, Transformed, task_stream

FOLDER = Path(__file__).parents[2] / "recipes" / "online"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``recipe("--settings", "s_mnist")`` runs it on at most twenty tasks; returns the folder of its results."""
    look_alike(tmp_path / "data" / "MNIST" / "raw", 300, 100, first=5, columns=slice(5, 20))
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.syspath_prepend(str(FOLDER))
    arrivals = importlib.import_module("common")
    arrivals.source.cache_clear()
    few = {"steps": (2,), "ltm_every": 2, "model_settings": {"hidden": (8,)}, "model": "mlp", "source": "mnist"}
    s_mnist = replace(arrivals.SETTINGS["s_mnist"], kind=Transformed(tasks=20, train=20, test=10), **few)
    letters = replace(arrivals.SETTINGS["letters_5"], kind=KWay(tasks=20, train=20, test=10), **few)
    monkeypatch.setitem(arrivals.SETTINGS, "s_mnist", s_mnist)
    monkeypatch.setitem(arrivals.SETTINGS, "letters_5", letters)

    def run(*arguments: object) -> Path:
        where = ("--runs", tmp_path / "runs", "--out", tmp_path / "out")
        tables = importlib.import_module("common").RESULTS.parent / "tables.py"
        spec = importlib.util.spec_from_file_location("online_tables", tables)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.main([str(a) for a in (*arguments, *where)]) == 0
        return tmp_path / "out"

    return run


def test_stages_go_on_and_tables_stand_beside_the_published(recipe: Callable[..., Path]) -> None:
    learners = ("MOML", "FTML", "FS", "B-MOML 5 random")
    out = recipe("--settings", "s_mnist", "--only", *learners, "--tasks", 2, 4)
    runs = json.loads((out / "tables.json").read_text())["settings"]["s_mnist"]
    assert list(runs) == list(learners)
    assert all(run["tasks"] == len(run["ctm"]) == 4 for run in runs.values())
    assert [n for n, _ in runs["MOML"]["ltm"]] == [2, 4]
    assert runs["MOML"]["bytes"] == [0] * 4
    assert runs["FTML"]["bytes"][3] == 4 * runs["FTML"]["bytes"][0] > 0
    text = (out / "tables.md").read_text()
    assert "### 4 tasks" in text
    assert re.search(r"\| MOML \| \d+\.\d\d \(85\.82\) .* \(87\.49\)", text)
    assert re.search(r"\| FTML \| \d+\.\d\d \(80\.62\) .* \(82\.49\)", text)
    assert (out / "s_mnist.png").read_bytes().startswith(b"\x89PNG")


def test_stored_results_are_not_run_again(recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    out = recipe("--settings", "letters_5", "omniglot_apart", "--only", "FS", "--tasks", 3)
    assert "omniglot_apart: no data here" in capsys.readouterr().err
    before = (out / "tables.json").read_text()
    results = json.loads(before)
    results["notes"] = ["It holds."]
    (out / "tables.json").write_text(json.dumps(results))
    recipe("--table")
    assert "- It holds." in (out / "tables.md").read_text()
    for path in (out.parent / "runs").rglob("metrics.jsonl"):
        path.unlink()
    recipe("--settings", "letters_5", "--only", "FS", "--tasks", 3)
    assert not list((out.parent / "runs").rglob("metrics.jsonl"))


@pytest.mark.parametrize(("stream", "alphas"), [("s_mnist", {"1", "5", "10"}), ("cifar100_5", {"1", "0.1", "0.01"})])
def test_several_seeds_of_a_stream(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: str, alphas: set[str]
) -> None:
    study = importlib.import_module("streams")
    full_study = study.STUDIES[stream]
    kind = full_study.setting.kind if stream == "s_mnist" else KWay(tasks=20, train=20, test=10)
    few = {"source": "mnist", "model": "mlp", "model_settings": {"hidden": (8,)}, "ltm_every": 2}
    small = replace(full_study, setting=replace(full_study.setting, kind=kind, **few), tested=20)
    monkeypatch.setitem(study.STUDIES, stream, small)
    places = ["--stream", stream, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    some = ("MOML", "FTML", "MOML ∇=0")
    arguments = ["--tuning", "4", "--steps", "2", "--learners", *some, "--seeds", "0", "1"]
    assert study.main([*arguments, "--tasks", "2", "4", *places]) == 0
    results = json.loads((tmp_path / "out" / f"{stream}.json").read_text())
    tuning, runs = results["tuning"]["K 2"], results["runs"]["K 2"]
    assert {name: set(tried) for name, tried in tuning.items()} == dict.fromkeys(some[::2], alphas)
    assert [list(runs[name]) for name in some] == [["0", "1"]] * 3
    assert all(run["tasks"] == len(run["ctm"]) == 4 for seeds in runs.values() for run in seeds.values())
    for name, tried in tuning.items():
        best = max(tried.items(), key=lambda item: item[1][1])[0]
        assert f"alpha {best}" in runs[name]["0"]["chosen"].split(", ")
    text = (tmp_path / "out" / f"{stream}.md").read_text()
    gain = np.mean([100 * np.mean(runs["MOML"][s]["ctm"]) - 100 * np.mean(runs["FTML"][s]["ctm"]) for s in "01"])
    assert f"| MOML − FTML | {gain:+.2f} ± " in text
    assert "/runs" not in "".join(results["commands"])
    assert (tmp_path / "out" / f"{stream}_K2.png").read_bytes().startswith(b"\x89PNG")
    assert study.main(["--table", *places]) == 0
    assert (tmp_path / "out" / f"{stream}.md").read_text() == text


def test_a_learner_that_diverges_is_listed_and_the_others_go_on(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = importlib.import_module("streams")
    tried = []

    def run(setting: object, learner: str, tasks: int, seed: int, place: Path) -> dict[str, object]:
        tried.append((learner, seed))
        if (learner, seed) == ("MOGD", 0):
            raise ClientError("at task 2 all experts' predictions have become infinite or NaN; lower local.lr.")
        return {"tasks": 4, "ctm": [0.5] * 4, "ltm": [[4, 0.5]], "bytes": [0] * 4, "chosen": "-", "seconds": 1.0}

    monkeypatch.setattr(study.common, "run", run)
    pictures: list[set[str]] = []
    monkeypatch.setattr(study.plots, "picture", lambda _, runs, __: pictures.append(set(runs)))
    words = ["--steps", "10", "--tasks", "4", "--seeds", "0", "1", "--learners", "MOGD", "FTML", "--out", str(tmp_path)]
    assert study.main(words) == 0
    assert tried == [("MOGD", 0), ("FTML", 0), ("MOGD", 1), ("FTML", 1)]
    text = (tmp_path / "s_mnist.md").read_text()
    assert "- MOGD, K 10, seed 0: at task 2 all experts' predictions" in text
    assert study.main(words) == 0
    assert len(tried) == 4  # it would diverge again
    assert pictures[-1] == {"MOGD", "FTML"}  # those of seed 1


def test_a_learner_without_steps_runs_once_whatever_steps_are_asked_for(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = importlib.import_module("streams")
    run = {"tasks": 4, "ctm": [0.5] * 4, "ltm": [[4, 0.5]], "bytes": [0] * 4, "chosen": "-", "seconds": 1.0}
    monkeypatch.setattr(study.common, "run", lambda *_: run)
    monkeypatch.setattr(study.plots, "picture", lambda *_: None)
    words = ["--steps", "7", "11", "--tasks", "4", "--seeds", "0", "--learners", "FS", "FTML", "--out", str(tmp_path)]
    assert study.main(words) == 0
    runs = json.loads((tmp_path / "s_mnist.json").read_text())["runs"]
    assert {steps: set(learners) for steps, learners in runs.items()} == {"K 7": {"FS", "FTML"}, "K 11": {"FTML"}}


def test_hedge_takes_the_published_grid_and_one_configuration_a_part_of_it(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = importlib.import_module("streams")
    run = {"tasks": 4, "ctm": [0.5] * 4, "ltm": [[4, 0.5]], "bytes": [0] * 4, "chosen": "-", "seconds": 1.0}
    settings = []
    monkeypatch.setattr(study.common, "run", lambda setting, *_: settings.append(setting) or run)
    monkeypatch.setattr(study, "tune", lambda *_: {"1": [0.5, 0.5], "5": [0.6, 0.6], "10": [0.5, 0.5]})
    monkeypatch.setattr(study.plots, "picture", lambda *_: None)
    words = ["--tasks", "4", "--seeds", "0", "--learners", "FS", "MOML", "--out", str(tmp_path)]
    assert study.main([*words, "--steps", "10", "20", "--hedge"]) == study.main([*words, "--steps", "10"]) == 0
    results = json.loads((tmp_path / "s_mnist.json").read_text())
    assert [(kind, set(runs)) for kind, runs in results["runs"].items()] == [
        ("Hedge", {"FS", "MOML"}), ("K 10", {"FS", "MOML"})
    ]  # fmt: skip
    assert list(results["tuning"]) == ["K 10"]
    assert results["commands"][0].endswith(" --hedge")
    hedge, single = settings[1], settings[3]
    assert (hedge.steps, hedge.alphas) == ((10, 20), (1, 5, 10))
    assert hedge.inner == {"adaptation.lr": (0.1, 0.01), "adaptation.steps": (1, 5)}
    assert (single.steps, single.alphas) == ((10,), (5,))
    assert single.inner == {"adaptation.lr": (0.1,), "adaptation.steps": (5,)}


@pytest.mark.parametrize(("name", "classes", "sizes"), [("omniglot", 1623, (16, 4)), ("cifar100", 100, (500, 100))])
def test_streams_fit_the_data_that_they_are_for(
    name: str, classes: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    kinds = [setting.kind for setting in importlib.import_module("common").SETTINGS.values() if setting.source == name]
    assert kinds
    y = [torch.arange(classes).repeat_interleave(size) for size in sizes]
    train, test = (Arrays(torch.zeros(len(labels), 1, 1, 1), labels, classes) for labels in y)
    for kind in kinds:
        task = task_stream(Source(name, train, test, "", ""), kind, seed=0)[0]
        assert (len(task.train), len(task.test)) == (kind.train, kind.test)
