"""A deployment in its own time: schedules of simulations, a record that can be played, and nodes that never answer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deploying import Scripted, config, scripted_nodes, simulation

from fedloom.base.errors import CheckpointError, ClientError, ConfigError
from fedloom.experiment.clock import Clock
from fedloom.experiment.federated import RunResult
from fedloom.experiment.rundir import RunDirectory
from fedloom.rounds.exchange import FailureKind
from fedloom_apps.deploy.messages import Order
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.wire import pack, unpack

WORDS = ("clients=5", "cohort=3", "deploy.nodes=5", "rounds=6")


def seconds(client: int, version: int) -> float:
    """Durations from 1 to 4, and a client that is slower."""
    return 1 + np.sin(7.0 * client + 3 * version) ** 2 + (2 if client == 3 else 0)


def assert_same(result: RunResult, reference: RunResult) -> None:
    assert torch.equal(result.snapshot.server.theta, reference.snapshot.server.theta)
    parts = result.snapshot.server.parts
    assert parts.keys() == reference.snapshot.server.parts.keys()
    for place, tree in parts.items():
        for name, value in tree.items():
            assert torch.equal(value, reference.snapshot.server.parts[place][name]), f"{place}/{name}"


def replay(out: Path, *words: str) -> RunResult:
    """The simulation of a deployment on record."""
    rest = [word for word in (*WORDS, *words) if not word.startswith(("schedule", "evaluation.hours"))]
    return simulation(*rest, "devices=none", "schedule=replay", f"schedule.path={out}")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes nodes with the durations above."""
    transports: list[Scripted] = []

    def make(*words: str) -> Scripted:
        transports.append(scripted_nodes(config(*WORDS, *words), tmp_path / "nodes", seconds))
        transports[0].keeps_time(monkeypatch)
        return transports[0]

    yield make
    transports[0].close()


@pytest.mark.parametrize(
    "words",
    [
        ("method=heterofl", "schedule=rounds", "deploy.deadline=9"),
        ("method=term", "schedule=over_select", "schedule.fraction=0.5", "deploy.deadline=9"),
        (
            "method=fedavg",
            "schedule=deadline",
            "schedule.seconds=2.5",
            "deploy.deadline=9",
            "evaluation.what=[global]",
            "evaluation.hours=0.0011",
        ),
        ("method=scaffold", "schedule=buffered", "schedule.k=2", "deploy.deadline=9"),
        ("method=ca2fl", "schedule=semi", "schedule.period=0.7", "deploy.deadline=9"),
        ("method=fedasync", "deploy.deadline=9"),
    ],
    ids=lambda words: words[0],
)
def test_arrivals_of_a_simulated_schedule_give_the_simulated_model(
    words: tuple[str, ...], nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(Recipe.of(config(*WORDS, *words)), nodes(*words), 5, tmp_path / "run")
    timed = lambda self, clients, version: np.array([seconds(c, version) for c in clients.tolist()])  # noqa: E731
    monkeypatch.setattr(Clock, "seconds", timed)
    reference = simulation(*WORDS, *words, "devices=equal")
    assert_same(result, reference)
    for record, expected in zip(result.history, reference.history, strict=True):
        for name in ("global/accuracy", "clock", "staleness/mean", "versions", "late", "time/work", "comm/bytes"):
            assert record.get(name) == pytest.approx(expected.get(name)), name
    monkeypatch.undo()
    assert_same(result, replay(tmp_path / "run", *words))


def unreliable(transport: Scripted) -> None:
    """One node refuses its second order, and the answer of another to its second one is lost."""

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if (name, number) == ("node-0", 2):
            return [pack("answer", {"ticket": unpack(blob).facts["ticket"], "status": "refused", "code": "data"})]
        return [] if (name, number) == ("node-2", 2) else [blob]

    transport.route = route


BUFFERED = ("method=feddyn", "schedule=buffered", "schedule.k=2", "deploy.deadline=6", "rounds=12")


def test_a_deployment_with_failures_is_played_again_bit_for_bit(nodes: Any, tmp_path: Path) -> None:
    transport = nodes(*BUFFERED)
    unreliable(transport)
    result = run(Recipe.of(config(*WORDS, *BUFFERED)), transport, 5, tmp_path / "run")
    assert {(f.client, f.kind) for f in result.failures} == {(0, FailureKind.REFUSED), (2, FailureKind.ABSENT)}
    assert "node-2: it did not answer within 6 s" in str(result.failures)
    rows = RunDirectory(tmp_path / "run").mixing()
    assert rows["late"].sum() == 2
    last_late = rows["round"][rows["late"]].max()
    assert {0, 2} <= set(rows["client"][rows["round"] > last_late])  # their places were free again
    assert_same(result, replay(tmp_path / "run", *BUFFERED))


class Killed(BaseException):
    """What ends a server without a word."""


def test_a_killed_server_asks_again_for_what_was_in_flight(nodes: Any, tmp_path: Path) -> None:
    """Nodes send what they have computed once more; steps go on from the record, which can be played to the end."""
    transport, out, left = nodes(*BUFFERED), tmp_path / "run", [25]
    receive = transport.receive

    def receiving(wait: float) -> Any:
        left[0] -= 1
        if not left[0]:
            raise Killed
        return receive(wait)

    transport.receive = receiving
    recipe = Recipe.of(config(*WORDS, *BUFFERED))
    with pytest.raises(Killed):
        run(recipe, transport, 5, out)
    rounds = len(RunDirectory(out).metrics())
    assert 2 < rounds < 10
    before = {
        name: [Order.read(request.order, 10**9).ticket for request in sent] for name, sent in transport.sent.items()
    }
    for name in transport.nodes:
        transport.restart(name)
    transport.coming, transport.sent = [], {}
    result = run(recipe, transport, 5, out, resume=True)
    assert [record["round"] for record in result.history] == [*range(1, 13)]
    assert all(a["clock"] < b["clock"] for a, b in zip(result.history, result.history[1:], strict=False))
    again = [name for name, sent in transport.sent.items() if Order.read(sent[1].order, 10**9).ticket in before[name]]
    assert len(again) >= 2  # of three at work; the last may have been invited after the checkpoint
    assert not result.failures  # also of those that work on earlier versions
    assert_same(result, replay(out, *BUFFERED))


def test_a_checkpoint_that_names_clients_at_work_that_cannot_have_been_is_refused(nodes: Any, tmp_path: Path) -> None:
    transport, out = nodes(*BUFFERED), tmp_path / "run"
    run(Recipe.of(config(*WORDS, *BUFFERED, "rounds=2")), transport, 5, out)
    path = out / "checkpoint" / "round-000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    about = manifest["facts"]["deploy"]
    client, ticket, version, begin = about["at_work"][0]
    longer = Recipe.of(config(*WORDS, *BUFFERED))
    for change in (
        {"at_work": [[99, ticket, version, begin]]},
        {"at_work": [[client, ticket, 10**6, begin]]},
        {"at_work": [[client, "../x", version, begin]]},
        {"at_work": [[client, ticket, version, "soon"]]},
        {"at_work": 2 * [[client, ticket, version, begin]]},
        {"at_work": [client]},
        {"nodes": {"node-0": 5}},
    ):
        forgery = manifest | {"facts": manifest["facts"] | {"deploy": about | change}}
        seal = hashlib.sha256(json.dumps(forgery, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(forgery | {"sha256": seal}))
        with pytest.raises(CheckpointError, match="round-000002 cannot be used"):
            run(longer, transport, 5, out, resume=True)


SEMI = ("schedule=semi", "schedule.period=0.7")


@pytest.mark.parametrize("schedule", [("schedule=asynchronous",), SEMI], ids=["asynchronous", "semi"])
def test_nodes_that_are_away_are_not_invited_and_nobody_at_all_ends_the_run(
    schedule: tuple[str, ...], nodes: Any
) -> None:
    words = ("method=fedavg", *schedule, "deploy.deadline=6")
    transport = nodes(*words)
    everyone, receive = dict(transport.nodes), transport.receive

    def receiving(wait: float) -> Any:
        assert transport.clock < 60
        if all(len(sent) for sent in transport.sent.values()):  # all have joined
            transport.nodes |= dict.fromkeys(("node-3", "node-4") if transport.clock < 4 else everyone)
        return receive(wait)

    transport.receive = receiving
    with pytest.raises(ClientError, match="no node is at work, and none can be reached"):
        run(Recipe.of(config(*WORDS, *words, "rounds=40")), transport, 5)
    assert {name for name, sent in transport.sent.items() if len(sent) > 1} == {"node-0", "node-1", "node-2"}
    transport.nodes |= everyone


def test_only_refusals_end_the_run(nodes: Any) -> None:
    words = ("schedule=asynchronous", "rounds=9", "deploy.deadline=9")
    transport = nodes(*words)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        facts = {"ticket": unpack(blob).facts["ticket"], "status": "refused", "code": "data"}
        return [pack("answer", facts)] if number else [blob]

    transport.route = route
    with pytest.raises(ClientError, match=r"the last 3 clients failed; the last was .* its data do not fit"):
        run(Recipe.of(config(*WORDS, *words)), transport, 5)
    assert transport.clock < 9, "at once, not after the deadline"


@pytest.mark.parametrize("reply", [{"status": "refused", "code": "quota"}, {"status": "left out", "kind": "diverged"}])
@pytest.mark.parametrize("schedule", [(), SEMI], ids=["asynchronous", "semi"])
def test_a_node_without_an_update_at_once_neither_ends_the_run_nor_uses_up_its_rounds(
    schedule: tuple[str, ...], reply: dict[str, str], nodes: Any, tmp_path: Path
) -> None:
    rounds = 4 if schedule else 12
    words = ("method=fedasync", *schedule, "cohort=5", f"rounds={rounds}", "deploy.deadline=9")
    transport = nodes(*words)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        facts = {"ticket": unpack(blob).facts["ticket"], **reply}
        return [pack("answer", facts)] if number and name == "node-0" else [blob]

    transport.route, transport.seconds = route, lambda client, version: seconds(client, version) if client else 0.01
    result = run(Recipe.of(config(*WORDS, *words)), transport, 5, tmp_path / "run")
    rows, refused = RunDirectory(tmp_path / "run").mixing(), reply["status"] == "refused"
    assert {failure.client for failure in result.failures} == {0}
    assert set(rows["client"][rows["late"]]) == ({0} if refused else set())
    updates = rows["round"][rows["p"] > 0].tolist()
    assert sorted({*updates} if schedule else updates) == [*range(1, rounds + 1)]  # an update in each
    if refused:  # else the node has said what is not so
        assert_same(result, replay(tmp_path / "run", *words))


def test_a_run_in_which_all_diverge_goes_on_to_its_end(nodes: Any) -> None:
    words = ("schedule=asynchronous", "rounds=2", "local.lr=1e12", "deploy.deadline=9")
    result = run(Recipe.of(config(*WORDS, *words)), nodes(*words), 5)
    assert [failure.kind for failure in result.failures] == 2 * [FailureKind.DIVERGED]
    assert result.snapshot.server.theta.isfinite().all()


def test_a_node_that_answers_often_has_one_norm_among_those_of_all(nodes: Any) -> None:
    """Else those of a fast node were the median, and shut out whoever is honest."""
    words = ("method=fedasync", "cohort=5", "rounds=16", "deploy.deadline=9")
    transport = nodes(*words)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        packet = unpack(blob)
        if name != "node-0" or "update" not in packet.tensors:
            return [blob]
        return [pack("answer", packet.facts, packet.tensors | {"update": 1e-6 * packet.tensors["update"]})]

    transport.route, transport.seconds = route, lambda client, version: 1 + 0.01 * client if client else 0.1
    result = run(Recipe.of(config(*WORDS, *words)), transport, 5)
    assert not result.failures


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("schedule=tiers",), "schedule=tiers goes by durations that are known beforehand"),
        (("schedule=replay", "schedule.path=x"), "schedule=replay goes by durations"),
        (("devices=lognormal",), "devices=lognormal is simulated, and nodes have their own"),
        (("selection=by_loss",), "selection=by_loss goes by"),
        (
            ("schedule=buffered", "method.uplink=[clip_noise]", "method.mixing=uniform"),
            "holds for cohorts drawn uniformly",
        ),
        (("schedule=deadline", "schedule.seconds=1", "method.weighting=[inverse_probability]"), "being in time"),
    ],
)
def test_what_does_not_go_with_real_time(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Recipe.of(config(*WORDS, *words))
