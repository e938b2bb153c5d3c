"""Every registered method on every engine with every compute: serial is the reference, to the bit."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import pytest
from helpers.federations import SIZES
from helpers.marks import KINDS, exhaustive
from helpers.runs import GENTLE, LIVE, assert_same_run, experiment, leaves

from fedloom.base.errors import ConfigError
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import make, methods
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.mixing import CoordinateMedian, Uniform
from fedloom.parts.objectives import CrossEntropy, Proximal
from fedloom.parts.personal import PrivateBody, PrivateHead
from fedloom.parts.server import SGD, Adam
from fedloom.parts.uplink import QSGD, ClipNoise, RandomK, SecureSum, SignCompression, TopK

SERVED = Local(epochs=2, batch_size=4, lr=0.2, lr_decay=0.9, weight_decay=0.01, clip=0.9, stragglers=0.3)
PLAIN = Local(epochs=2, batch_size=4, lr=0.1, lr_decay=0.9)
SHORT = GENTLE | {"feddf": {"steps": 10}}
EVERYTHING = Evaluation(what=("global", "clients", "average", "train"), every=3)

# Combinations of parts that no named method has.
MIXED = {
    "feddyn+head+adam": Method("a", (CrossEntropy(),), FedDynDrift(0.1), PrivateHead(), server=Adam(0.05)),
    "feddyn+top_k+qsgd": Method(
        "c", (CrossEntropy(),), FedDynDrift(0.1), mixing=Uniform(), uplink=(TopK(0.3), QSGD(4))
    ),
    "feddyn+private": Method(
        "e", (CrossEntropy(),), FedDynDrift(0.1), mixing=Uniform(), uplink=(ClipNoise(0.5, 0.1, quantile=0.5),)
    ),
    "scaffold+private+masked": Method(
        "g",
        (CrossEntropy(),),
        Scaffold(),
        mixing=Uniform(),
        uplink=(ClipNoise(0.5, 0.1, quantile=0.5), SecureSum()),
    ),
    "median+locally private": Method(
        "f",
        (CrossEntropy(),),
        Scaffold(),
        mixing=CoordinateMedian(),
        uplink=(ClipNoise(noise=0.1, noise_at="client", bounds={"update": 0.5, "drift/control": 1.0}),),
    ),
    "scaffold+random_k+sign": Method(
        "d",
        (CrossEntropy(),),
        Scaffold(),
        mixing=Uniform(),
        uplink=(RandomK(0.5, ("drift/control",)), SignCompression()),
    ),
    "scaffold+prox+body+momentum": Method(
        "b", (CrossEntropy(), Proximal(0.1)), Scaffold(), PrivateBody(), mixing=Uniform(), server=SGD(0.9, 0.5)
    ),
}

COMPUTES: dict[str, dict[str, Any]] = {
    "live": {"compute": "live"},
    "batched": {"compute": "batched"},
    # steps that need no gradient of their own, where nobody asks for single updates
    "batched, plain": {"compute": "batched", "local": PLAIN, "evaluation": Evaluation(what=("global",))},
}
WORKERS = {"processes": 2, "one worker": 1, "three workers": 3}
PLACES = {  # the computes differ in what a worker does; how blocks are dealt among workers depends on no method
    "live": "processes",
    "batched": "processes",
    "batched, plain": "three workers",
}
PLACED = {
    "live": {*KINDS, *MIXED},
    "batched": {"fedavg", "fedrep", "superfed_mm", "krum"},
    "batched, plain": {"scaffold"},
}
EVERY = [
    pytest.param(name, engine, compute, marks=[] if name in PLACED[compute] else [exhaustive])
    for name in (*methods.names(), *MIXED)
    for compute, engine in PLACES.items()
    if name not in LIVE or compute == "live"
]


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few clients of these federations lie in two or three blocks."""
    monkeypatch.setattr("fedloom.rounds.aggregate.LAST", 2)
    monkeypatch.setattr("fedloom.rounds.aggregate.SHARE", 2)
    monkeypatch.setattr(import_module("fedloom.compute.batched"), "EVEN", 2)


def conditions(name: str, engine: str = "serial", settings: Any = None, **changes: Any) -> Experiment:
    method = MIXED[name] if name in MIXED else make(name, **SHORT.get(name, {}))
    cohort = None if method.needs("full_participation") else 5
    defaults = {"cohort": cohort, "rounds": 3, "drop_rate": 0.15, "local": SERVED, "evaluation": EVERYTHING, "seed": 11}
    if name == "ifca":  # whose clients have no model of their own from one round to the next
        defaults["evaluation"] = Evaluation(what=("global", "clients", "train"), every=3)
    return experiment(method, engine=engine, engine_settings=settings or {}, **defaults | changes)


@cache
def reference(name: str, compute: str = "live") -> RunResult:
    result = run(conditions(name, **COMPUTES[compute]))
    if name != "centralised":
        assert result.failures, "the drop-outs that this test wants did not happen"
        assert {record["failures"] for record in result.history} != {0}
    return result


@pytest.mark.parametrize(("name", "engine", "compute"), EVERY)
def test_engine_agrees_with_serial(name: str, engine: str, compute: str) -> None:
    result = run(conditions(name, "processes", {"workers": WORKERS[engine]}, **COMPUTES[compute]))
    assert_same_run(reference(name, compute), result)


@pytest.mark.parametrize(("engine", "compute"), [("one worker", "live"), ("three workers", "batched")])
@pytest.mark.parametrize("name", ["fedavg", "fedhen", "scaffold+private+masked", "scaffold+prox+body+momentum"])
def test_any_number_of_workers_agrees_with_serial(name: str, engine: str, compute: str) -> None:
    test_engine_agrees_with_serial(name, engine, compute)


@pytest.mark.parametrize(
    "local",
    [
        Local(steps=3, batch_size=6, lr=0.1, momentum=0.8),
        Local(epochs=2, batch_size=0, lr=0.1, momentum=0.5, nesterov=True, clip=0.5, weight_decay=0.1),
        Local(epochs=1, batch_size=100, lr=0.3),
        Local(epochs=1, batch_size=1, lr=0.05),
    ],
    ids=["steps and momentum", "all data and nesterov", "batch above every client", "one sample"],
)
def test_local_settings_mean_the_same_in_processes(local: Local) -> None:
    for name in ("fedavg", "fedper"):
        settings = {"local": local, "cohort": None, "drop_rate": 0.0}
        serial = run(conditions(name, **settings))
        assert_same_run(serial, run(conditions(name, "processes", **settings)))


def test_float32_has_the_same_bits_too() -> None:
    a, b = (run(conditions("scaffold", engine, dtype="float32")) for engine in ("serial", "processes"))
    assert_same_run(a, b)


def test_a_million_idle_clients_cost_nothing_in_state() -> None:
    """Only clients that took part have a state."""
    result = reference("scaffold")
    members = {key.split("/")[0] for key, _ in leaves(result.snapshot) if key.startswith("client ")}
    assert 0 < len(members) <= len(SIZES)
    single = run(conditions("scaffold", cohort=1, rounds=1, drop_rate=0.0))
    assert len(single.snapshot.store) == 1


def test_bad_engine_settings() -> None:
    for engine, settings, sentence in [
        ("processes", {"workers": -1}, "workers is -1, but it must be at least 0"),
        ("processes", {"worker": 2}, "has no setting 'worker'; did you mean 'workers'"),
        ("seriell", {}, "unknown engine 'seriell'; did you mean 'serial'"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            run(conditions("fedavg", engine, settings))
