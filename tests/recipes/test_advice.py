"""The decision table against the stored results: every figure that it quotes is computed again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/howto/choose.md").read_text().split())


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    for name in ("protocol", "reporting", "claims"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import protocol

    return protocol


def shown(number: str) -> str:
    """As the page prints it: without the zero before the point."""
    return number.replace(" 0.", " .").removeprefix("+")


@pytest.mark.parametrize(
    ("data", "method", "text"),
    [
        ("mnist_writers", "FedMGDA+", "{} over FedAvg's average, but the worst of all methods"),
        ("fashion_dirichlet", "AAggFF, visits", "{} over FedAvg's average in the worst tenth"),
    ],
)
def test_averaged_models_that_serve_the_worst_devices(protocol: Any, data: str, method: str, text: str) -> None:
    stored = protocol.stored("fair/device")
    runs = {name: stored["data"][data]["runs"][name] for name in (method, "FedAvg")}
    worst = {name: {s: one["averaged"]["worst10"] for s, one in found.items()} for name, found in runs.items()}
    gain, _, _ = protocol.gained(worst[method], worst["FedAvg"], 100).partition(" (")
    assert text.format(shown(gain)) in PAGE


def test_on_losses_of_training_samples_no_fair_method_beats_weights_by_samples(protocol: Any) -> None:
    """No interval of the paired differences lies above 0."""
    runs = protocol.stored("fair/device")["data"]["mnist_writers"]["runs"]
    worst = {name: {s: one["worst10"] for s, one in found.items()} for name, found in runs.items()}
    fair = [name for name in worst if "samples" not in name and name != "FedAvg"]
    assert len(fair) >= 6
    for name in fair:
        assert protocol.paired(worst[name], worst["FedAvg"])["low"] <= 0, name
    assert "no fair method beats sample weights for the worst tenth of MNIST's writers" in PAGE


def test_two_classes_a_client(protocol: Any) -> None:
    stored = protocol.stored("superfed/table_2_3_scripts")
    for name, text in (
        ("FedPer", "{} % with FedPer"), ("SuPerFed-MM", "{} with SuPerFed-MM"), ("Ditto", "{} with Ditto"),
        ("FedAvg", "FedAvg has {}"),
    ):  # fmt: skip
        values = protocol.find(stored, f"runs > 500 > {name} > * > validation > mean > -1").values()
        assert text.format(shown(protocol.mean_error(values, 100, 2))) in PAGE


def test_a_head_for_the_targets_shares_beats_fedavg_in_every_cell(protocol: Any) -> None:
    cells = [
        cell
        for splits in protocol.stored("ssa/heads")["runs"].values()
        for targets in splits.values()
        for cell in targets.values()
    ]
    better = sum(cell["target_head"] > cell["FedAvg"] for cell in cells)
    assert f"better than FedAvg in {better} of {len(cells)} cells" in PAGE


def test_transmissions_of_feddyn(protocol: Any) -> None:
    import claims

    stored = protocol.stored("feddyn/mnist_dirichlet")
    sent = {
        name: [claims.reached(0.982)(run, stored) for run in protocol.find(stored, f"runs > {name} > *").values()]
        for name in ("FedDyn", "FedAvg")
    }
    assert f"{min(sent['FedDyn'])} to {max(sent['FedDyn'])} rounds of FedAvg's communication to 98.2 %" in PAGE
    assert all(isinstance(one, protocol.AtLeast) for one in sent["FedAvg"])


def test_every_link_to_a_result_is_one() -> None:
    links = [part.partition(")")[0] for part in PAGE.split("](")[1:]]
    results = [link for link in links if "/results/" in link]
    assert len(results) >= 8
    for link in results:
        assert (ROOT / "docs/howto" / link).resolve().with_suffix(".json").is_file(), link
