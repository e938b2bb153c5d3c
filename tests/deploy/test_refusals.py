"""Unsupported deployments are refused by name before any node is contacted; a node sends only what was agreed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.deploying import config, in_process, simulation

from fedloom.base.errors import CheckpointError, ClientError, ConfigError, FedLoomError
from fedloom.base.rng import stream
from fedloom.core.local import draw_cohort
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment.rundir import RunDirectory
from fedloom_apps.deploy.messages import LOSSES, VALIDATION_LOSSES, Order
from fedloom_apps.deploy.server import DeployTask, Recipe, Roster, assemble, run
from fedloom_apps.deploy.wire import pack, unpack


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["method=centralised"], "method 'centralised' trains on the pooled data of all clients"),
        (["method=gossip"], "topology 'random_pairs' has several models, and a deployment sends one"),
        (["evaluation.what=[average]"], "evaluation.what=average needs every client's own model"),
        (["evaluation.what=[train]"], "evaluation.what=train measures on all training data"),
        (["method.uplink=[secure_sum]", "method.mixing=uniform"], "uplink 'secure_sum' draws its masks from"),
        (["method.uplink=[clip_noise]", "method.mixing=krum"], "mixing 'krum' needs every client's own upload"),
        (["local.dp_clip=1.0", "evaluation.what=[received]"], "the losses of their training samples, which no noise"),
        (
            ["method=afl", "participation=0.5"],
            "mixing 'afl' needs every client in every round, but the cohort holds 2 of",
        ),
        (["attack=sign_flip"], "attack is for simulations"),
        (["drop_rate=0.1"], "drop_rate is for simulations"),
        (["method=fedmd"], "objective 'consensus' learns from unlabelled inputs at the server, which is not deployed"),
        (["method=feddisco"], "looks at the classes of clients, which nodes do not send"),
        (["local.stragglers=0.5"], "local.stragglers is for simulations"),
        (["model=exit_cnn", "model.channels=[4,8]"], "needs an exit between its 2 convolutions"),
        (["deploy.inputs=[3]"], "inputs and classes belong together"),
        (["deploy.quorum=9"], "quorum cannot exceed nodes"),
    ],
)
def test_refused_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(FedLoomError, match=sentence):
        Recipe.of(config(*words))


@pytest.mark.parametrize("method", ["fedper", "superfed_mm"])
def test_clients_measure_what_a_simulation_does(method: str, tmp_path: Path) -> None:
    words = [f"method={method}", "rounds=2", "evaluation.what=[clients,global]", "validation=0.1"]
    transport = in_process(settings := config(*words), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    reference = simulation(*words)
    for record, expected in zip(result.history, reference.history, strict=True):
        for key in ("global/accuracy", "clients/accuracy/mean", "clients/loss/mean", "clients/accuracy/worst10"):
            if key in expected:
                assert record[key] == pytest.approx(expected[key], abs=1e-6), key


def test_nodes_know_losses_on_validation_samples_and_on_training_samples(tmp_path: Path) -> None:
    words = ["method=term", "method.response=validation", "rounds=2", "evaluation.what=[received]", "validation=0.2"]
    transport = in_process(settings := config(*words), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    reference = simulation(*words)
    assert torch.equal(result.snapshot.server.theta, reference.snapshot.server.theta)
    for record, expected in zip(result.history, reference.history, strict=True):
        for key in ("mixing/objective", "mixing/validation_objective"):
            assert record[key] == expected[key], key
    assert result.history[1]["mixing/objective"] != result.history[1]["mixing/validation_objective"]


def test_noise_of_private_uplinks_is_not_that_of_the_public_seed(tmp_path: Path) -> None:
    """The seed does not give away a node's noise, and the same order again draws no other."""
    words = ["method.uplink=[clip_noise]", "method.uplink.clip_noise.noise_at=client", "rounds=1",
             "method.uplink.clip_noise.noise=10.0"]  # fmt: skip
    transport = in_process(settings := config(*words), tmp_path)
    answers: dict[str, bytes] = {}
    transport.route = lambda name, number, blob: [answers.setdefault(name, blob)] if number else [blob]
    run(Recipe.of(settings), transport, 4)
    for client in range(4):
        name = f"node-{client}"
        update = unpack(answers[name]).tensors["update"]
        public = stream(0, "uplink.0", 0, client).standard_normal(tuple(update.shape))
        assert abs(np.corrcoef(update.numpy(), public)[0, 1]) < 0.2
        node = transport.nodes[name]
        assert node is not None
        assert node.answer(*transport.sent[name][-1]) == answers[name]
    transport.close()


def test_noise_and_samples_of_private_examples_are_not_those_of_the_public_seed(tmp_path: Path) -> None:
    """Two deployments draw other noise, no simulation draws it too, and the training loss stays at the node."""
    words = ["local.dp_clip=1.0", "local.dp_noise=5.0", "local.poisson=true", "rounds=1"]
    ends, answers = [], []
    for folder in ("one", "two"):
        transport = in_process(settings := config(*words), tmp_path / folder)
        transport.route = lambda name, number, blob: [answers.append(unpack(blob).facts) or blob]  # type: ignore[func-returns-value]
        ends.append(run(Recipe.of(settings), transport, 4).snapshot.server.theta)
        transport.close()
    assert not torch.equal(*ends)
    assert not any(torch.equal(end, simulation(*words).snapshot.server.theta) for end in ends)
    assert len([facts for facts in answers if facts["status"] == "done"]) == 8
    assert not any("loss" in facts for facts in answers)


LOCAL_NOISE = ("method.uplink=[clip_noise]", "method.uplink.clip_noise.noise_at=client")


@pytest.mark.parametrize("do", [LOSSES, VALIDATION_LOSSES])
def test_a_node_of_a_private_run_sends_no_loss_whoever_asks(do: str, tmp_path: Path) -> None:
    transport = in_process(settings := config(*LOCAL_NOISE, "rounds=1", "validation=0.2"), tmp_path)
    run(Recipe.of(settings), transport, 4)
    node, order, broadcast = transport.nodes["node-0"], *transport.sent["node-0"][-1]
    assert node is not None
    loss_order = replace(Order.read(order, 10**6), ticket=32 * "0", do=(do,))
    facts = unpack(node.answer(loss_order.packed(), broadcast)).facts
    transport.close()
    assert facts["status"] == "refused"
    assert facts["code"] == "uncovered"
    assert "loss_received" not in facts


def test_a_node_of_a_private_run_whose_work_diverges_sends_noise_alone(tmp_path: Path) -> None:
    """That its update was not finite is a bit that no noise covers; nor does it send a loss."""
    words = (*LOCAL_NOISE, "rounds=1", "local.steps=4", "local.lr=1e12")
    answers, transport = [], in_process(settings := config(*words), tmp_path)
    transport.route = lambda name, number, blob: [answers.append(unpack(blob).facts) or blob]  # type: ignore[func-returns-value]
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    assert not result.failures
    assert [facts["status"] for facts in answers] == ["joined"] * 4 + ["done"] * 4
    assert not any("loss" in facts for facts in answers)
    update = result.snapshot.server.theta - simulation("rounds=1", "local.lr=1e-9").snapshot.server.theta
    assert 0.2 < float(update.std()) < 3  # of noise on zeros


def test_losses_of_received_models_leave_client_states_alone(tmp_path: Path) -> None:
    words = ["method=scaffold", "evaluation.what=[clients,received]", "rounds=3"]
    transport = in_process(settings := config(*words), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    reference = simulation(*words)
    assert torch.equal(result.snapshot.server.theta, reference.snapshot.server.theta)
    assert [r["mixing/objective"] for r in result.history] == [r["mixing/objective"] for r in reference.history]


@pytest.mark.parametrize(
    ("slot", "kind", "sentence"),
    [
        ("update", torch.int64, "the update in its answer has another shape or type"),
        ("uploads|drift", torch.float8_e4m3fn, "in its answer has another shape or type than clients upload"),
    ],
)
def test_a_node_that_sends_another_type_is_left_out(
    slot: str, kind: torch.dtype, sentence: str, tmp_path: Path
) -> None:
    transport = in_process(settings := config("method=scaffold", "rounds=1"), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name != "node-0" or not number:
            return [blob]
        facts, tensors = unpack(blob).facts, dict(unpack(blob).tensors)
        place = next(key for key in tensors if key.startswith(slot))
        return [pack("answer", facts, tensors | {place: tensors[place].to(kind)})]

    transport.route = route
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    (failure,) = result.failures
    assert (failure.client, failure.kind.value) == (0, "refused")
    assert sentence in failure.reason


@pytest.mark.parametrize("words", [("participation=1.0",), ("participation=1.0", "clients=1", "deploy.nodes=1")])
def test_the_shapes_of_uploads_are_known_without_a_majority(words: tuple[str, ...], tmp_path: Path) -> None:
    """The first of the cohort, or the only one, sends a control variate of another shape."""
    settings = config("method=scaffold", "rounds=1", *words)
    transport, nodes = in_process(settings, tmp_path), int(settings.values["clients"])

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name != "node-0" or not number:
            return [blob]
        facts, tensors = unpack(blob).facts, dict(unpack(blob).tensors)
        place = next(key for key in tensors if key.startswith("uploads|drift"))
        return [pack("answer", facts, tensors | {place: torch.zeros(1)})]

    transport.route = route
    if nodes == 1:
        with pytest.raises(ClientError, match="0 of 1 nodes gave a usable answer"):
            run(Recipe.of(settings), transport, nodes)
    else:
        result = run(Recipe.of(settings), transport, nodes)
        assert [failure.client for failure in result.failures] == [0]
    transport.close()


def test_a_node_may_not_declare_more_samples_than_agreed(tmp_path: Path) -> None:
    transport = in_process(config("rounds=1"), tmp_path)
    lines: list[str] = []
    terms = config("rounds=1", "deploy.most_samples=1", "deploy.deadline=0.1")
    transport.nodes = {"node-0": transport.nodes["node-0"]}

    def tell(sentence: str) -> None:
        lines.append(sentence)
        if "declares" in sentence:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assemble(Recipe.of(terms), transport, 1, tell)
    transport.close()
    assert "training samples, more than deploy.most_samples=1" in lines[-1]


def test_rounds_that_are_begun_again_cost_privacy_and_cohorts_are_secret(tmp_path: Path) -> None:
    transport = in_process(
        settings := config("rounds=2", "cohort=2", "local.dp_clip=1.0", "local.dp_noise=1.0"), tmp_path / "nodes"
    )
    recipe = Recipe.of(settings)
    (tmp_path / "run").mkdir()
    roster = Roster("0" * 16, dict.fromkeys(transport.nodes, (5, 0, 0)))
    tasks = [DeployTask(recipe, roster, transport, tmp_path / "run") for _ in range(2)]
    transport.close()
    first, again = tasks
    first._count_start()
    assert first.repeated == 0
    again._count_start()  # the first one died before its round was over
    assert again.repeated == 1
    again.round = 1
    again._count_start()
    assert again.repeated == 1
    (tmp_path / "run" / "rounds_begun").write_text("")  # cut short by other hands
    with pytest.raises(CheckpointError, match=r"rounds_begun, which counts .* continue with resume="):
        again._count_start()
    cohorts = [[task._cohort(t, 2).tolist() for t in range(20)] for task in tasks]
    public = [draw_cohort(4, 2, 0, t).tolist() for t in range(20)]
    assert public not in cohorts
    assert cohorts[0] != cohorts[1]


def test_rounds_that_are_repeated_draw_other_cohorts(tmp_path: Path) -> None:
    """Two rounds of the same cohort would cost more privacy than two of cohorts drawn for each, as they are counted."""
    words = ("rounds=8", "cohort=2", "method.uplink=[clip_noise]", "method.mixing=uniform", "local.steps=1")
    transport = in_process(settings := config(*words), tmp_path / "nodes")
    run(Recipe.of(settings), transport, 4, tmp_path / "run", checkpoint_every=1, keep=9)
    before = RunDirectory(tmp_path / "run").mixing()
    first = checkpoints.available(RunDirectory(tmp_path / "run").checkpoints)[0]
    result = run(Recipe.of(settings), transport, 4, tmp_path / "run", resume=first)
    transport.close()
    assert result.history[-1]["round"] == 8
    after = RunDirectory(tmp_path / "run").mixing()
    assert len(before["client"]) == len(after["client"]) == 16
    assert before["client"].tolist() != after["client"].tolist()


def test_a_node_that_answers_nonsense_is_left_out_by_name(tmp_path: Path) -> None:
    words = ["method=feddyn", "rounds=1", "participation=1.0"]
    transport = in_process(settings := config(*words), tmp_path)

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
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    reasons = {f.client: (f.kind.value, f.reason) for f in result.failures}
    assert 0 not in reasons
    assert reasons[1] == ("refused", "node-1: its answer cannot be read: a message of 7 bytes is not one of FedLoom")
    assert "node-2: the update in its answer has another shape or type than the model" in reasons[2][1]
    assert "node-3: its answer has values that no model has, or that are not finite" in reasons[3][1]
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
        {"values": {"accuracy": 0.5}},
        {"values": {"loss": 1.0}},
    ],
)
def test_a_node_that_measures_nonsense_spoils_nobody_elses_numbers(wrong: dict[str, object], tmp_path: Path) -> None:
    words = ["rounds=1", "evaluation.what=[clients]"]
    transport = in_process(settings := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name == "node-0" and number == 2:  # after it joined and worked
            return [pack("answer", unpack(blob).facts | wrong)]
        return [blob]

    transport.route = route
    with pytest.warns(UserWarning, match="1 of 4 nodes refused or failed to evaluate the model; node-0: "):
        result = run(Recipe.of(settings), transport, 4, tmp_path / "out")
    transport.close()
    table = RunDirectory(tmp_path / "out").clients()
    assert table["client"].tolist() == [1, 2, 3]
    assert set(table) == {"round", "client", "name", "n", "accuracy", "loss"}
    assert result.history[0]["clients/accuracy/mean"] == pytest.approx(table["accuracy"].mean())


def test_counts_beyond_all_bounds_and_terminal_codes_are_not_passed_on(tmp_path: Path) -> None:
    words = ["method=q_ffl", "rounds=1"]
    transport = in_process(settings := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        facts, tensors = unpack(blob).facts, unpack(blob).tensors
        if name == "node-0" and number:
            facts |= {"loss_received": 10**400}
        if name == "node-1" and number:
            facts |= {"sent": [10**30, 10**30]}
        if name == "node-2" and number:
            facts, tensors = facts | {"status": "refused", "code": "no\n\x1b[2Jmemory."}, {}
        return [pack("answer", facts, tensors)]

    transport.route = route
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    assert {f.client: f.kind.value for f in result.failures} == {0: "refused", 2: "refused"}
    assert next(f.reason for f in result.failures if f.client == 2) == "node-2: it gave no answer to the order"
    assert result.history[0]["comm/bytes"] < 10**9


def test_what_the_number_of_nodes_does_not_suit_is_refused_before_they_are_asked(tmp_path: Path) -> None:
    transport = in_process(config(), tmp_path)
    unsaid = config("method=afl", "participation=0.5", "deploy.nodes=null")
    with pytest.raises(ConfigError, match="the cohort holds 2 of 4; set participation=1"):
        run(Recipe.of(unsaid), transport, 4)
    transport.close()
    assert not transport.sent


def test_missing_flower_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom_apps.deploy.flower import require

    monkeypatch.setitem(sys.modules, "flwr", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'fedloom\[flower\]'"):
        require()
