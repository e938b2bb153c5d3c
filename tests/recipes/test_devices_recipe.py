"""The study of unequal devices runs, and its page agrees with its stored results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.recipes import FOLDER, load

from fedloom.data.partitions import Dirichlet

STORED = FOLDER / "devices" / "results"


@pytest.mark.exhaustive
def test_hours_to_targets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hours = load("devices", "hours")
    monkeypatch.setattr(hours, "RESULTS", tmp_path)
    monkeypatch.setattr(hours, "MOST", 3)
    setting = hours.Setting("Digits", Dirichlet(alpha=0.3), 12, 10, (0.05, 0.99), (0, 1))
    monkeypatch.setattr(hours, "DATA", {"digits": setting})
    monkeypatch.setattr(hours, "METHODS", {name: hours.METHODS[name][:1] for name in ("FedAvg", "FedBuff")})
    assert hours.main(["--data", "digits", "--seeds", "1"]) == 0
    cells = json.loads((tmp_path / "hours.json").read_text())["cells"]["digits"]
    slow, fast = (cells["rare"][name]["1"] for name in ("FedAvg", "FedBuff"))
    assert fast["hours"][0] < slow["hours"][0]
    assert slow["hours"][1] is None
    page = (tmp_path / "hours.md").read_text()
    assert "(1 of 1 not)" in page
    assert hours.main(["--table"]) == 0
    assert (tmp_path / "hours.md").read_text() == page


def test_slow_devices_hold_rare_classes() -> None:
    hours = load("devices", "hours")
    hours.DATA["digits"] = replace(hours.DATA["cifar10"], clients=20, rows=0)
    dealt = hours.federation("digits", 1)
    free, rare = (hours.devices("digits", dealt, condition, 1).fleet(20, 1).speed for condition in hours.WORDS)
    y, index = dealt.train.arrays.y, dealt.train.index
    shares = [float((y[index[client]] < 2).double().mean()) for client in range(20)]
    assert sorted(free) == sorted(rare)
    assert rare.max() / rare.min() > 20
    by_speed = [shares[client] for client in rare.argsort()]
    assert by_speed == sorted(shares, reverse=True)


def test_the_page_is_that_of_the_stored_results() -> None:
    hours = load("devices", "hours")
    assert hours.tables(json.loads((STORED / "hours.json").read_text())) == (STORED / "hours.md").read_text()
