"""Workers on several GPUs, for which the host stands in under the names of other devices."""

from __future__ import annotations

from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.federations import FEATURES, classes
from helpers.marks import exhaustive
from helpers.networks import BodyAndHead, fixed
from helpers.runs import assert_same_run, experiment, go
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom.compute import computes
from fedloom.engines.processes import Processes
from fedloom.experiment.federated import FederatedTask
from fedloom.rounds.engine import Group

SIZES = (6, 9, 11, 7, 5, 8)
PRETENDED = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")  # any name but "cpu" is a GPU's to computes


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engines.processes.gpu_name", str)


def with_dropout() -> nn.Module:
    return fixed(BodyAndHead(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Dropout(0.5)), 5))


def on(*devices: str, **settings: Any) -> Any:
    conditions = {"federation": classes(SIZES), "model": with_dropout, "compute": "batched", "rounds": 2} | settings
    return go("scaffold", engine="processes", engine_settings={"devices": devices}, **conditions)


def test_sums_have_the_same_bits_on_any_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked workers stand in for those that are started afresh, which takes seconds."""
    monkeypatch.setattr(Processes, "reason_to_spawn", lambda self: None)
    four = {"compute": "batched", "compute_settings": {"shares": 4}, "rounds": 2}
    expected = go("scaffold", federation=classes(SIZES), model=with_dropout, **four)
    for count in (1, 2, 4):
        assert_same_run(expected, on(*PRETENDED[:count]))


@exhaustive
def test_workers_that_are_started_on_devices_have_the_same_bits() -> None:
    assert_same_run(*(on(*PRETENDED[:count], rounds=1) for count in (1, 2)))


def test_a_cohort_is_shared_and_workers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    task = FederatedTask(experiment(federation=classes(SIZES)))
    down, where = task.state.server.broadcast(task.plan), []

    def process(target: Any, args: tuple[Any, ...], daemon: bool) -> Any:
        where.append(args[-1])
        return SimpleNamespace(start=lambda: None)

    spawning = SimpleNamespace(Process=process)
    monkeypatch.setattr("fedloom.engines.processes.mp", SimpleNamespace(Pipe=Pipe, get_context=lambda kind: spawning))
    monkeypatch.setattr(Processes, "_ready", lambda self, worker: worker)
    for count, workers in ((1, 0), (2, 0), (2, 4)):
        engine = Processes(task.plan, computes.make("batched"), workers, devices=PRETENDED[:count])
        assert engine.computes[0].blocks(len(SIZES)) == [range(len(SIZES))]
        assert [*map(len, engine._blocks(Group(down, np.arange(len(SIZES)), lambda client: {})))] == [2, 2, 1, 1]
    first, second = PRETENDED[:2]
    assert where == [first, first, second, first, second, first, second]


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:x", "gpu:9", "cuda:0"])
def test_devices_are_gpus_of_this_machine(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"devices has '.*', but it must name GPUs, like \[cuda:0,cuda:1\], and"):
        go(engine="processes", engine_settings={"devices": (device,)})
