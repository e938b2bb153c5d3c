"""Devices from files: columns, and what a file may not do."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_state, experiment, go

from fedloom.base.errors import CheckpointError, ConfigError, DataError
from fedloom.core.local import Local
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.rundir import RunDirectory
from fedloom.timing import Buffered, Equal, Grades, Lognormal, Recorded, Rounds


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_columns_of_a_table(tmp_path: Path) -> None:
    by_client = table(tmp_path / "own.csv", "client,speed,latency\n1,2e9,0.5\n0,1e9,0.25\n")
    fleet = Recorded(path=by_client, up=7.0).fleet(2, 0)
    assert (fleet.speed.tolist(), fleet.latency.tolist(), fleet.up.tolist()) == ([1e9, 2e9], [0.25, 0.5], [7, 7])
    trace = table(tmp_path / "traced.csv", "computation,communication\n10,8\n20,80\n40,800\n")
    fleet = Recorded(path=trace, speed=4e9).fleet(3, 0)
    assert sorted(fleet.speed.tolist()) == [2e9, 4e9, 8e9]  # the median takes 20 ms a sample
    assert sorted(fleet.down.tolist()) == [1000, 10_000, 100_000]


def test_intervals_repeat(tmp_path: Path) -> None:
    path = table(tmp_path / "fleet.csv", "speed\n1e9\n")
    hours = table(tmp_path / "hours.csv", "client,start,end\n0,10,20\n1,50,60\n1,0,5\n")
    devices = Recorded(path=path, intervals=hours, day=100.0)
    presence = {t: devices.present(np.arange(3), t, 0).tolist() for t in (0.0, 12.0, 20.0, 55.0, 112.0)}
    assert presence == {0.0: [False, True, False], 12.0: [True, False, False], 20.0: [False] * 3,
                     55.0: [False, True, False], 112.0: [True, False, False]}  # fmt: skip
    assert [devices.change(t, 3, 0) for t in (0.0, 10.0, 70.0, 150.0)] == [10.0, 50.0, 100.0, 200.0]
    assert devices.ever_present(3).tolist() == [True, True, False]
    table(hours, "client,start,end\n0,10,90\n0,20,30\n1,0,5\n")
    overlapping = Recorded(path=path, intervals=hours, day=100.0)
    assert overlapping.present(np.arange(2), 50.0, 0).tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed,weight\n1,2\n", "unknown column 'weight'"),
        ("speed\nfast\n", "something other than numbers"),
        ("speed\n0\n", "greater than 0"),
        ("speed,latency\n1,-1\n", "at least 0"),
        ("speed,up\n1,\n", "without a finite number"),
        ("client,speed\n0,1\n", "no row for client 1"),
        ("speed\n", "no rows"),
        ("memory\n0\n", "greater than 0"),
        ("computation\n0\n20\n", "'computation' must have numbers greater than 0"),
        ("client,speed\n0,1\n1.5,1\n", "whole numbers"),
    ],
)
def test_tables_that_are_no_devices(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        Recorded(path=table(tmp_path / "devices.csv", text)).fleet(2, 0)


def test_grades_are_some() -> None:
    with pytest.raises(ConfigError, match="speeds is empty"):
        Grades(speeds=())


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "devices.csv")
    with pytest.raises(DataError):
        Recorded(path=tmp_path / "devices.csv").fleet(2, 0)


def test_intervals_of_strangers_alone_do_not_hang_the_run(tmp_path: Path) -> None:
    path = table(tmp_path / "fleet.csv", "speed\n1e9\n")
    hours = table(tmp_path / "hours.csv", "client,start,end\n99,10,20\n")
    task = FederatedTask(experiment("fedavg", cohort=2, devices=Recorded(path=path, intervals=hours)))
    with pytest.raises(DataError, match="no interval of the 6 clients"):
        task.timeline.step(0)
    table(tmp_path / "hours.csv", "client,start,end\n3,10,20\n")
    again = Recorded(path=path, intervals=hours)
    assert go("fedavg", cohort=2, rounds=2, devices=again).history[-1]["cohort"] == 1  # who is there takes part
    with pytest.raises(
        ConfigError, match="a step takes the work of 2 clients, but 1 have a device"
    ):  # else without end
        go("fedavg", cohort=2, schedule=Buffered(2), devices=again)
    few = table(tmp_path / "few.csv", "client,memory\n0,1e9\n1,10\n2,10\n3,10\n4,10\n5,10\n")
    with pytest.raises(ConfigError, match="a step takes the work of 2 clients, but 1 have a device"):
        go("fedavg", cohort=2, schedule=Buffered(2), devices=Recorded(path=few, availability=0.5))


def test_a_run_is_not_continued_with_a_changed_table(tmp_path: Path) -> None:
    path = table(tmp_path / "fleet.csv", "speed\n1e9\n2e9\n")
    settings: dict[str, Any] = {"devices": Recorded(path=path), "schedule": Buffered(2), "cohort": 3}
    run(experiment("fedavg", rounds=2, **settings), tmp_path / "run")
    table(path, "speed\n1e9\n9e9\n")
    with pytest.raises(CheckpointError, match="devices: "):
        run(experiment("fedavg", rounds=4, **settings), tmp_path / "run", resume=True)


def test_clients_without_the_memory_for_their_work_are_named_and_never_invited(tmp_path: Path) -> None:
    plain = go("fedavg", cohort=3, rounds=6, devices=Equal())
    assert_same_state(plain.snapshot, go("fedavg", cohort=3, rounds=6, devices=Equal(memory=1e9)).snapshot)
    path = table(tmp_path / "devices.csv", "client,memory\n0,1e9\n1,1e9\n2,10\n3,1e9\n4,10\n5,1e9\n")
    for schedule in (Rounds(), Buffered(2)):
        out = tmp_path / repr(schedule)
        result = run(experiment("fedavg", cohort=3, rounds=6, schedule=schedule, devices=Recorded(path=path)), out)
        assert set(RunDirectory(out).mixing()["client"]) == {0, 1, 3, 5}
        (warning,) = [line for line in result.summary["warnings"] if "memory" in line]
        assert "2 of 6 clients, of whom client 2 is the first, have less memory" in warning
    clock = FederatedTask(experiment("fedavg", devices=Lognormal(memory=5e3))).clock
    assert clock is not None
    assert 0 < clock.fits.sum() < 6
    assert clock.conditions["available"](np.arange(6), 0.0).tolist() == clock.fits.tolist()
    with pytest.raises(ConfigError, match="no device has the memory that its client's work takes"):
        go("fedavg", devices=Equal(memory=10.0))


def test_memory_is_of_model_optimiser_and_mini_batch() -> None:
    def memory(method: str = "fedavg", **local: Any) -> np.ndarray:
        task = FederatedTask(experiment(method, devices=Equal(), local=Local(**{"steps": 2, "batch_size": 4} | local)))
        assert task.clock is not None
        return task.clock.memory

    task = FederatedTask(experiment("fedavg"))
    size = task.state.server.theta.nbytes
    layers = sum(module.out_features for module in task.plan.model.modules() if isinstance(module, torch.nn.Linear))
    assert (memory() >= 3 * size + 4 * 8 * layers).all()  # received, trained, gradient; outputs of layers in float64
    np.testing.assert_allclose(memory(optimiser="adam") - memory(), 2 * size)
    assert (memory("scaffold") - memory() >= 2 * size).all()  # c and c_i
    assert (memory(batch_size=8) >= memory()).all()
    np.testing.assert_array_equal(memory(batch_size=999), memory(batch_size=0))  # no mini-batch exceeds the data
    assert (memory(batch_size=8) > memory()).any()
    assert len(set(memory("heterofl"))) > 1


def test_evaluation_by_the_clock(tmp_path: Path) -> None:
    """The first step at or after each multiple, also in a run that is continued."""
    settings: dict[str, Any] = {"schedule": Buffered(2), "devices": Lognormal(), "cohort": 4}
    clocks = [record["clock"] for record in go("fedavg", rounds=9, **settings).history]
    evaluation = Evaluation(hours=clocks[-1] / 3600 / 3.5)
    full_run = go("fedavg", rounds=9, evaluation=evaluation, **settings)
    due = [sum(clock >= 3600 * evaluation.hours * n for n in (1, 2, 3)) for clock in [0.0, *clocks]]
    evaluated = [b > a or t == 8 for t, (a, b) in enumerate(pairwise(due))]
    assert 2 < sum(evaluated) < 6
    assert ["global/loss" in record for record in full_run.history] == evaluated
    assert due[3] > 0
    assert not evaluated[3]
    run(experiment("fedavg", rounds=3, evaluation=evaluation, **settings), tmp_path)
    resumed = run(experiment("fedavg", rounds=9, evaluation=evaluation, **settings), tmp_path, resume=True)
    assert ["global/loss" in record for record in resumed.history[3:]] == evaluated[3:]
    with pytest.raises(ConfigError, match="goes by the clock; set devices"):
        experiment("fedavg", evaluation=evaluation)


@pytest.mark.parametrize("column", ["speed", "down", "up"])
def test_a_device_that_would_never_be_done_is_refused(column: str, tmp_path: Path) -> None:
    path = table(tmp_path / "fleet.csv", f"{column}\n1e-308\n")
    with pytest.raises(ConfigError, match=r"the work of client \d takes its device more than 1e\+15 seconds"):
        go(devices=Recorded(path=path))
