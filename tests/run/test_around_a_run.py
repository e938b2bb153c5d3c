"""What a run does not touch, and what it reports about itself."""

from __future__ import annotations

import gc
import locale
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.runs import experiment, theta
from torch import Tensor, nn

import fedloom as fl
from fedloom import methods
from fedloom.base.errors import ClientError, ConfigError
from fedloom.core.local import Local
from fedloom.data import federate
from fedloom.experiment.callbacks import EarlyStopping
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.experiment.runtime import environment, pick_device
from fedloom.parts.mixing import FLTrust
from fedloom.parts.objectives import loss


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_pytorchs_own_draws_go_on_as_if_there_had_been_no_run(compute: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run(experiment(rounds=1, compute=compute))
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize("device", ["cuda:x", "cuda:-1", "cpu:0", "cpu:x", "gp"])
def test_devices_that_there_are_not(device: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown device '{device}'"):
        pick_device(device)


def test_gpu_means_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("fedloom.experiment.runtime.prepare_gpu", lambda: None)
    assert [pick_device(device) for device in ("gpu", "gpu:1")] == ["cuda", "cuda:1"]


def test_the_gpu_in_use_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    host = environment()["machine"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
    assert environment()["machine"] == f"{host}, GPU X"


def test_an_engine_without_gpus_refuses_one() -> None:
    with pytest.raises(ConfigError, match="device=cuda: this engine's main process works on the CPU"):
        run(experiment(engine="processes", device="cuda"))
    assert pick_device("auto", ("cpu",)) == "cpu"


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_losses_that_cannot_be_computed_end_the_run_alike(engine: str) -> None:
    def broken_loss(out: Tensor, y: Tensor) -> Tensor:
        if len(y) > 2:  # more than it is tried on
            raise ValueError("no such loss")
        return (out.sum(1) - y) ** 2

    method = methods.make("aaggff_d").with_loss(loss(broken_loss))
    sentence = (
        r"^every client of the round failed; the first was round 1, client 0: its loss of the received model cannot be "
        r"computed: ValueError: no such loss\.\n"
    )
    with pytest.raises(ClientError, match=sentence):
        run(experiment(method, engine=engine))


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_client_whose_loss_cannot_be_computed_is_left_out(engine: str) -> None:
    """Like one that fails during its local work: it is named, and the others go on."""

    def broken_loss(out: Tensor, y: Tensor) -> Tensor:
        if (y == 9).any():
            raise ValueError("no such loss")
        return (out.sum(1) - y) ** 2

    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(8, 4)), np.full(8, 9.0 if number == 2 else 0.5)) for number in range(5)]
    method = methods.make("q_ffl").with_loss(loss(broken_loss))
    settings = {"engine": engine, "evaluation": Evaluation(what=()), "rounds": 2, "model": lambda: nn.Linear(4, 1)}
    result = run(experiment(method, federation=federate(clients, seed=0, held_out=0.25), **settings))
    assert [(f.round, f.client, f.kind) for f in result.failures] == [(0, 2, "code"), (1, 2, "code")]
    assert "ValueError: no such loss" in str(result.failures[0])
    assert "in broken_loss" in result.failures[0].trace
    assert [record["failures"] for record in result.history] == [1, 1]
    assert np.isfinite(theta(result)).all()


def test_a_run_that_ends_before_the_round_of_a_part_says_so() -> None:
    result = run(
        experiment(
            methods.make("fedssa", steps=10),
            rounds=6,
            evaluation=Evaluation(what=("train",), metric="global/train_loss"),
        ),
        callbacks=[EarlyStopping("train/loss", patience=1, min_delta=100.0)],
    )
    assert result.summary["status"] == "stopped"
    assert any(
        "acts in the last round, which the run did not reach" in warning for warning in result.summary["warnings"]
    )


def test_a_round_without_effect_leaves_the_average_as_it_was() -> None:
    method = methods.make("fedavg")
    with_trust = type(method)("trust", method.objective, mixing=FLTrust(0))
    evaluation = Evaluation(what=("average", "global"))
    result = run(experiment(with_trust, rounds=12, drop_rate=0.5, evaluation=evaluation))
    history, void = result.history, [failure.round for failure in result.failures if failure.client == 0]
    assert void
    for t in set(void) - {0}:
        assert history[t]["global/loss"] == history[t - 1]["global/loss"]
        assert history[t]["average/loss"] == history[t - 1]["average/loss"]


def test_where_clients_share_nothing_no_model_of_the_server_is_measured() -> None:
    evaluation = Evaluation(what=("global", "clients", "average", "cohort", "train"), server_average=0.5)
    record = run(experiment("local", evaluation=evaluation)).history[-1]
    kinds = {key.partition("/")[0] for key in record if "/" in key} - {"comm", "train", "mixing"}
    assert kinds == {"clients"}
    for metric in ("average/accuracy", "cohort/loss"):
        with pytest.raises(ConfigError, match="clients share no parameters, so that there is no such model"):
            run(experiment("local", evaluation=Evaluation(what=("average", "cohort"), metric=metric, patience=2)))


@pytest.mark.parametrize(
    "metric", ["clients/loss/worst", "global/accuracy/mean", "global/foo/accuracy", "lambda/2/loss"]
)
def test_a_metric_that_the_first_evaluation_lacks_ends_the_run(metric: str) -> None:
    with pytest.raises(ConfigError, match=f"uses '{metric}', which is never measured; "):
        run(experiment(rounds=3, evaluation=Evaluation(metric=metric, patience=1)))


def test_what_only_some_methods_record_may_be_waited_for() -> None:
    data = classes((40, 40, 40))
    evaluation = Evaluation(metric="as_published/accuracy/mean", patience=2)
    result = run(experiment("superfed_mm", rounds=2, federation=data, evaluation=evaluation))
    assert result.summary["rounds"] == 2


def test_clients_without_a_metric_are_left_out_of_every_interpolations_mean() -> None:
    data = classes((30, 30, 30))
    held_out = data.held_out
    data.test.y  # noqa: B018
    rows = torch.from_numpy(held_out.index[0])
    held_out.arrays.y[rows] = 0  # one class alone: no area under the curve
    evaluation = Evaluation(what=("clients",), metrics=("accuracy", "auroc"))
    record = run(
        experiment("superfed_mm", rounds=2, federation=data, evaluation=evaluation, local=Local(lr=0.1))
    ).history[-1]
    for place in ("lambda/0", "lambda/0.5", "lambda/1", "as_published"):
        assert record[f"{place}/auroc/mean"] is not None
        assert np.isfinite(record[f"{place}/auroc/mean"])


def test_negative_targets_of_losses_that_may_be_negative() -> None:
    def gain(out: Tensor, y: Tensor) -> Any:
        return -out.gather(1, y[:, None]).squeeze(1)

    evaluation = Evaluation(metric="global/loss", target=-0.5)
    run(experiment(methods.make("fedavg").with_loss(loss(gain)), evaluation=evaluation))


def test_a_model_of_pooled_data_is_tested_at_every_client() -> None:
    data = classes((10, 20, 30, 40))
    result = run(experiment("centralised", federation=data, evaluation=Evaluation(what=("clients", "train"))))
    record, held_out = result.history[-1], data.held_out
    assert record["clients/accuracy/clients"] == 4
    scores = [
        result.trained.client(k).evaluate(held_out.client(k).x, held_out.client(k).y)["accuracy"] for k in range(4)
    ]
    assert record["clients/accuracy/mean"] == pytest.approx(np.mean(scores))
    assert record["clients/accuracy/std"] == pytest.approx(np.std(scores))
    assert np.std(scores) > 0


def process_state() -> dict[str, object]:
    """What a user's process may have set, and would miss if a run changed it."""
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "draws": (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "dtype": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "errors": (np.geterr(), list(warnings.filters), sys.excepthook),
        "signals": [signal.getsignal(number) for number in signal.Signals],
        "process": (dict(os.environ), Path.cwd(), list(sys.path), locale.setlocale(locale.LC_ALL), gc.isenabled()),
    }


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_users_process_is_as_it_was(engine: str, tmp_path: Path) -> None:
    before, threads = process_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = process_state()
        fl.run("fedavg", federate("digits", "iid", 4), "mlp", rounds=2, engine=engine, out=tmp_path / "run")
        assert process_state() == expected
    finally:
        torch.set_num_threads(threads)
    assert process_state() == before


LEFT = """
import numpy as np, fedloom as fl

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

fl.run("fedavg", fl.data.federate("digits", "iid", 2), "mlp", rounds=1)
arrays = [np.ones(25_000) for _ in range(2_000)]  # 400 MB, in pieces that glibc takes from the system one by one
full = resident()
del arrays
print(full - resident())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_that_a_user_frees_after_a_run_is_returned_to_the_system() -> None:
    process = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True)
    assert float(process.stdout.split()[-1]) > 300
