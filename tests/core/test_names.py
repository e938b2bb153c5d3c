"""Names of composed methods show their parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.runs import experiment

from fedloom import Method, methods
from fedloom.config import build, resolve
from fedloom.config.keys import RUN, build_method
from fedloom.core.compose import rename
from fedloom.core.parts import Drift
from fedloom.experiment.federated import run
from fedloom.methods import methods as presets
from fedloom.parts.mixing import AAggFFD, Uniform
from fedloom.parts.objectives import BinaryCrossEntropy, CrossEntropy, Proximal, WeightedCrossEntropy
from fedloom.parts.personal import PrivateHead
from fedloom.parts.server import Adam, Yogi
from fedloom.parts.topology import Hierarchy, Ring, Torus
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
        method = methods.make(name)
        assert rename(presets, method) is method, name


def test_the_command_lines_names_are_the_same() -> None:
    method = build(resolve(["method=feddyn", "method.server=adam", "clients=2"])).method
    assert method.name == experiment(replace(methods.feddyn(), server=Adam())).method.name == "feddyn+adam"


def test_another_loss_gives_the_same_name_everywhere() -> None:
    words = ["method=fedprox", "method.objective=[binary_cross_entropy,proximal]", "clients=2"]
    method = build(resolve(words)).method
    assert method.name == methods.fedprox().with_loss(BinaryCrossEntropy()).name == "fedprox+binary_cross_entropy"


def test_what_a_method_sets_of_a_whole_family_of_parts_stays_with_another_of_them() -> None:
    def method_of(*words: str) -> Method:
        return build_method(resolve([*words]))

    assert method_of("method=dpsgd", "method.topology=torus").topology == Torus(combine_first=True)
    assert method_of("method=dpsgd", "method.topology=torus", "method.topology.combine_first=false").topology == Torus()
    assert method_of("method=sgp", "method.topology=ring").topology == Ring(push_sum=True)
    assert method_of("method=dpsgd", "method.topology=hierarchy").topology == Hierarchy()
    config = resolve(["method=fedadam", "method.lr=0.3", "method.server=yogi"])
    assert build_method(config).server == Yogi(lr=0.3)
    assert RUN.complete(config.values) == config.values  # nor has what config.yaml says twice no effect
    assert method_of("method=aaggff_s", "method.mixing=aaggff_d").mixing == AAggFFD()  # which has defaults of its own
