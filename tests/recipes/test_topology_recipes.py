"""The studies of personal models and of graphs run, and their pages follow from their results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.recipes import FOLDER, load

STORED = FOLDER / "topology" / "results"


@pytest.fixture
def personal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The study on digits, in two rounds."""
    module = load("topology", "personal")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "CLIENTS", 10)
    monkeypatch.setattr(module, "DATA", {"digits": replace(module.DATA["mnist"], title="Digits", rounds=2)})
    return module


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The study on digits, in few rounds."""
    module = load("topology", "graphs")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    few = {"D-PSGD": replace(module.METHODS["D-PSGD"], rounds=4, rates=(0.1,))}
    changed = {
        "DATA": "digits",
        "CLIENTS": 8,
        "EDGE_CLIENTS": 20,
        "EDGE_ROUNDS": 2,
        "EDGE_RATES": (0.1,),
        "METHODS": few,
    }
    changed |= {"GRAPHS": {name: module.GRAPHS[name] for name in ("ring", "torus", "complete")}}
    for name, value in changed.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.exhaustive
def test_personal_methods(personal: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = {name: setups[:2] for name, setups in personal.METHODS.items() if name in ("FedAvg", "FedPer")}
    monkeypatch.setattr(personal, "METHODS", few)
    assert personal.main(["--data", "digits", "--splits", "classes", "--seeds", "1"]) == 0
    results = json.loads((tmp_path / "personal_digits.json").read_text())
    for name, runs in results["cells"]["classes"].items():
        means = {label: run["mean"] for label, run in results["runs"].items() if f"| {name} |" in label}
        tuned = {label: mean for label, mean in means.items() if label.endswith("seed 0")}
        assert len(tuned) == 2
        best = max(tuned, key=lambda label: tuned[label])
        assert f"| {results['chosen']['classes'][name]} |" in best
        assert runs["1"] == results["runs"][best.replace("seed 0", "seed 1")]
    page = (tmp_path / "personal_digits.md").read_text()
    assert page.count("\n| Fed") == 2
    assert personal.main(["--table"]) == 0
    assert (tmp_path / "personal_digits.md").read_text() == page


@pytest.mark.exhaustive
def test_every_personal_method_of_the_study_runs(personal: ModuleType) -> None:
    for setups in personal.METHODS.values():
        run = personal.trial("digits", "classes", setups[-1], 1)
        assert run["left_out"] == 0
        assert 0 <= run["worst10"] <= run["mean"] <= 1


@pytest.mark.exhaustive
def test_graphs_and_edges(graphs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(graphs, "TARGETS", {"iid": 0.05, "dirichlet": 0.99})
    assert graphs.main(["--seeds", "1"]) == 0
    results = json.loads((tmp_path / "graphs.json").read_text())
    reached, not_reached = (results["cells"]["D-PSGD"][split]["ring"]["1"] for split in ("iid", "dirichlet"))
    assert reached["rounds"] == reached["end"]
    assert not_reached["rounds"] is None
    messages = {graph: runs["1"]["megabytes"] for graph, runs in results["cells"]["D-PSGD"]["iid"].items()}
    assert messages["complete"] == pytest.approx(messages["ring"] * 7 / 2)
    page = (tmp_path / "graphs.md").read_text()
    assert "(1 of 1 not)" in page
    assert graphs.main(["--table"]) == 0
    assert (tmp_path / "graphs.md").read_text() == page


def test_clients_of_an_edge_are_alike_or_have_all_classes_together(graphs: ModuleType) -> None:
    dealt = graphs.federate(graphs.source(graphs.EDGE_ROWS), graphs.Niid1(order=True), clients=20, seed=1, held_out=0.0)
    classes = {}
    for words, members in graphs.MEMBERS.items():
        at = graphs.topology.Hierarchy(edges=10, members=members).receives(dealt.train.index.sizes)
        rows = [np.concatenate([dealt.train.index[c] for c in np.flatnonzero(at == edge)]) for edge in range(10)]
        classes[words] = {len(np.unique(dealt.train.arrays.y.numpy()[edge_rows])) for edge_rows in rows}
    assert classes == {"alike inside": {2}, "alike across": {4}}


@pytest.mark.parametrize("name", ["personal_mnist", "personal_cifar10", "graphs"])
def test_pages_follow_from_stored_results(name: str) -> None:
    results = json.loads((STORED / f"{name}.json").read_text())
    if name == "graphs":
        page = load("topology", "graphs").tables(results)
    else:
        module = load("topology", "personal")
        page = module.tables(results, module.DATA[name.removeprefix("personal_")])
    assert (STORED / f"{name}.md").read_text() == page
