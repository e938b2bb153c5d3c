"""Client work, rounds and evaluation on a device other than the host.

Without a GPU, a simulated one takes its place: it has no numbers, but operations that mix devices are refused as
on a GPU, and every wait of the host is counted (``helpers/pretend.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import distilling
from helpers.federations import Shaken, classes
from helpers.marks import KINDS
from helpers.runs import LIVE, assert_same_records, go, leaves, theta
from torch import nn

import fedloom as fl
from fedloom.base.errors import DataError
from fedloom.compute.cohort import descent, replay
from fedloom.core.local import Local
from fedloom.core.parts import Adaptation
from fedloom.experiment.evaluation import Evaluation
from fedloom.methods import methods
from fedloom.models import models
from fedloom.parts.adaptation import Neighbours, Prototypes
from fedloom_apps import distill
from fedloom_apps.distill import Distiller, distillers

TESTS = Path(__file__).parents[1]
MISPLACED = "a tensor on the host"
# made in hooks, by mixings, or for levels; the second and the fifth have no form for a cohort
OWN_TENSORS = ("scaffold", "fedproto", "fedmgda", "superfed_mm", "per_fedavg", "heterofl")
CONDITIONS = ("no evaluation", "momentum", "clipping", "adam", "layers", "layers, step by step")
COMPUTES = ("live", "batched")


def outcomes(compute: str, *names: str) -> dict[str, Any]:
    """How experiments, or all of them, ended on the simulated device."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch simulates no device written in Python")
    command = [sys.executable, str(TESTS / "helpers" / "pretend_runs.py"), compute, *names]
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    process = subprocess.run(command, capture_output=True, text=True, env=env, cwd=TESTS.parent, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)


def check(results: dict[str, Any]) -> None:
    misplaced = results.pop(MISPLACED)
    assert "at least two devices" in misplaced["error"], "a tensor on the host was not noticed"
    assert {name: result["error"] for name, result in results.items() if result["error"]} == {}


def check_waits(waits: list[list[Any]]) -> None:
    """A batched round of FedAvg: the host asks for each block's losses, and whether numbers are finite."""
    round_waits = [
        (lines, count) for *lines, count in waits if any(line.startswith("rounds/round.py") for line in lines)
    ]
    assert round_waits, "no round was run"
    assert not [lines for lines, _ in round_waits if any(line.startswith("cohort/") for line in lines)]
    blocks, rounds = 1, 2
    assert sum(count for _, count in round_waits) <= rounds * (2 * blocks + 1)


def test_methods_with_tensors_of_their_own_keep_to_their_device_and_the_host_waits_for_no_step() -> None:
    results = outcomes("batched", MISPLACED, "no evaluation", "layers", *OWN_TENSORS)
    check(results)
    check_waits(results["no evaluation"]["waits"])


@pytest.mark.exhaustive
def test_every_method_and_every_form_of_a_cohort_keeps_to_its_device() -> None:
    results = outcomes("live")
    assert set(results) == {*methods.names(), MISPLACED, *CONDITIONS}
    check(results)
    check(outcomes("batched", MISPLACED, *CONDITIONS, *sorted({*KINDS} - LIVE)))


cuda = pytest.mark.cuda


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


@cuda
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "fedper", "ditto", "per_fedavg", "q_ffl", "fedadam"])
def test_a_gpu_gives_the_cpus_run(name: str, compute: str) -> None:
    evaluation = Evaluation(what=("global", "clients", "average", "train"))
    settings: dict[str, Any] = {"compute": compute, "evaluation": evaluation, "cohort": 5}
    on_gpu = go(name, device="cuda", **settings)
    assert on_gpu.snapshot.server.theta.is_cuda
    on_cpu = go(name, **settings)
    assert_same_records(on_cpu.history, on_gpu.history, tolerance=1e-5)
    assert [name for name, _ in leaves(on_cpu.snapshot)] == [name for name, _ in leaves(on_gpu.snapshot)]
    for (name, expected), (_, value) in zip(leaves(on_cpu.snapshot), leaves(on_gpu.snapshot), strict=True):
        torch.testing.assert_close(
            value.cpu(), expected, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


LOCALS = {
    "plain": Local(epochs=5, batch_size=4, lr=0.05),
    "all": Local(epochs=5, batch_size=4, lr=0.05, lr_decay=0.9, clip=0.2, momentum=0.8, weight_decay=0.1),
}


@cuda
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (7, 12, 5, 9, 16, 4)], ids=["one step", "several"])
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_steps_recorded_as_cuda_graphs_have_the_same_bits(
    name: str, local: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "compute": "batched", "device": "cuda", "rounds": 5, "model": network, "local": LOCALS[local],
        "federation": classes(sizes, shape=(1, 6, 6)), "augment": (Shaken(),) if local == "all" else (),
    }  # fmt: skip
    recorded: list[int] = []

    def graph(step: Any, pool: Any, make: Any = replay.cuda_graph) -> Any:
        recorded.append(1)
        return make(step, pool)

    monkeypatch.setattr(replay, "cuda_graph", graph)
    on_gpu = go(name, **settings)
    if len(set(sizes)) == 1:
        assert len(recorded) == 1, "the same step in all rounds, whatever its learning rate"
    else:
        assert len(recorded) > 1 or name == "scaffold", "its clients have different coefficients, and run in lockstep"
    monkeypatch.setattr(descent, "recorder", lambda device: None)
    assert (theta(on_gpu) == theta(go(name, **settings))).all()
    on_cpu = go(name, **settings | {"device": "cpu"})
    torch.testing.assert_close(torch.from_numpy(theta(on_gpu)), torch.from_numpy(theta(on_cpu)), rtol=0, atol=1e-9)


@cuda
@pytest.mark.parametrize("compute", COMPUTES)
def test_convolutions_in_single_precision_agree_on_a_gpu(compute: str) -> None:
    settings: dict[str, Any] = {
        "model": network, "federation": classes(shape=(1, 6, 6)), "dtype": "float32", "compute": compute,
        "local": Local(epochs=1, batch_size=4, lr=0.05),
    }  # fmt: skip
    on_cpu, on_gpu = go(**settings), go(device="cuda", **settings)
    torch.testing.assert_close(on_gpu.snapshot.server.theta.cpu(), torch.from_numpy(theta(on_cpu)), rtol=0, atol=1e-5)


def pooled() -> nn.Module:
    """A convolutional network with group norms and every kind of pooling; its first kernels are large ones."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


@cuda
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compute", COMPUTES)
def test_the_same_seed_gives_the_same_bits_on_a_gpu(compute: str, dtype: str) -> None:
    """Without a warning of an operation that has no deterministic kernel."""
    settings: dict[str, Any] = {
        "compute": compute, "device": "cuda", "dtype": dtype, "model": pooled, "rounds": 4,
        "federation": classes(shape=(1, 12, 12)), "local": Local(epochs=3, batch_size=4, lr=0.05, momentum=0.9),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*deterministic")
        first, second = go(**settings), go(**settings)
    assert (theta(first) == theta(second)).all()
    assert_same_records(first.history, second.history)
    on_cpu = go(**settings | {"device": "cpu"})
    torch.testing.assert_close(
        torch.from_numpy(theta(first)),
        torch.from_numpy(theta(on_cpu)),
        rtol=0,
        atol=1e-4 if dtype == "float32" else 1e-9,
    )


@cuda
@pytest.mark.parametrize("method", [distillers.make("kd"), distillers.make("disk")], ids=["kd", "disk"])
def test_distillation_has_the_same_bits_twice_on_a_gpu(method: Distiller) -> None:
    images = distilling.images()
    first, second = (distill.run(images.experiment(method, epochs=4, seed=3, device="cuda")) for _ in range(2))
    ends = [[t.cpu() for t in result.model.state_dict().values()] for result in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert next(first.model.parameters()).is_cuda


@cuda
@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_unknown_tokens_are_refused_and_the_gpu_still_works(name: str) -> None:
    rows = torch.randint(0, 2, (40, 5), generator=torch.Generator().manual_seed(0))
    federation = fl.data.federate((rows, rows[:, 0]), "iid", clients=2)
    lstm = partial(models.make, "stacked_lstm", classes=2, inputs=(5,), hidden=3, layers=1)
    trained = go(name, federation=federation, model=lstm, rounds=1, device="cuda").trained
    model = trained.client(0)
    assert model.device.type == "cuda"
    unknown = torch.full((2, 5), 9)
    calls = (model.predict, lambda x: model.evaluate(x, [0, 1]), lambda x: trained.adapt(x, [0, 1]))
    for call in calls:
        with pytest.raises(DataError, match="tokens from 9 to 9, not all of which this model knows"):
            call(unknown)
    assert len(model.predict(rows[:3].numpy())) == 3
    assert torch.ones(3, device="cuda").sum().item() == 3


@cuda
@pytest.mark.parametrize("part", [Prototypes(), Neighbours()])
def test_a_model_that_keeps_samples_takes_inputs_of_the_host(part: Adaptation) -> None:
    method = replace(methods.make("fedavg"), adaptation=part)
    trained = go(method, device="cuda", rounds=1).trained
    model, test = trained.client(0), trained.federation.test
    assert model.predict(test.x.cpu().numpy()).device.type == "cpu"
    assert model.evaluate(test.x.cpu(), test.y.cpu())
