"""What a deployment cannot do is refused by name before any node is asked; what leaves a node is what was agreed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.deploying import config, in_process, simulated

from fedloom.core.errors import ConfigError, FedLoomError
from fedloom.core.rng import stream
from fedloom.deploy.server import Recipe, run
from fedloom.deploy.wire import pack, unpack
from fedloom.experiment.rundir import RunDirectory


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["method=centralised"], "method 'centralised' trains on the pooled data of all clients"),
        (["method=ifca"], "with personal 'clustered' clients choose among several models, which is not deployed"),
        (["evaluation.what=[average]"], "evaluation.what=average needs every client's own model"),
        (["evaluation.what=[train]"], "evaluation.what=train measures on all training data"),
        (["method.uplink=[secure_sum]", "method.mixing=uniform"], "uplink 'secure_sum' draws its masks from"),
        (["method.uplink=[clip_noise]", "method.mixing=krum"], "mixing 'krum' needs every client's own upload"),
        (["drop_rate=0.1"], "drop_rate is for simulations"),
        (["model=exit_cnn", "model.channels=[4,8]"], "needs an exit between its 2 convolutions"),
        (["deploy.inputs=[3]"], "inputs and classes belong together"),
        (["deploy.quorum=9"], "quorum cannot exceed nodes"),
    ],
)
def test_refused_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(FedLoomError, match=sentence):
        Recipe.of(config(*words))


@pytest.mark.parametrize("method", ["fedper", pytest.param("superfed_mm", marks=pytest.mark.slow)])
def test_clients_measure_what_a_simulation_does(method: str, tmp_path: Path) -> None:
    words = [f"method={method}", "rounds=2", "evaluation.what=[clients,global]", "validation=0.1"]
    transport = in_process(made := config(*words), tmp_path)
    result = run(Recipe.of(made), transport, 4)
    transport.close()
    reference = simulated(*words)
    for mine, theirs in zip(result.history, reference.history, strict=True):
        for key in ("global/accuracy", "clients/accuracy/mean", "clients/loss/mean", "clients/accuracy/worst10"):
            if key in theirs:
                assert mine[key] == pytest.approx(theirs[key], abs=1e-6), key


def test_nodes_know_losses_on_validation_samples_and_on_training_samples(tmp_path: Path) -> None:
    words = ["method=term", "method.response=validation", "rounds=2", "evaluation.what=[received]", "validation=0.2"]
    transport = in_process(made := config(*words), tmp_path)
    result = run(Recipe.of(made), transport, 4)
    transport.close()
    reference = simulated(*words)
    assert torch.equal(result.snapshot.server.theta, reference.snapshot.server.theta)
    for mine, theirs in zip(result.history, reference.history, strict=True):
        for key in ("mixing/objective", "mixing/held_out_objective"):
            assert mine[key] == theirs[key], key
    assert result.history[1]["mixing/objective"] != result.history[1]["mixing/held_out_objective"]


def test_noise_of_private_uplinks_is_not_that_of_the_public_seed(tmp_path: Path) -> None:
    """The seed does not give away a node's noise, and the same order again draws no other."""
    words = ["method.uplink=[clip_noise]", "method.uplink.clip_noise.noise_at=client", "rounds=1",
             "method.uplink.clip_noise.noise=10.0"]  # fmt: skip
    transport = in_process(made := config(*words), tmp_path)
    answers: dict[str, bytes] = {}
    transport.route = lambda name, number, blob: [answers.setdefault(name, blob)] if number else [blob]
    run(Recipe.of(made), transport, 4)
    for client in range(4):
        name = f"node-{client}"
        update = unpack(answers[name]).tensors["update"]
        public = stream(0, "uplink.0", 0, client).standard_normal(tuple(update.shape))
        assert abs(np.corrcoef(update.numpy(), public)[0, 1]) < 0.2
        node = transport.nodes[name]
        assert node is not None
        assert node.answer(*transport.sent[name][-1]) == answers[name]
    transport.close()


def test_a_node_that_answers_nonsense_is_left_out_by_name(tmp_path: Path) -> None:
    words = ["method=feddyn", "rounds=1", "participation=1.0"]
    transport = in_process(made := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if number == 0:
            return [blob]
        facts, tensors = unpack(blob).facts, unpack(blob).tensors
        return {
            "node-0": [blob],
            "node-1": [b"garbage"],
            "node-2": [pack("answer", facts, tensors | {"update": tensors["update"][:3]})],
            "node-3": [pack("answer", facts, tensors | {"update": tensors["update"] * float("nan")})],
        }[name]

    transport.route = route
    result = run(Recipe.of(made), transport, 4)
    transport.close()
    reasons = {f.client: (f.kind.value, f.reason) for f in result.failures}
    assert reasons[1] == ("refused", "node-1: its answer cannot be read: a message of 7 bytes is not one of FedLoom")
    assert "node-2: the update in its answer has another shape or type than the model" in reasons[2][1]
    assert "node-3: its answer is not finite" in reasons[3][1]
    assert torch.isfinite(result.snapshot.server.theta).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 10**30},
        {"n": -1},
        {"values": {"loss": 10**400, "accuracy": 0.5}},
        {"values": {"loss": 1.0, "accuracy": 0.5, "client": 7.0}},
        {"values": {"loss": 1.0, "mine": 2.0}},
        {"values": {"loss": "low", "accuracy": 0.5}},
    ],
)
def test_a_node_that_measures_nonsense_spoils_nobody_elses_numbers(wrong: dict[str, object], tmp_path: Path) -> None:
    words = ["rounds=1", "evaluation.what=[clients]"]
    transport = in_process(made := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name == "node-0" and number == 2:  # after it joined and worked
            return [pack("answer", unpack(blob).facts | wrong)]
        return [blob]

    transport.route = route
    result = run(Recipe.of(made), transport, 4, tmp_path / "out")
    transport.close()
    table = RunDirectory(tmp_path / "out").clients()
    assert table["client"].tolist() == [1, 2, 3]
    assert set(table) == {"round", "client", "n", "accuracy", "loss"}
    assert result.history[0]["clients/accuracy/mean"] == pytest.approx(table["accuracy"].mean())


def test_counts_beyond_all_bounds_and_terminal_codes_are_not_passed_on(tmp_path: Path) -> None:
    words = ["method=q_ffl", "rounds=1"]
    transport = in_process(made := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        facts, tensors = unpack(blob).facts, unpack(blob).tensors
        if name == "node-0" and number:
            facts |= {"loss_received": 10**400}
        if name == "node-1" and number:
            facts |= {"sent": [10**30, 10**30]}
        if name == "node-2" and number:
            facts, tensors = facts | {"status": "refused", "reason": "no\n\x1b[2Jmemory."}, {}
        return [pack("answer", facts, tensors)]

    transport.route = route
    result = run(Recipe.of(made), transport, 4)
    transport.close()
    assert {f.client: f.kind.value for f in result.failures} == {0: "diverged", 2: "refused"}
    assert next(f.reason for f in result.failures if f.client == 2) == "node-2: no [2Jmemory"
    assert result.history[0]["comm/bytes"] < 10**9


def test_missing_flower_is_named() -> None:
    from fedloom.deploy.flower import require

    try:
        import flwr  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'fedloom\[flower\]'"):
            require()
