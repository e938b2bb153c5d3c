"""Layers that the forward pass does not use: no gradient computed elsewhere reaches their parameters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.federations import CLASSES, FEATURES, classes
from helpers.marks import kinds
from helpers.nested import two_ends
from helpers.networks import BodyAndHead, fixed
from helpers.runs import assert_same_run, assert_same_state, experiment
from torch import nn

from fedloom.core.local import Local
from fedloom.experiment.federated import RunResult, run

TOLERANCE = 1e-12
PLAIN = Local(steps=4, batch_size=4, lr=0.1, weight_decay=0.1, clip=1.0)
LOCALS = {
    "decay and clip": PLAIN,
    "clip": Local(steps=4, batch_size=4, lr=0.1, clip=0.5),
    "momentum": Local(steps=4, batch_size=4, lr=0.1, momentum=0.9),
}
CASES = [
    ("feddyn", "decay and clip"),
    ("scaffold", "decay and clip"),
    ("fedprox", "decay and clip"),
    ("ditto", "decay and clip"),
    ("ditto", "momentum"),
    ("superfed_mm", "momentum"),
    ("superfed_mm", "clip"),
]


class Spare(BodyAndHead):
    """A layer between those that are used, and one after them."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh()), 3)
        self.spare = nn.Linear(FEATURES, 2)
        self.head = nn.Linear(3, CLASSES)
        self.after = nn.Linear(3, CLASSES)


def spare() -> nn.Module:
    return fixed(Spare())


def settings(name: str, local: str, model: Any = spare, **changes: Any) -> dict[str, Any]:
    data = classes((8, 8, 11, 8, 9, 8))
    return {
        "method": name,
        "federation": data,
        "model": model,
        "local": LOCALS[local],
        "rounds": 4,
        "compute": "batched",
        "compute_settings": {"shares": 2},
    } | changes


@cache
def batched(name: str, local: str) -> RunResult:
    return run(experiment(**settings(name, local)))


@pytest.mark.parametrize(("name", "local"), CASES)
def test_live_and_batched_agree(name: str, local: str) -> None:
    live = run(experiment(**settings(name, local, compute="live", compute_settings={})))
    assert_same_run(live, batched(name, local), TOLERANCE)


@pytest.mark.parametrize("name", ["feddyn", "fedprox"])
def test_an_exit_that_the_method_does_not_train_is_such_a_layer(name: str) -> None:
    conditions = settings(name, "decay and clip", two_ends)
    live = run(experiment(**conditions | {"compute": "live", "compute_settings": {}}))
    assert_same_run(live, run(experiment(**conditions)), TOLERANCE)


@pytest.mark.parametrize(("name", "local"), kinds(CASES, CASES[:2]))
def test_a_resumed_run_has_the_same_bits(name: str, local: str, tmp_path: Path) -> None:
    run(experiment(**settings(name, local)), tmp_path / "run", checkpoint_every=1, keep=9)
    checkpoint = sorted((tmp_path / "run" / "checkpoint").iterdir())[1]
    resumed = run(experiment(**settings(name, local)), tmp_path / "run", resume=checkpoint)
    assert_same_state(batched(name, local).snapshot, resumed.snapshot)


@pytest.mark.parametrize(("name", "local"), kinds(CASES, CASES[:2]))
def test_processes_give_the_same_bits(name: str, local: str) -> None:
    parallel = run(experiment(**settings(name, local), engine="processes", engine_settings={"workers": 2}))
    assert_same_run(batched(name, local), parallel)
