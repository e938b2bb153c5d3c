"""Client work, rounds and evaluation on a device other than the host.

Without a GPU, a simulated one takes its place: it has no numbers, but operations that mix devices are refused as
on a GPU, and every wait of the host is counted (``helpers/pretend.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federations import classes
from helpers.runs import assert_same_records, go, leaves, theta
from torch import nn

from fedloom.compute.cohort import descent, replay
from fedloom.core.local import Local
from fedloom.experiment.experiment import Evaluation
from fedloom.methods import methods

TESTS = Path(__file__).parents[1]
MISPLACED = "a tensor on the host"
CONDITIONS = ("no evaluation", "momentum", "clipping", "adam", "layers", "layers, step by step")
COMPUTES = ("live", "batched")


@cache
def outcomes(compute: str, *names: str) -> dict[str, Any]:
    """How the named experiments, by default all, ended on the simulated device."""
    command = [sys.executable, str(TESTS / "helpers" / "pretend_runs.py"), compute, *names]
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=TESTS.parent, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check(found: dict[str, Any]) -> None:
    misplaced = found.pop(MISPLACED)
    assert "at least two devices" in misplaced["error"], "a tensor on the host was not noticed"
    assert {name: one["error"] for name, one in found.items() if one["error"]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTES)
def test_every_method_keeps_to_its_device(compute: str) -> None:
    found = dict(outcomes(compute))
    assert set(found) == {*methods.names(), MISPLACED, *CONDITIONS}
    check(found)


@pytest.mark.slow
def test_the_host_waits_for_no_step() -> None:
    """A batched round of FedAvg: the host asks for each block's losses, and whether numbers are finite."""
    waits = outcomes("batched", "no evaluation")["no evaluation"]["waits"]
    during = [(lines, count) for *lines, count in waits if any(line.startswith("core/round.py") for line in lines)]
    assert during, "no round was run"
    assert not [lines for lines, _ in during if any(line.startswith("cohort/") for line in lines)]
    blocks, rounds = 1, 2
    assert sum(count for _, count in during) <= rounds * (2 * blocks + 1)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


@cuda
@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "fedper", "ditto", "per_fedavg", "q_ffl", "fedadam"])
def test_a_gpu_gives_the_cpus_run(name: str, compute: str) -> None:
    everything = Evaluation(what=("global", "clients", "average", "train"))
    settings: dict[str, Any] = {"compute": compute, "evaluation": everything, "cohort": 5}
    there = go(name, device="cuda", **settings)
    assert there.snapshot.server.theta.is_cuda
    here = go(name, **settings)
    assert_same_records(here.history, there.history, tolerance=1e-5)
    assert [name for name, _ in leaves(here.snapshot)] == [name for name, _ in leaves(there.snapshot)]
    for (name, one), (_, other) in zip(leaves(here.snapshot), leaves(there.snapshot), strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_steps_recorded_as_cuda_graphs_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "compute": "batched", "device": "cuda", "rounds": 5, "model": network, "federation": classes(shape=(1, 6, 6)),
        "local": Local(epochs=5, batch_size=4, lr=0.05),
    }  # fmt: skip
    replayed = []
    monkeypatch.setattr(replay, "cuda_graph", lambda step, make=replay.cuda_graph: replayed.append(1) or make(step))
    recorded = go(name, **settings)
    assert replayed, "no step was recorded"
    monkeypatch.setattr(descent, "recorder", lambda device: None)
    assert (theta(recorded) == theta(go(name, **settings))).all()


@cuda
@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTES)
def test_convolutions_in_single_precision_agree_on_a_gpu(compute: str) -> None:
    settings: dict[str, Any] = {
        "model": network, "federation": classes(shape=(1, 6, 6)), "dtype": "float32", "compute": compute,
        "local": Local(epochs=1, batch_size=4, lr=0.05),
    }  # fmt: skip
    here, there = go(**settings), go(device="cuda", **settings)
    torch.testing.assert_close(there.snapshot.server.theta.cpu(), torch.from_numpy(theta(here)), rtol=0, atol=1e-5)
