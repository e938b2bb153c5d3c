"""Names of composed methods show their parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.runs import experiment

from fedloom import Method, methods
from fedloom.config import build, resolve
from fedloom.core.parts import Drift
from fedloom.experiment.federated import run
from fedloom.methods import methods as presets
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import BinaryCrossEntropy, CrossEntropy, Proximal, WeightedCrossEntropy
from fedloom.parts.personal import PrivateHead
from fedloom.parts.server import Adam
from fedloom.parts.uplink import TopK

CE = (CrossEntropy(),)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (replace(methods.feddyn(), server=Adam()), "feddyn+adam"),
        (replace(methods.feddyn(), drift=Drift()), "feddyn-dynamic"),
        (
            replace(methods.fedavg(), objective=(*CE, Proximal(0.1)), personal=PrivateHead()),
            "fedavg+proximal+private_head",
        ),
        (Method("fedavg", CE, mixing=Uniform(), uplink=(TopK(0.1),)), "fedavg+uniform+top_k"),
        (replace(methods.feddyn(), server=Adam(), name="mine"), "mine"),
        (Method("head-adam", (CrossEntropy(),), personal=PrivateHead(), server=Adam()), "head-adam"),
        (replace(methods.feddyn(), name="feddyn+adam"), "feddyn"),
        (replace(methods.feddyn(), name="fedavg+tuned"), "fedavg+tuned"),
        (methods.fedprox().with_loss(WeightedCrossEntropy((1.0, 2.0, 3.0))), "fedprox+weighted_cross_entropy"),
        (replace(methods.fedlc(), objective=CE), "fedlc-calibrated+cross_entropy"),
        (methods.feddyn(alpha=0.5), "feddyn"),
    ],
)
def test_a_method_with_other_parts_does_not_go_by_the_presets_name(method: Method, name: str) -> None:
    assert experiment(method).method.name == name


def test_the_run_directory_has_the_name(tmp_path: Path) -> None:
    summary = run(experiment(replace(methods.fedavg(), server=Adam(0.01)), rounds=1), tmp_path / "run").summary
    assert summary["method"] == "fedavg+adam"


def test_every_preset_keeps_its_name() -> None:
    for name in presets.names():
        from fedloom.core.compose import named

        method = methods.make(name)
        assert named(presets, method) is method, name


def test_the_command_lines_names_are_the_same() -> None:
    made = build(resolve(["method=feddyn", "method.server=adam", "clients=2"])).method
    assert made.name == experiment(replace(methods.feddyn(), server=Adam())).method.name == "feddyn+adam"


def test_another_loss_gives_the_same_name_everywhere() -> None:
    words = ["method=fedprox", "method.objective=[binary_cross_entropy,proximal]", "clients=2"]
    made = build(resolve(words)).method
    assert made.name == methods.fedprox().with_loss(BinaryCrossEntropy()).name == "fedprox+binary_cross_entropy"
