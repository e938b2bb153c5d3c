"""Devices from files: columns, and what a file may not do."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.deploying import config
from helpers.runs import experiment, go

from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.federated import FederatedTask
from fedloom.timing import Recorded
from fedloom_apps.deploy.server import Recipe


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_columns_of_a_table(tmp_path: Path) -> None:
    own = table(tmp_path / "own.csv", "client,speed,latency\n1,2e9,0.5\n0,1e9,0.25\n")
    fleet = Recorded(path=own, up=7.0).fleet(2, 0)
    assert (fleet.speed.tolist(), fleet.latency.tolist(), fleet.up.tolist()) == ([1e9, 2e9], [0.25, 0.5], [7, 7])
    traced = table(tmp_path / "traced.csv", "computation,communication\n10,8\n20,80\n40,800\n")
    fleet = Recorded(path=traced, speed=4e9).fleet(3, 0)
    assert sorted(fleet.speed.tolist()) == [2e9, 4e9, 8e9]  # the median takes 20 ms a sample
    assert sorted(fleet.down.tolist()) == [1000, 10_000, 100_000]


def test_intervals_repeat(tmp_path: Path) -> None:
    path = table(tmp_path / "fleet.csv", "speed\n1e9\n")
    hours = table(tmp_path / "hours.csv", "client,start,end\n0,10,20\n1,50,60\n1,0,5\n")
    devices = Recorded(path=path, intervals=hours, day=100.0)
    found = {t: devices.present(np.arange(3), t, 0).tolist() for t in (0.0, 12.0, 55.0, 112.0, 70.0)}
    assert found == {0.0: [False, True, False], 12.0: [True, False, False], 55.0: [False, True, False],
                     112.0: [True, False, False], 70.0: [False] * 3}  # fmt: skip
    assert [devices.change(t, 3, 0) for t in (0.0, 10.0, 70.0, 150.0)] == [10.0, 50.0, 100.0, 200.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed,weight\n1,2\n", "unknown column 'weight'"),
        ("speed\nfast\n", "something else than numbers"),
        ("speed\n0\n", "greater than 0"),
        ("speed,latency\n1,-1\n", "at least 0"),
        ("speed,up\n1,\n", "without a finite number"),
        ("client,speed\n0,1\n", "no row for client 1"),
        ("speed\n", "no rows"),
    ],
)
def test_tables_that_are_no_devices(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        Recorded(path=table(tmp_path / "devices.csv", text)).fleet(2, 0)


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


@pytest.mark.parametrize(
    "words", [["schedule=buffered", "devices=lognormal"], ["devices=lognormal"], ["selection=weighted"]]
)
def test_deployments_have_real_time(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="for simulations"):
        Recipe.of(config(*words))
