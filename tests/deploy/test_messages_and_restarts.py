"""Messages arrive late, twice or never, nodes and servers restart: only what the server has accepted counts."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.deploying import InProcess, config, in_process, simulation
from safetensors.torch import load as load_tensors

from fedloom.base.errors import CheckpointError, ClientError
from fedloom.base.rng import stream
from fedloom.experiment import atomic
from fedloom.experiment.federated import RunResult
from fedloom.rounds.exchange import FailureKind
from fedloom_apps.deploy import engine, node, server
from fedloom_apps.deploy.messages import Delivered, read_broadcast
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.versions import Versions
from fedloom_apps.deploy.wire import pack, unpack

WORDS = ("method=scaffold", "rounds=4")


def deployed(folder: Path, *words: str, **options: object) -> tuple[RunResult, InProcess]:
    transport = in_process(settings := config(*WORDS, *words), folder)
    return run(Recipe.of(settings), transport, 4, **options), transport  # type: ignore[arg-type]


def assert_same(a: RunResult, b: RunResult) -> None:
    assert torch.equal(a.snapshot.server.theta, b.snapshot.server.theta)
    assert torch.equal(a.snapshot.server.parts["drift"]["c"], b.snapshot.server.parts["drift"]["c"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    result, transport = deployed(tmp_path_factory.mktemp("undisturbed"))
    transport.close()
    return result


def run_and_close(transport: InProcess, words: Sequence[str] = (), **options: object) -> RunResult:
    """A run with nodes whose route or presence was changed."""
    result = run(Recipe.of(config(*WORDS, *words)), transport, 4, **options)  # type: ignore[arg-type]
    transport.close()
    return result


def test_doubled_answers_count_once(undisturbed: RunResult, tmp_path: Path) -> None:
    transport = in_process(config(*WORDS), tmp_path)
    transport.route = lambda name, number, blob: [blob, blob]
    result = run_and_close(transport)
    assert_same(result, undisturbed)
    assert [record["deploy/late"] for record in result.history] == [4, 4, 4, 4]


@pytest.mark.parametrize("method", ["scaffold", "term"])  # the losses of the latter come with the work
def test_an_answer_is_read_once(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clients, read = [], engine.read_result
    monkeypatch.setattr(engine, "read_result", lambda client, *rest: clients.append(client) or read(client, *rest))
    _, transport = deployed(tmp_path, f"method={method}", "rounds=2")
    transport.close()
    assert sorted(clients) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_lost_answer_and_a_late_one_leave_no_trace(tmp_path: Path) -> None:
    """A node whose answer was not accepted continues from its previous state, as if it had been offline."""
    late_answers: list[bytes] = []

    def lost(name: str, number: int, blob: bytes) -> list[bytes]:
        return [] if (name, number) == ("node-2", 2) else [blob]  # number 0 is the join

    def late(name: str, number: int, blob: bytes) -> list[bytes]:
        if (name, number) == ("node-2", 2):
            late_answers.append(blob)
            return []
        return [late_answers.pop(), blob] if late_answers and name == "node-2" else [blob]

    results = []
    for route in (lost, late):
        transport = in_process(config(*WORDS), tmp_path / route.__name__)
        transport.route = route
        results.append(run_and_close(transport))
    transport = in_process(config(*WORDS), tmp_path / "offline")
    node = transport.nodes["node-2"]

    def offline(name: str, number: int, blob: bytes) -> list[bytes]:
        if name == "node-3" and number in (1, 2):  # it answers last in round 1, and in round 2
            transport.nodes["node-2"] = None if number == 1 else node
        return [blob]

    transport.route = offline
    results.append(run_and_close(transport))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    assert [f.client for f in results[0].failures] == [f.client for f in results[2].failures] == [2]
    assert "node-2: it did not answer within 0.3 s" in str(results[0].failures[0])
    assert "node-2: it is offline" in str(results[2].failures[0])
    assert [record["deploy/late"] for record in results[1].history] == [0, 0, 1, 0]


@pytest.mark.exhaustive
def test_nodes_killed_before_they_answer_send_the_same_answer_again(undisturbed: RunResult, tmp_path: Path) -> None:
    transport = in_process(config(*WORDS, "deploy.deadline=60"), tmp_path)
    killed: set[tuple[str, int]] = set()

    def killing(name: str, number: int, blob: bytes) -> list[bytes]:
        if number in (1, 3) and (name, number) not in killed and name != "node-0":
            killed.add((name, number))
            transport.restart(name)
            return []
        return [blob]

    transport.route = killing
    assert_same(run_and_close(transport, ["deploy.deadline=60"]), undisturbed)
    assert len(killed) == 6


def test_half_files_of_a_killed_node_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    _, transport = deployed(tmp_path, "rounds=1", out=out)
    halves = [folder / f".000000000-{'0' * 32}.pending.part" for folder in (tmp_path / "state").glob("*/*/")]
    assert len(halves) == 4
    for path in halves:
        path.write_bytes(b"half")
    run(Recipe.of(config(*WORDS, "rounds=2")), transport, 4, out=out, resume=True)
    transport.close()
    assert not [*tmp_path.rglob(".*.part")]


def test_a_log_without_room_changes_no_answer(
    undisturbed: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(node, "append", full)
    result, transport = deployed(tmp_path)
    transport.close()
    assert_same(result, undisturbed)


def test_a_server_goes_on_from_any_of_its_checkpoints(undisturbed: RunResult, tmp_path: Path) -> None:
    """Nodes are ahead of a server that goes back; the states of what it repeats are not those of what it forgot."""
    out = tmp_path / "run"
    _, transport = deployed(tmp_path, "rounds=3", out=out, keep=3)
    for start in (out / "checkpoint" / "round-000001", True):
        for name in transport.nodes:
            transport.restart(name)
        result = run(Recipe.of(config(*WORDS)), transport, 4, out=out, resume=start, keep=3)
        assert_same(result, undisturbed)
    transport.close()


def test_a_lost_state_folder_is_named(tmp_path: Path) -> None:
    _, transport = deployed(tmp_path, "rounds=1", out=tmp_path / "run")
    for path in (tmp_path / "state" / "node-1").glob("*/*"):
        path.unlink()
    result = run(Recipe.of(config(*WORDS, "rounds=2")), transport, 4, out=tmp_path / "run", resume=True)
    transport.close()
    (failure,) = result.failures
    assert (failure.client, failure.kind) == (1, "refused")
    assert "node-1: a stored state is missing" in failure.reason


def test_a_state_of_another_shape_is_refused_by_its_node(tmp_path: Path) -> None:
    _, transport = deployed(tmp_path, "rounds=1", out=tmp_path / "run")
    (path,) = (tmp_path / "state" / "node-1").glob("*/*.pending")
    path.write_bytes(atomic.as_file({key: t[:5] for key, t in load_tensors(path.read_bytes()).items()}))
    result = run(Recipe.of(config(*WORDS, "rounds=2")), transport, 4, out=tmp_path / "run", resume=True)
    transport.close()
    (failure,) = result.failures
    assert failure.client == 1
    assert "node-1: a stored state is missing or damaged" in failure.reason
    assert "in another shape or type than this method" in (tmp_path / "state" / "node-1" / "node.log").read_text()


def test_too_few_answers_stop_the_run_and_it_goes_on_later(undisturbed: RunResult, tmp_path: Path) -> None:
    out = tmp_path / "run"
    transport = in_process(config(*WORDS), tmp_path)
    transport.route = lambda name, number, blob: [] if number == 2 and name in ("node-1", "node-3") else [blob]
    with pytest.raises(ClientError, match=r"round 2: 2 of 4 nodes gave a usable answer .* fewer than deploy.quorum=3"):
        run(Recipe.of(config(*WORDS, "deploy.quorum=3")), transport, 4, out=out)
    result = run(Recipe.of(config(*WORDS, "deploy.quorum=3")), transport, 4, out=out, resume=True)
    transport.close()
    assert_same(result, undisturbed)


def test_a_refusal_is_no_update_for_the_quorum_and_stops_nobody_else(tmp_path: Path) -> None:
    """Two of four refuse: two usable answers are a quorum of two, and no quorum of three."""

    def refusing(name: str, number: int, blob: bytes) -> list[bytes]:
        if number != 2 or name not in ("node-1", "node-3"):
            return [blob]
        says = {"status": "refused", "code": "data"} if name == "node-1" else {"status": "done"}
        return [pack("answer", {"ticket": unpack(blob).facts["ticket"], **says})]  # without an update

    transports = [in_process(config(*WORDS), tmp_path / name) for name in ("two", "three")]
    for transport in transports:
        transport.route = refusing
    failures = run_and_close(transports[0], ["deploy.quorum=2"]).failures
    assert [(f.round, f.client, f.kind) for f in failures] == [(1, 1, "refused"), (1, 3, "refused")]
    with pytest.raises(ClientError, match=r"2 of 4 nodes gave a usable .*quorum=3 .*1: its data do not fit .*; "):
        run_and_close(transports[1], ["deploy.quorum=3"])
    transports[1].close()


def test_a_quorum_that_refusals_leave_open_is_waited_for(tmp_path: Path) -> None:
    """One refuses, one comes back only after the others have answered: a quorum of three has its update."""
    transport = in_process(config(*WORDS, "rounds=1", "deploy.deadline=20"), tmp_path)
    away = transport.nodes["node-3"]

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if number == 0 and name == "node-3":
            transport.nodes[name] = None  # it has joined, and is offline when the round begins
        if number != 1 or name != "node-1":
            return [blob]
        return [pack("answer", {"ticket": unpack(blob).facts["ticket"], "status": "refused", "code": "state"})]

    receive = transport.receive

    def receiving(seconds: float) -> list[Delivered]:
        arrived = receive(seconds)
        if not arrived and transport.nodes["node-3"] is None:
            transport.nodes["node-3"] = away
        return arrived

    transport.route, transport.receive = route, receiving  # type: ignore[method-assign]
    result = run_and_close(transport, ["rounds=1", "deploy.deadline=20", "deploy.quorum=3"])
    assert [f.client for f in result.failures] == [1]


def test_work_that_diverged_counts_as_an_answer(tmp_path: Path) -> None:
    """As in a simulation: the round leaves the model as it was, and the next one begins."""
    words = ("method=fedavg", "rounds=2", "local.lr=1e12", "deploy.quorum=4")
    transport = in_process(settings := config(*words), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    assert [(f.round, f.kind) for f in result.failures] == [(t, "diverged") for t in (0, 1) for _ in range(4)]
    assert torch.equal(result.snapshot.server.theta, simulation(*words[:-1]).snapshot.server.theta)


def test_a_finished_run_needs_no_nodes_to_be_continued(undisturbed: RunResult, tmp_path: Path) -> None:
    _, transport = deployed(tmp_path, out=tmp_path / "run")
    transport.close()
    nobody = InProcess(dict.fromkeys(transport.nodes))
    assert_same(run_and_close(nobody, out=tmp_path / "run", resume=True), undisturbed)


def test_who_is_not_there_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has joined while others are waited for; who stops to answer, and begins again; who is no node of the run."""
    monkeypatch.setattr(server, "REMIND", 0.0)
    transport = in_process(settings := config("method=fedavg", "rounds=3"), tmp_path)
    transport.route = lambda name, number, blob: [] if name == "node-1" and number == 2 else [blob]
    late, receive = transport.nodes.pop("node-3"), transport.receive

    def joining(seconds: float) -> list[Delivered]:
        transport.nodes["node-3"] = late
        if transport.sent.get("node-3"):
            transport.nodes["new"] = transport.nodes["node-0"]
        return receive(seconds)

    transport.receive = joining  # type: ignore[method-assign]
    lines: list[str] = []
    run(Recipe.of(settings), transport, 4, tmp_path / "run", tell=lines.append)
    assert "waiting for 4 nodes; node-0, node-1, node-2 joined" in lines
    assert [line for line in lines if line.startswith("round ")] == [
        "round 2: node-1: it did not answer within 0.3 s",
        "round 3: node-1 answered again",
    ]
    stranger = "new is not a node of this run, which keeps its nodes; one that begins with init=… takes it in"
    assert [line for line in lines if "new" in line.split()] == [stranger]
    lines.clear()
    longer = Recipe.of(config("method=fedavg", "rounds=4"))
    run(longer, transport, 4, tmp_path / "run", resume=True, tell=lines.append)
    transport.close()
    assert [line for line in lines if "new" in line.split()] == [stranger]


def test_a_fourth_site_joins_in_a_run_that_begins_from_the_last(tmp_path: Path) -> None:
    """As docs/deploy.md has it: the nodes that are there already join by themselves, and begin with the last model."""
    transport = in_process(settings := config("method=fedavg", "rounds=1", "deploy.nodes=3"), tmp_path)
    fourth = transport.nodes.pop("node-3")
    three = run(Recipe.of(settings), transport, 3, tmp_path / "three")
    transport.nodes["node-3"] = fourth
    settings = config("method=fedavg", "rounds=1", f"init={tmp_path / 'three'}")
    lines: list[str] = []
    four = run(Recipe.of(settings), transport, 4, tmp_path / "four", tell=lines.append)
    transport.close()
    assert [line.split()[0] for line in lines if " joined with " in line] == [f"node-{k}" for k in range(4)]
    for name in transport.nodes:
        broadcast = read_broadcast(transport.sent[name][-1].broadcast, 10**7)
        assert torch.equal(broadcast.theta, three.snapshot.server.theta)
    assert not four.failures


def test_changed_data_are_refused_and_end_no_run(tmp_path: Path) -> None:
    """One label is another: numbers of samples say nothing of it, neither when a run goes on nor while it runs."""
    _, transport = deployed(tmp_path, "rounds=1", out=tmp_path / "run")
    with np.load(path := tmp_path / "data" / "node-0.npz") as stored:
        arrays = dict(stored)
    arrays["y_train"][0] = (arrays["y_train"][0] + 1) % 10
    np.savez(path, **arrays)
    lines: list[str] = []
    for name in transport.nodes:
        transport.restart(name)
    result = run_and_close(transport, out=tmp_path / "run", resume=True, tell=lines.append)
    assert [(f.client, f.kind) for f in result.failures] == [(0, FailureKind.REFUSED)] * 3
    assert any("node-0 refused: its data do not fit the data specification, or are not those" in line for line in lines)
    assert "the data are others than those with which" in (tmp_path / "state" / "node-0" / "node.log").read_text()


def test_a_node_that_declares_other_numbers_ends_no_run_that_goes_on(tmp_path: Path) -> None:
    _, transport = deployed(tmp_path, "rounds=1", out=tmp_path / "run")

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        facts = unpack(blob).facts
        more = {"sizes": [10**9, 0, 0]} if name == "node-0" and facts.get("status") == "joined" else {}
        return [pack("answer", facts | more, unpack(blob).tensors)]

    transport.route, lines = route, []
    result = run_and_close(transport, out=tmp_path / "run", resume=True, tell=lines.append)
    assert result.history[-1]["round"] == 4
    assert any("node-0 has 1000000000, 0, 0 samples for training" in line and "but had" in line for line in lines)


def test_a_run_that_another_server_holds_is_refused_before_nodes_join(tmp_path: Path) -> None:
    _, transport = deployed(tmp_path, "rounds=1", out=tmp_path / "run")
    lock, lines = atomic.Lock(tmp_path / "run"), []
    with pytest.raises(CheckpointError, match="is in use"):
        run(Recipe.of(config(*WORDS)), transport, 4, out=tmp_path / "run", resume=True, tell=lines.append)
    lock.release()
    transport.close()
    assert not lines


def test_rounds_in_which_every_fifth_answer_is_lost(tmp_path: Path) -> None:
    """The same clients count as in a simulation with such drop-outs, whose coefficients are of those that are left."""
    words = ("rounds=12", "deploy.deadline=0.05", "local.lr=0.05")
    transport = in_process(config(*WORDS, *words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:  # number 0 is the join
        client = int(name.removeprefix("node-"))
        return [] if number and stream(0, "drop", number - 1, client).random() < 0.2 else [blob]

    transport.route = route
    result = run_and_close(transport, words)
    reference = simulation(*WORDS, "rounds=12", "local.lr=0.05", "drop_rate=0.2")
    lost = [(failure.round, failure.client) for failure in result.failures]
    assert lost == [(failure.round, failure.client) for failure in reference.failures]
    assert len(lost) > 5
    assert {failure.kind for failure in result.failures} == {FailureKind.ABSENT}
    theta = reference.snapshot.server.theta
    torch.testing.assert_close(result.snapshot.server.theta, theta, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_every_order_of_answer_commit_and_restart(seed: int, tmp_path: Path) -> None:
    """A random history of one client: the node always starts from the state that counted last for the server."""
    draw, values = random.Random(seed), dict[str, float]()
    folder, current, completed = tmp_path / "states", None, 0
    checkpoints: list[tuple[int, str | None]] = []
    node = Versions(folder)
    for step in range(60):
        event = draw.choice(["work", "work", "work", "idle", "checkpoint", "server", "node"])
        oldest = checkpoints[0][0] if checkpoints else 0
        if event == "work":
            node.confirm(current, oldest)
            h = 0.0 if current is None else float(node.state(current)["drift"]["h"])
            assert h == (0.0 if current is None else values[current])
            version = node.propose(completed, f"{step:032x}", {"drift": {"h": torch.tensor(h + step + 1)}})
            assert version is not None
            values[version] = h + step + 1
            if draw.random() < 0.6:  # it counts
                current, completed = version, completed + 1
        elif event == "idle":
            completed += 1
        elif event == "checkpoint" and (not checkpoints or checkpoints[-1][0] < completed):
            checkpoints = [*checkpoints, (completed, current)][-2:]
        elif event == "server":
            at = draw.randrange(len(checkpoints) + 1) if len(checkpoints) < 2 else draw.randrange(1, 3)
            checkpoints = checkpoints[:at]
            completed, current = checkpoints[-1] if checkpoints else (0, None)
        elif event == "node":
            node = Versions(folder)
    assert len(list(folder.iterdir())) <= 60


def test_states_that_nobody_can_ask_for_are_dropped(tmp_path: Path) -> None:
    node, current = Versions(tmp_path), None
    for t in range(20):
        node.confirm(current, oldest=max(t - 2, 0))
        current = node.propose(t, f"{t:032x}", {"drift": {"h": torch.zeros(1)}})
    assert sorted(path.name[:9] for path in tmp_path.iterdir()) == [f"{t:09d}" for t in (16, 17, 18, 19)]
    with pytest.raises(CheckpointError, match="the state of round 4 that counted is not in"):
        node.confirm(f"{3:09d}-{3:032x}", oldest=0)
