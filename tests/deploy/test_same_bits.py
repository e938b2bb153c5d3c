"""A deployment computes what a simulation on the same partition does, to the bit."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
from helpers.deploying import config, in_process, simulation
from helpers.marks import kinds

from fedloom.experiment.federated import RunResult
from fedloom.rounds.exchange import State
from fedloom_apps.deploy.engine import version_in
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.versions import Versions
from fedloom_apps.deploy.wire import unpack

METHODS = ("scaffold", "fedavg", "feddyn", "superfed_mm", "fedper", "aaggff_d", "fedevg", "moon", "fedhen", "ditto",
           "fedgh", "fml", "fedphp", "feddistill", "fedacg")  # fmt: skip
MODELS = {"fedevg": ["model=energy_cnn"], "fedhen": ["model=exit_cnn", "model.channels=[4,4,8]"],
          "feddistill": ["model=several"], "fedacg": ["evaluation.what=[clients]"],
          **{key: ["model.norm=batch", "evaluation.what=[clients]"] for key in ("ditto", "fml")}}  # fmt: skip


def states(result: RunResult, home: Path) -> dict[int, State]:
    """The clients' states at their nodes, in the versions that the server knows."""
    node_states = {}
    (run_folder,) = {path.name for path in home.glob("*/*") if path.is_dir()}
    for client, state in result.snapshot.store:
        versions = Versions(home / f"node-{client}" / run_folder)
        node_states[client] = versions.state(version_in(state))
    return node_states


@pytest.mark.parametrize("method", kinds(METHODS, ("scaffold", "superfed_mm", "aaggff_d", "fedevg", "fedacg")))
def test_the_bits_are_those_of_the_serial_engine(method: str, tmp_path: Path) -> None:
    words = [f"method={method}", "cohort=3", *MODELS.get(method, [])]
    transport = in_process(settings := config(*words), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    reference = simulation(*words)
    assert torch.equal(result.snapshot.server.theta, reference.snapshot.server.theta)
    assert torch.equal(result.snapshot.server.buffers, reference.snapshot.server.buffers)
    metrics = (
        {k: v for k, v in run_result.history[-1].items() if k.startswith("clients/") and not k.endswith("/pooled")}
        for run_result in (result, reference)
    )  # predictions, of which metrics over all samples are, stay at the nodes
    assert next(metrics) == pytest.approx(next(metrics), rel=1e-6)
    for place, tree in reference.snapshot.server.parts.items():
        for name, value in tree.items():
            assert torch.equal(result.snapshot.server.parts[place][name], value), f"{place}/{name}"
    node_states = states(result, tmp_path / "state")
    assert node_states.keys() == {client for client, _ in reference.snapshot.store}
    for client, state in reference.snapshot.store:
        for place, tree in state.items():
            for name, value in tree.items():
                assert torch.equal(node_states[client][place][name], value), f"client {client}: {place}/{name}"
    transport.close()


def test_a_node_with_another_number_of_threads_is_named_and_only_its_update_rounds_differently(tmp_path: Path) -> None:
    words = ["method=fedavg", "rounds=1", "model.hidden=[256]"]
    transport = in_process(settings := config(*words), tmp_path)
    answers: dict[str, bytes] = {}
    transport.route = lambda name, number, blob: [answers.setdefault(f"{name} {number}", blob)]
    node = transport.nodes["node-1"]
    assert node is not None
    answer = node.answer

    def threaded(*message: bytes) -> bytes:
        torch.set_num_threads(2)
        try:
            return answer(*message)
        finally:
            torch.set_num_threads(1)

    node.answer = threaded  # type: ignore[method-assign]
    lines: list[str] = []
    result = run(Recipe.of(settings), transport, 4, tell=lines.append)
    transport.close()
    one_thread = in_process(settings, tmp_path / "one thread")
    alone: dict[str, bytes] = {}
    one_thread.route = lambda name, number, blob: [alone.setdefault(f"{name} {number}", blob)]
    reference = run(Recipe.of(settings), one_thread, 4)
    one_thread.close()
    remarks = [sentence.partition("; ")[2] for sentence in lines if " joined with " in sentence]
    assert remarks == ["", "it computes with 2 threads and rounds differently", "", ""]
    for client in range(4):
        update, expected = (unpack(blobs[f"node-{client} 1"]).tensors["update"] for blobs in (answers, alone))
        assert torch.equal(update, expected) or client == 1
        torch.testing.assert_close(update, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        result.snapshot.server.theta, reference.snapshot.server.theta, rtol=0, atol=1e-6
    )  # fmt: skip


@pytest.mark.parametrize("noise_at", ["server", "client"])
def test_a_private_deployment_differs_from_a_simulation_in_its_secret_seeds_alone(
    noise_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["clients=8", "participation=0.5", "deploy.nodes=8", "method.mixing=uniform", "method.uplink=[clip_noise]",
             f"method.uplink.clip_noise.noise_at={noise_at}", "method.uplink.clip_noise.noise=1.0"]  # fmt: skip
    reference = simulation(*words).snapshot.server.theta
    thetas = {}
    for seeds in ("secret", "public"):
        if seeds == "public":
            monkeypatch.setattr(secrets, "randbits", lambda bits: 0)  # the experiment's seed
        transport = in_process(settings := config(*words), tmp_path / seeds)
        thetas[seeds] = run(Recipe.of(settings), transport, 8).snapshot.server.theta
        transport.close()
    assert torch.equal(thetas["public"], reference)
    assert torch.isclose(thetas["secret"], reference).double().mean() < 0.01
