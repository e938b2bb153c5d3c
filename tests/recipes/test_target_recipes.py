"""The recipes of models for a target run on a few images and report the expected results."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers.pictures import look_alike

from fedloom.core.method import Method
from fedloom.core.parts import Mixing
from fedloom.parts.mixing import SelfSupervised
from fedloom.parts.mixing.ssa import ssa_loss
from fedloom.parts.objectives import CrossEntropy
from fedloom_apps.customise.ensemble import sample_wise

FOLDER = Path(__file__).parents[2] / "recipes" / "ssa"
SMALL = ("--rounds", 1, "--images", 200)


@pytest.fixture
def conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The settings, with a folder behind them that looks like Fashion-MNIST."""
    look_alike(tmp_path / "data" / "FashionMNIST" / "raw", 300, 100, stride=2)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("common")
    module.pool.cache_clear()
    module.deal.cache_clear()
    return module


@pytest.fixture
def recipe(conditions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``recipe("table_1", "--only", "FedAvg")`` runs it for one round: where its results are."""
    mixing = fewer(conditions.DESCENT)
    monkeypatch.setitem(conditions.METHODS, "FedSSA", lambda: Method("fedssa_sgd", (CrossEntropy(),), mixing=mixing))

    def run(name: str, *arguments: object, code: int = 0) -> Path:
        where = ("--runs", tmp_path / "runs", "--out", tmp_path / "out")
        assert importlib.import_module(name).main([str(a) for a in (*arguments, *where, *SMALL)]) == code
        return tmp_path / "out"

    return run


def stored(out: Path, name: str) -> dict:
    return json.loads((out / f"{name}.json").read_text())


def fewer(policy: Mixing) -> Mixing:
    """The policy, in 20 steps if it takes steps."""
    return replace(policy, steps=20) if isinstance(policy, SelfSupervised) else policy


def test_the_methods_are_the_papers(conditions: ModuleType) -> None:
    published = importlib.import_module("table_1").PUBLISHED
    assert list(conditions.METHODS) == [*published, "FedSSA, Adam"]
    for name, make in conditions.METHODS.items():
        assert make().needs("target") == (name in conditions.AWARE), name
    mixing = {name: conditions.METHODS[name]().mixing for name in ("AFL", "FedSSA", "FedSSA, Adam")}
    assert mixing["AFL"].step == 0.001
    assert (mixing["FedSSA"].variance, mixing["FedSSA"].entropy, mixing["FedSSA"].lr) == (10.0, 1e-3, 0.01)
    assert [mixing[name].optimiser for name in ("FedSSA", "FedSSA, Adam")] == ["sgd", "adam"]
    assert mixing["FedSSA, Adam"] == SelfSupervised(
        variance=1.0, optimiser="adam", steps=160, feed_back=True
    )  # algorithm 1; ten passes over 1000 inputs
    assert conditions.SEED != conditions.TUNING


def test_table_1_trains_once_what_does_not_look_at_the_target(recipe: Callable[..., Path]) -> None:
    only, targets = ("Local", "FedAvg", "FedSSA"), ["skew", "uniform"]
    out = recipe("table_1", "--partition", "niid_1", "--only", *only, "--targets", *targets)
    rows = stored(out, "table_1")["runs"]["niid_1"]
    assert {name: list(seeds["1"]) for name, seeds in rows.items()} == dict.fromkeys(only, targets)
    places = sorted(str(p.parent.relative_to(out.parent / "runs")) for p in (out.parent / "runs").rglob("summary.json"))
    assert places == [
        f"niid_1_5/{target}/{method}/seed1"
        for target, method in (("none", "fedavg"), ("none", "local"), ("skew", "fedssa"), ("uniform", "fedssa"))
    ]
    for target, cell in rows["FedSSA"]["1"].items():
        assert 0 <= cell["accuracy"] <= 1
        assert sum(cell["p"]) == pytest.approx(1, abs=1e-3)
        assert (cell["similarity"] == pytest.approx([1, 0, 0, 0, 0], abs=1e-2)) == (target == "skew")

    text = (out / "table_1.md").read_text()
    assert "200 training images, 1 rounds" in text
    assert "| 95.60 | 84.34 | 82.61 |" in text  # the paper's
    assert text.count("| FedSSA | skew |") == 1
    assert (out / "table_1.png").read_bytes().startswith(b"\x89PNG")
    recipe("table_1", "--table")
    assert (out / "table_1.md").read_text() == text


def test_what_is_stored_is_not_run_again(recipe: Callable[..., Path]) -> None:
    arguments = ("--partition", "niid_2", "--only", "FedAvg", "--targets", "skew")
    out = recipe("table_1", *arguments)
    results = stored(out, "table_1")
    for place in (out.parent / "runs").rglob("metrics.jsonl"):
        place.unlink()
    recipe("table_1", *arguments)
    assert not list((out.parent / "runs").rglob("metrics.jsonl"))
    assert stored(out, "table_1") == results
    results["notes"] = ["It holds."]
    (out / "table_1.json").write_text(json.dumps(results))
    recipe("table_1", "--table")
    assert (out / "table_1.md").read_text().endswith("## What holds and what does not\n\n- It holds.\n")


def test_several_seeds_have_a_mean(recipe: Callable[..., Path]) -> None:
    out = recipe("table_1", "--partition", "niid_1", "--only", "FedAvg", "--targets", "skew", "--seeds", 1, 2)
    values = [100 * cells["skew"]["accuracy"] for cells in stored(out, "table_1")["runs"]["niid_1"]["FedAvg"].values()]
    assert len(values) == 2
    page = (out / "table_1.md").read_text()
    assert f"| FedAvg | **{np.mean(values):.1f} ± {np.std(values, ddof=1) / 2**0.5:.1f}** | - |" in page
    assert f"Skew, seed by seed: FedAvg: {values[0]:.1f}, {values[1]:.1f}." in page


def test_a_clients_own_model_is_measured_alone(conditions: ModuleType, tmp_path: Path) -> None:
    runs = conditions.Runs(tmp_path / "runs", conditions.Scale(200, 1))
    for name in ("Local", "FedAvg"):
        experiment, result = runs.finished(name, "niid_1", 5, 1)
        target_experiment = runs.with_target(experiment, "imbalanced 10")
        assert target_experiment.federation.train.index.rows.tolist() == experiment.federation.train.index.rows.tolist()
        accuracies = conditions.client_accuracies(target_experiment, result)
        assert accuracies == pytest.approx(sample_wise(target_experiment, result).alone, abs=1e-5)
        accuracy = runs.figures(name, "niid_1", 5, 1, ["imbalanced 10"])["imbalanced 10"]["accuracy"]
        assert (accuracy == pytest.approx(np.mean(accuracies), abs=1e-5)) or name != "Local"
    assert runs.seconds > 0


def test_weights_are_learnt_for_finished_runs(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("weights")
    for name, value in (("VARIANCES", (10.0,)), ("ENTROPIES", (1e-3,)), ("RATES", (0.01,)), ("EPOCHS", (10,))):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "BASE_METHODS", ("FedAvg", "SCAFFOLD"))
    monkeypatch.setattr(module, "STEPS_A_PASS", 2)
    for name in ("ADAM", "DESCENT"):
        monkeypatch.setattr(module, name, fewer(getattr(module, name)))
    for name in ("POLICIES", "REPEATED"):
        monkeypatch.setattr(module, name, {words: fewer(policy) for words, policy in getattr(module, name).items()})
    recipe("table_1", "--scale", "small", "--partition", "niid_1", "--only", "FedAvg", "--targets", "skew")
    out = recipe("weights", "--seeds", 1)
    results, rows = (
        stored(out, "weights")["found"]["niid_1"],
        stored(out, "table_1_small")["runs"]["niid_1"]["FedAvg"]["1"],
    )
    plugged = results["plugged"]
    assert {name: list(cells) for name, cells in plugged.items()} == {
        "FedAvg": list(module.common.TARGETS), "SCAFFOLD": list(module.MAIN_TARGETS)
    }  # fmt: skip
    for cells in plugged.values():
        for cell in cells.values():
            assert all(sum(cell[f"p, {policy}"]) == pytest.approx(1, abs=1e-3) for policy in module.POLICIES)
    assert plugged["FedAvg"]["skew"]["before"] == rows["skew"]["accuracy"] == results["votes"]["skew"]["FedAvg"]
    assert [len(accuracies) for accuracies in results["single"].values()] == [5, 5]
    for target, tried in results["sensitivity"].items():  # the same point, however it is named
        cell = plugged["FedAvg"][target]
        assert tried["lambda 10 0.001"] == tried["rate 0.01, SGD"] == tried["epochs 10, SGD"] == cell["FedSSA"]
        assert tried["rate 0.01, Adam"] == tried["epochs 10, Adam"] == cell["FedSSA, Adam"]
    text = (out / "weights.md").read_text()
    assert "| sample-wise FedSSA |" in text
    again = results["seeds"]["1"]["skew"]
    assert again["FedAvg"] == rows["skew"]["accuracy"]
    assert again["SGD, λ_var 10"] == plugged["FedAvg"]["skew"]["FedSSA"]
    gain = 100 * (again["similarity"] - again["FedAvg"])
    assert f"| similarity | {gain:+.2f} ({gain:+.2f}) |" in text
    assert "96.55 (+30.45)" in text
    recipe("weights", "--table")
    assert (out / "weights.md").read_text() == text


def test_table_6_has_a_column_for_each_number_of_clients(recipe: Callable[..., Path]) -> None:
    out = recipe("table_6", "--clients", 5, 20, "--only", "FedAvg", "FedSSA", "--seeds", 1, 2)
    runs = stored(out, "table_6")["runs"]
    assert {name: list(cells) for name, cells in runs.items()} == {"FedAvg": ["5", "20"], "FedSSA": ["5", "20"]}
    assert len(runs["FedSSA"]["20"]["2"]["p"]) == 20
    pairs = [[runs["FedAvg"][k][seed]["accuracy"] for seed in "12"] for k in ("5", "20")]
    row = [f"{50 * (first + second):.2f} ± {50 * abs(first - second):.2f}" for first, second in pairs]
    text = (out / "table_6.md").read_text()
    assert f"| FedAvg | {row[0]} | - | {row[1]} |  |  |  | 65.10 | 65.15 | 77.94 |" in text


def test_weights_by_descent(conditions: ModuleType) -> None:
    """One step from equal shares, against a difference quotient of the loss; samples by themselves, each its own."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 6, 3, 4, generator=generator, dtype=torch.float64) * 3
    rule, start, h = replace(conditions.DESCENT, entropy=0.1, lr=0.5), torch.zeros(3, dtype=torch.float64), 1e-5
    plus, minus = (
        [ssa_loss(start + step * e, first, second, 10.0, 0.1).mean() for e in torch.eye(3, dtype=torch.float64)]
        for step in (h, -h)
    )
    slope = (torch.stack(plus) - torch.stack(minus)) / (2 * h)
    expected = torch.softmax(-0.5 * slope, -1)
    torch.testing.assert_close(rule.learnt(start, [(first, second)]), expected, atol=1e-8, rtol=0)
    assert not torch.allclose(rule.learnt(start, [(first, second)] * 2), expected)
    per_sample = rule.learnt(start.expand(6, 3), [(first[None], second[None])])
    alone = torch.stack([rule.learnt(start, [(first[i : i + 1], second[i : i + 1])]) for i in range(6)])
    torch.testing.assert_close(per_sample, alone)


def test_rank_correlation(conditions: ModuleType) -> None:
    correlation = importlib.import_module("table_1").correlation
    assert correlation({"p": [0.1, 0.2, 0.7], "similarity": [0.0, 0.5, 0.6]}) == 1
    assert correlation({"p": [0.7, 0.2, 0.1], "similarity": [0.0, 0.5, 0.6]}) == -1
    assert correlation({"p": [0.5, 0.5], "similarity": [0.0, 1.0]}) is None


def test_the_terms_of_single_clients_are_fedssas(recipe: Callable[..., Path]) -> None:
    module = importlib.import_module("ranking")
    sure = torch.tensor([[[30.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])  # one sample, two clients: sure, and clueless
    cos, var = module.terms(sure, sure)
    assert cos == pytest.approx([1, 1])
    assert var == pytest.approx([3 / 16, 0], abs=1e-9)
    loss = ssa_loss(torch.tensor([40.0, -40.0]).double(), sure.double(), sure.double())  # all weight on the first
    assert -float(loss) == pytest.approx(cos[0] + var[0], abs=1e-6)
    assert module.first([[3.0, 1.0], [0.0, 1.0], [2.0, 0.0]]) == 2
    runs = stored(recipe("ranking", "--seeds", 1), "ranking")["runs"]
    assert {name: list(seeds) for name, seeds in runs.items()} == {"images as they are": ["1"], "crop flip": ["1"]}


def test_without_data_it_says_so(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    for name in ("table_1", "weights", "table_6", "ranking"):
        out = recipe(name, code=2)
        assert "FashionMNIST is missing" in capsys.readouterr().err
        assert not (out / f"{name}.md").exists()


def test_heads_serve_all_targets_from_one_run(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("heads")
    assert [name.split()[0] for name in module.TARGETS] == ["client"] * 5 + ["imbalanced"] * 3 + ["uniform"]
    names = ("client 1", "client 2", "imbalanced 10", "uniform")
    monkeypatch.setattr(module, "TARGETS", {name: module.TARGETS[name] for name in names})
    monkeypatch.setattr(module, "SKEWED", 2)
    for name in ("ADAM", "DESCENT"):
        monkeypatch.setattr(module, name, fewer(getattr(module, name)))
    out = recipe("heads", "--seeds", 1, 2, "--order", "in order", "--in-rounds", "client 1")
    results = stored(out, "heads")
    assert list(results["runs"]) == ["in order"]
    for row in results["runs"]["in order"].values():
        assert row.pop("left_out") == row["client 1"]["left_out"] == 0.0  # of FedAvg, and of FedSSA in rounds
    for cells in results["runs"]["in order"].values():
        assert tuple(cells) == names
        assert len({cell["FedAvg"] for cell in cells.values()}) > 1
        for cell in cells.values():
            once = ("FedAvg", "FedSSA, Adam", "FedSSA, SGD", "target_fit", "target_head", "oracle")
            assert all(0 <= cell[way] <= 1 for way in once)
            assert 0 <= cell["error of shares"] <= 1
    text = (out / "heads.md").read_text()
    assert "The right client: FedSSA, Adam " in text
    assert [name for name, cell in cells.items() if "FedSSA, in rounds" in cell] == ["client 1"]
    rounds = results["scale"]["rounds"]
    counts = [cells["client 1"]["jumps"] for cells in results["runs"]["in order"].values()]
    assert all(0 <= count < rounds for count in counts)
    assert f"moved to another client: client 1: {counts[0]}, {counts[1]}." in text
    assert "Of 4 runs in which they were counted, none excluded an update." in text
    recipe("heads", "--table")
    assert (out / "heads.md").read_text() == text


def test_heads_of_another_study_have_results_of_their_own(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("heads")
    monkeypatch.setattr(module, "TARGETS", {name: module.TARGETS[name] for name in ("client 1", "uniform")})
    for name in ("ADAM", "DESCENT"):
        monkeypatch.setattr(module, name, fewer(getattr(module, name)))
    arguments = ("heads", "--study", "published", "--seeds", 1, "--order", "NIID-2", "--in-rounds")
    results = stored(recipe(*arguments), "heads_published")
    assert (results["scale"]["epochs"], results["scale"]["lr"], results["scale"]["images"]) == (10, 0.01, 200)
    assert "oracle" in results["runs"]["NIID-2"]["1"]["uniform"]
    history = tmp_path / "runs" / "heads_published" / "NIID-2" / "seed1" / "fedavg" / "metrics.jsonl"
    (tmp_path / "out" / "heads_published.json").unlink()
    before = history.read_bytes()
    assert stored(recipe(*arguments), "heads_published")["runs"] == results["runs"]
    assert history.read_bytes() == before  # nothing was trained again: its lines say how long they took
