"""The trust recipes run, and their pages agree with their stored results."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.recipes import FOLDER, load

from fedloom.core.parts import Mixing
from fedloom.parts.mixing import FLTrust
from fedloom_apps.audit.attacks import ALIE, Backdoor, LabelFlip

RESULTS = FOLDER / "trust" / "results"
STORED = sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    common = load("trust", "common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "SEEDS", (1,))
    return tmp_path


def recipe(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> ModuleType:
    module = load("trust", name)
    for key, value in changes.items():
        monkeypatch.setattr(module, key, value)
    return module


def test_hostile_clients(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacks = {"none": (None,), "label flip": (LabelFlip(),), "ALIE": (ALIE(), ALIE(z=9.0)), "backdoor": (Backdoor(),)}
    hostile = recipe(
        "hostile", monkeypatch, AGGREGATORS={"mean": (Mixing(),), "FLTrust": (FLTrust(100),)}, ATTACKS=attacks
    )
    once = hostile.common.local(epochs=1)
    monkeypatch.setattr(hostile.common, "local", lambda: once)
    assert hostile.main(["--rounds", "2", "--seeds", "1"]) == 0
    stored = json.loads((small / "hostile_digits.json").read_text())
    assert len(stored["runs"]) == 2 * 2 * (5 + 4) + 1
    page = (small / "hostile_digits.md").read_text()
    assert hostile.main(["--table"]) == 0
    assert (small / "hostile_digits.md").read_text() == page
    assert "| backdoor |" in page
    assert "Of 37 runs in which they were counted, none excluded an update." in page


def test_private_and_compressed_runs(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting", reason="the extra 'privacy' is not installed")
    private = recipe("private", monkeypatch, EPSILONS=(inf, 8.0), RATES=(0.1,), BOUNDS=(0.3,))
    assert private.main(["--rounds", "2", "--seeds", "1"]) == 0
    assert "| SuPerFed-MM |" in (small / "private_digits.md").read_text()
    compressed = load("trust", "compressed")
    few = {name: compressed.COMPRESSORS[name][:1] for name in ("none", "QSGD", "sign")}
    monkeypatch.setattr(compressed, "COMPRESSORS", few)
    monkeypatch.setattr(compressed, "ROUNDS", 3)
    assert compressed.main(["--target", "0.2", "--seeds", "1"]) == 0
    runs = json.loads((small / "compressed_digits.json").read_text())["runs"]
    for name in ("private", "compressed"):
        page = (small / f"{name}_digits.md").read_text()
        assert "runs in which they were counted, none excluded an update." in page
        assert "Not recorded" not in page
    assert runs["iid | none | seed 1"]["up"] > runs["iid | QSGD(bits=2, slices=('update',)) | seed 1"]["up"] / 3


def test_audits(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"plain SGD": {"dp_clip": float("inf")}, "private": {"dp_clip": 1.0}}
    membership = recipe("membership", monkeypatch, TRAINING=few, MODELS=6, ROUNDS=2)
    assert membership.main(["--models", "6"]) == 0
    page = (small / "membership.md").read_text()
    assert page.count("LiRA") == 2
    assert "Of 12 runs in which they were counted, none excluded an update." in page
    inversion = recipe("inversion", monkeypatch, TRAINING={"plain SGD": {}}, DIGITS=8, STEPS=40)
    assert inversion.main() == 0
    run = json.loads((small / "inversion.json").read_text())["runs"]["plain SGD"]
    assert run["labels"] == 1.0
    assert max(run["mse"]) < 0.3


@pytest.mark.parametrize("name", STORED)
def test_the_stored_pages_are_up_to_date(name: str) -> None:
    module = load("trust", name.partition("_")[0])
    page = module.tables(json.loads((RESULTS / f"{name}.json").read_text()))
    assert (RESULTS / f"{name}.md").read_text() == page
