"""Deployments over Flower on this machine: a SuperLink with TLS and node keys, and resident nodes."""

from __future__ import annotations

import gzip
import hashlib
import signal
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from errno import ENOSPC
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.deploying import config, simulation

from fedloom.base.errors import CheckpointError, ClientError, ConfigError
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.federated import RunResult
from fedloom_apps.deploy.certificates import make
from fedloom_apps.deploy.node import Node
from fedloom_apps.deploy.recipe import split_for_nodes
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.settings import Deployment

pytest.importorskip("flwr")
pytestmark = pytest.mark.extra("flwr")
NODES = ("node-0", "node-1", "node-2")  # two of them are a step while the third is stopped
SAME = ("method=scaffold", f"clients={len(NODES)}")
WORDS = (*SAME, "rounds=4", "deploy.deadline=60", "evaluation.what=[clients]")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates, and the data of the nodes."""
    folder = tmp_path_factory.mktemp("deployment")
    make(folder / "certificates", ["127.0.0.1"], list(NODES))
    split_for_nodes(config(*WORDS), folder / "data")
    return folder


@pytest.fixture(scope="module")
def deployment(place: Path) -> Deployment:
    from fedloom_apps.deploy.flower.host import any_port

    return Deployment(len(NODES), 60.0, port=any_port(), certificates=place / "certificates")


class Relay:
    """The SuperLink of these tests; ``begin`` puts a new one in the place of the one before and all it knew."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.deployment, self.folder, self.open = deployment, folder, ExitStack()
        self.begin()

    def begin(self) -> None:
        from fedloom_apps.deploy.flower.host import hosting

        self.open.close()
        self.transport, _ = self.open.enter_context(hosting(self.deployment, self.folder))

    def run(self, words: tuple[str, ...], out: Path, **settings: Any) -> RunResult:
        recipe = replace(Recipe.of(config(*words)), deployment=self.deployment)
        return run(recipe, self.transport, len(NODES), out, **settings)


@pytest.fixture(scope="module")
def relay(place: Path, deployment: Deployment) -> Iterator[Relay]:
    superlink = Relay(deployment, place / "superlink")
    with superlink.open:
        yield superlink


def resident_node(name: str, place: Path, deployment: Deployment) -> subprocess.Popen[bytes]:
    """The process of a node that stays."""
    from fedloom_apps.deploy.flower.host import start_node

    address = f"127.0.0.1:{deployment.port}"
    return start_node(name, place / "data" / f"{name}.npz", place / "nodes", address, deployment.certificates)


@pytest.fixture(scope="module")
def nodes(place: Path, deployment: Deployment) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Resident nodes; the tests may kill them and put others in their places."""
    from fedloom_apps.deploy.flower.host import end

    running = {name: resident_node(name, place, deployment) for name in NODES}
    yield running
    end([*running.values()])


@pytest.mark.usefixtures("nodes", "relay")  # they start at the same time
def test_who_does_not_belong_is_refused_in_a_sentence(
    place: Path, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from fedloom_apps.deploy.flower import supernode

    make(tmp_path / "others", ["127.0.0.1"], ["stranger"])
    certificates, foreign_certificates = place / "certificates", tmp_path / "others"
    address, node = f"127.0.0.1:{deployment.port}", Node(str(place / "data" / "node-0.npz"), tmp_path / "state")
    key, stranger = (
        supernode.read_private_key(p) for p in (certificates / "node-0.key", foreign_certificates / "stranger.key")
    )
    monkeypatch.setattr(supernode, "PATIENCE", 1.0)
    for ca, private_key, sentence in (
        ((foreign_certificates / "ca.pem").read_bytes(), key, "is not the one that ca.pem vouches for"),
        ((certificates / "ca.pem").read_bytes(), stranger, "does not know this node's key; give its file .pub"),
        (None, key, "gave no answer without encryption; leave --insecure out"),
    ):
        with pytest.raises(supernode.Refused, match=sentence):
            supernode.serve(node, address, ca, private_key)
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    for path in ("/v1/control/list-runs", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert httpx.post(f"https://{address}{path}", verify=context).status_code == 403
    node.close()


def test_a_key_that_is_being_copied_does_not_end_a_deployment(place: Path, tmp_path: Path) -> None:
    grid = import_module("fedloom_apps.deploy.flower.grid")
    flower, requests = grid.FlowerTransport.__new__(grid.FlowerTransport), []
    flower.keys, flower.names = tmp_path, {}
    flower.control = SimpleNamespace(RegisterNode=requests.append)
    key = (place / "certificates" / "nodes" / "node-0.pub").read_bytes()
    (tmp_path / "late.pub").write_bytes(key[:40])
    with pytest.raises(ConfigError, match=r"late\.pub is not the public key of a node"):
        flower.register()
    flower.register(running=True)
    assert not requests
    (tmp_path / "late.pub").write_bytes(key)
    flower.register(running=True)
    assert [request.name for request in requests] == ["late"]


def pushed(source: int, to: int, replies: str, *trees: Any) -> Any:
    """A node's request to push messages with these trees of parts; its own number is 5."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node as FlowerNode

    about = Metadata(src_node_id=source, dst_node_id=to, reply_to_message_id=replies, run_id=1, message_type="train")
    return PushMessagesRequest(
        node=FlowerNode(node_id=5), messages_list=[Message(metadata=about)] * len(trees), message_object_trees=trees
    )


def test_a_node_pushes_answers_of_its_own_alone() -> None:
    """No order in the server's name, to whomever; no answer of another node; no tree that grows when it is read."""
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

    from fedloom_apps.deploy.flower.superlink import is_answer

    def tree(number: int, *children: Any) -> Any:
        return ObjectTree(object_id=hashlib.sha256(bytes([number])).hexdigest(), children=children)

    store, root = InMemoryObjectStore(), tree(2, tree(1, tree(0)), tree(1, tree(0)))
    assert is_answer(pushed(5, 1, "7", root), store)
    store.preregister(1, root)
    assert is_answer(pushed(5, 1, "7", root), store)  # once more, after a connection was lost
    for source, to, replies in ((1, 1, ""), (1, 6, ""), (5, 1, ""), (6, 1, "7")):
        assert not is_answer(pushed(source, to, replies, tree(9)), store)
    assert not is_answer(pushed(5, 1, "7", tree(3, tree(2))), store)
    assert not is_answer(pushed(5, 1, "7", tree(5, tree(4, tree(3)), tree(4))), store)


@pytest.mark.usefixtures("nodes", "relay")
def test_an_order_that_a_node_gives_is_not_passed_on(place: Path, deployment: Deployment) -> None:
    import httpx

    from fedloom_apps.deploy.flower import supernode

    key = supernode.read_private_key(place / "certificates" / "node-0.key")
    remembered = place / "nodes" / "node-0" / "supernode"
    while not remembered.exists():
        time.sleep(0.1)
    request = pushed(1, 1, "", import_module("flwr.proto.message_pb2").ObjectTree(object_id=64 * "0"))
    request.node.node_id = int(remembered.read_text())
    client = supernode.FleetClient.from_server_address(
        f"127.0.0.1:{deployment.port}", False, (place / "certificates" / "ca.pem").read_bytes(),
        interceptors=[
            supernode.RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            supernode.NodeAuthHttpInterceptor(key, key.public_key()),
        ],
    )  # fmt: skip
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        client.PushMessages(request)
    client.close()


def test_nodes_and_servers_that_are_killed_go_on_to_the_same_bits(
    place: Path, deployment: Deployment, nodes: dict[str, subprocess.Popen[bytes]], relay: Relay
) -> None:
    relay.run((*WORDS, "rounds=2"), place / "run")
    victim = nodes["node-2"]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    nodes["node-2"] = resident_node("node-2", place, deployment)
    relay.begin()
    result = relay.run(WORDS, place / "run", resume=True)
    assert "connected to" in (place / "nodes" / "node-2" / "node.log").read_text()
    reference = simulation(*WORDS)
    assert torch.equal(result.snapshot.server.theta, reference.snapshot.server.theta)
    assert not result.failures
    for record, expected in zip(result.history, reference.history, strict=True):
        assert record["clients/accuracy/mean"] == pytest.approx(expected["clients/accuracy/mean"])


class Stopping(Callback):
    """Stops a node before the first step, and lets it go on after some of them."""

    def __init__(self, node: subprocess.Popen[bytes], steps: int) -> None:
        self.node, self.steps = node, steps

    def on_start(self, run: RunInfo) -> None:
        self.node.send_signal(signal.SIGSTOP)

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self.steps:
            self.node.send_signal(signal.SIGCONT)
            time.sleep(1.0)  # in which it answers

    def on_close(self) -> None:
        self.node.send_signal(signal.SIGCONT)


def test_steps_that_overlap_are_played_again_to_the_same_bits(
    place: Path, nodes: dict[str, subprocess.Popen[bytes]], relay: Relay
) -> None:
    """The work of a node that is slower than the others counts steps later, on the version that it has received."""
    words = (*SAME, "rounds=7", "evaluation.what=[global]")
    timed = ("schedule=buffered", "schedule.k=2", "deploy.deadline=60")
    result = relay.run((*words, *timed), place / "overlapping", callbacks=[Stopping(nodes["node-1"], 3)])
    assert not result.failures
    assert max(record["staleness/max"] for record in result.history) >= 3
    again = simulation(*words, "devices=none", "schedule=replay", f"schedule.path={place / 'overlapping'}")
    assert torch.equal(again.snapshot.server.theta, result.snapshot.server.theta)
    assert [record["global/accuracy"] for record in again.history] == [
        record["global/accuracy"] for record in result.history
    ]


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a run and its node, as a transport that has begun sets them."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(import_module("flwr.supercore.task_identity").TaskIdentity, name, 1)


def parts_of(content: Any) -> tuple[str, dict[str, bytes]]:
    """The number of a message with this content, and its parts."""
    nested, message = import_module("flwr.supercore.inflatable.inflatable_object"), import_module("flwr.app").Message
    sent = message(content, 5, "train")
    return sent.object_id, {number: part.deflate() for number, part in nested.get_all_nested_objects(sent).items()}


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("sent", [b"ConfigRecord  7\0garbage", b"ConfigRecord  0\0", b"Thing  0\0", b""])
def test_what_a_node_sends_in_the_place_of_a_message_answers_no_order(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, number = import_module("fedloom_apps.deploy.flower.grid"), hashlib.sha256(sent).hexdigest()
    transport = grid.FlowerTransport.__new__(grid.FlowerTransport)
    transport.limit, transport.grid = 10**6, SimpleNamespace(node=None)
    transport.runtime = SimpleNamespace(PullObject=None, ConfirmMessageReceived=lambda request: None)
    monkeypatch.setattr(grid, "pull_objects", lambda *_, **settings: {number: sent})
    assert transport._answer(number, grid.ObjectTree(object_id=number)) is None


@pytest.mark.usefixtures("identity")
def test_a_message_takes_no_more_memory_than_its_parts() -> None:
    """An array may name a part a thousand times, and a record an array."""
    flower, objects = import_module("flwr.app"), import_module("fedloom_apps.deploy.flower.objects")
    blob = bytes(objects.PIECE) + b"more"
    message = objects.inflated(*parts_of(objects.content({"answer": blob})))
    assert objects.blob_in(message, "answer", len(blob)) == blob
    assert objects.blob_in(message, "order", 0) == b""
    with pytest.raises(ValueError, match="it has more than"):
        objects.blob_in(message, "answer", len(blob) - 1)
    array = flower.Array("uint8", (99,), "bytes", bytes(99))
    many = flower.RecordDict({"answer": flower.ArrayRecord({str(n): array for n in range(1000)})})
    with pytest.raises(ValueError, match="it has more than 500 bytes"):
        objects.blob_in(objects.inflated(*parts_of(many)), "answer", 500)
    zeros = flower.ArrayRecord({"blob": flower.Array("uint8", (1,), "bytes", bytes(3 * objects.PIECE))})
    with pytest.raises(ValueError, match="its arrays repeat parts"):
        objects.inflated(*parts_of(flower.RecordDict({"answer": zeros})))


@pytest.mark.usefixtures("identity")
def test_nobody_knows_the_parts_of_another_nodes_answer_beforehand() -> None:
    """Whoever did could say of which parts they consist, and the SuperLink would refuse the answer."""
    content, zeros = import_module("fedloom_apps.deploy.flower.objects").content, {"answer": bytes(9 << 20)}
    first, second = (parts_of(content(zeros, salt)) for salt in (16 * b"a", 16 * b"b"))
    assert not first[1].keys() & second[1].keys()


def test_an_order_consists_of_the_parts_that_the_server_names() -> None:
    """A node that knows the next broadcast names it in an answer, with a part that never comes; others hear nothing."""
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

    from fedloom_apps.deploy.flower.superlink import drop_false_parts

    def tree(number: int, *children: Any) -> Any:
        return ObjectTree(object_id=hashlib.sha256(bytes([number])).hexdigest(), children=children)

    store, broadcast = InMemoryObjectStore(), tree(1, tree(2), tree(3))
    answer, orders = tree(7, tree(1, tree(9)), tree(3, tree(9))), (tree(4, broadcast), tree(5, broadcast))
    store.preregister(1, answer)
    for order in orders:
        drop_false_parts(order, store)
        store.preregister(1, order)
        assert store.get_object_tree(order.object_id) == order
    for message in (answer, orders[0]):
        store.delete(message.object_id)
        assert store.get_object_tree(orders[1].object_id) == orders[1]
    store.delete(orders[1].object_id)
    assert broadcast.object_id not in store


def test_a_part_that_never_comes_is_not_waited_for_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    supernode = import_module("fedloom_apps.deploy.flower.supernode")
    link, coming = supernode.Link.__new__(supernode.Link), SimpleNamespace(object_found=True, object_available=False)
    link.node, link.client = supernode.FlowerNode(node_id=1), SimpleNamespace(PullObject=lambda request: coming)
    monkeypatch.setattr(supernode, "LATEST", 0.1)
    with pytest.raises(ConfigError, match=r"a part of a message did not come within 0\.1 s"):
        link._part(1, supernode.ObjectTree(object_id="0"))


def test_a_node_survives_what_a_server_sends_in_the_place_of_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supernode = import_module("fedloom_apps.deploy.flower.supernode")
    link = supernode.Link.__new__(supernode.Link)
    reply = SimpleNamespace(messages_list=[None], message_object_trees=[SimpleNamespace(object_id="0")])
    link.node = supernode.FlowerNode(node_id=1)
    link.client = SimpleNamespace(PullMessages=lambda request: reply, ConfirmMessageReceived=lambda request: None)
    metadata = SimpleNamespace(run_id=1, message_id="0")
    monkeypatch.setattr(supernode, "message_from_proto", lambda message: SimpleNamespace(metadata=metadata))
    monkeypatch.setattr(supernode, "iterate_object_tree", lambda root: [root])
    monkeypatch.setattr(link, "_part", lambda run, part: b"ConfigRecord  7\0garbage", raising=False)
    with pytest.raises(ConfigError, match="a message cannot be read"):
        link.receive(10**6)
    monkeypatch.setattr(link, "_part", lambda run, part: bytes(21), raising=False)
    with pytest.raises(ConfigError, match="a message is larger than 10 bytes; raise the limit"):
        link.receive(10)


def answering(status: int, headers: Mapping[str, str], body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that gives the same answer to every request: its address, and the paths that were asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", paths
        server.shutdown()


@pytest.mark.parametrize("status", [302, 307])
def test_a_node_is_sent_to_no_other_address(status: int, tmp_path: Path) -> None:
    httpx, supernode = import_module("httpx"), import_module("fedloom_apps.deploy.flower.supernode")
    with ExitStack() as stack:
        enter = contextmanager(answering)
        elsewhere, strays = stack.enter_context(enter(200, {}, b""))
        address, paths = stack.enter_context(enter(status, {"Location": f"http://{elsewhere}/v1/fleet/else"}, b""))
        with pytest.raises(httpx.HTTPStatusError):
            supernode.Link(address, None, supernode.own_key(tmp_path), tmp_path)
    assert paths
    assert not strays


def test_a_key_for_which_there_is_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supernode = import_module("fedloom_apps.deploy.flower.supernode")

    def full(path: Path, blob: bytes) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(supernode, "write_whole", full)
    with pytest.raises(CheckpointError, match=r"node\.key, this node's key, .*No space left on device"):
        supernode.own_key(tmp_path)


def test_a_page_in_the_place_of_an_answer_is_no_end_of_a_node(tmp_path: Path) -> None:
    """A proxy, or a portal that wants a password, answers like that."""
    httpx, supernode = import_module("httpx"), import_module("fedloom_apps.deploy.flower.supernode")
    with contextmanager(answering)(200, {}, b"<html>") as (address, _), pytest.raises(httpx.HTTPError) as error:
        supernode.Link(address, None, supernode.own_key(tmp_path), tmp_path)
    assert "cannot be reached (Invalid protobuf" in supernode.explained(error.value, address, False)[0]


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
def test_an_answer_beyond_all_messages_is_not_read_into_memory(headers: dict[str, str], tmp_path: Path) -> None:
    httpx, supernode = import_module("httpx"), import_module("fedloom_apps.deploy.flower.supernode")
    body = gzip.compress(bytes(1 << 25)) if headers else bytes(1 << 25)
    with (
        contextmanager(answering)(200, headers, body) as (address, _),
        pytest.raises(httpx.DecodingError, match="is compressed" if headers else "has more than 16,777,216 bytes"),
    ):
        supernode.Link(address, None, supernode.own_key(tmp_path), tmp_path)


def test_a_node_goes_on_after_whatever_a_server_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supernode = import_module("fedloom_apps.deploy.flower.supernode")
    errors = iter([IndexError("no tree"), ValueError("no time"), KeyError("no part"), CheckpointError("no room")])

    def receive(limit: int) -> None:
        raise next(errors)

    log: list[str] = []
    monkeypatch.setattr(supernode, "Link", lambda *_: SimpleNamespace(receive=receive, close=lambda: None))
    monkeypatch.setattr(supernode, "BACKOFF", (0.0, 0.0))
    node = Node("mine.npz", tmp_path)
    with pytest.raises(CheckpointError, match="no room"):
        supernode.serve(node, "here:1", None, supernode.own_key(tmp_path), log.append)
    node.close()
    assert [line for line in log if "was lost" in line] == [
        f"the connection to here:1 was lost ({why}); trying again" for why in ("no tree", "no time", "'no part'")
    ]


def test_a_node_that_was_connected_is_not_ended_by_what_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate may be renewed, a key put back, and a clock set again; one that never was connected ends."""
    httpx, supernode = import_module("httpx"), import_module("fedloom_apps.deploy.flower.supernode")
    left: list[Exception] = []

    def link(*_: Any) -> Any:
        if isinstance(error := left.pop(0), httpx.HTTPError):
            raise error

        def receive(limit: int) -> None:
            raise error

        return SimpleNamespace(receive=receive, close=lambda: None)

    monkeypatch.setattr(supernode, "Link", link)
    monkeypatch.setattr(supernode, "BACKOFF", (0.0, 0.0))
    node, key, log = Node("mine.npz", tmp_path), supernode.own_key(tmp_path), list[str]()
    left[:] = [stranger := httpx.ConnectError("CERTIFICATE_VERIFY_FAILED")]
    with pytest.raises(supernode.Refused, match="the server at here:1 is not the one that"):
        supernode.serve(node, "here:1", b"ca", key, log.append)
    left[:] = [ValueError("no time"), stranger, CheckpointError("no room")]
    with pytest.raises(CheckpointError, match="no room"):
        supernode.serve(node, "here:1", b"ca", key, log.append)
    node.close()
    assert len([line for line in log if "vouches for" in line and line.endswith("; trying again")]) == 1


def transport_to(names: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A transport whose relay has an answer to each of the messages that nodes were sent."""
    grid = import_module("fedloom_apps.deploy.flower.grid")
    node = SimpleNamespace(status="online", public_key=b"key", node_id=1, last_activated_at="now")

    def pulled(request: Any) -> Any:
        answers = [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=n, message_id=n)) for n in
                   request.message_ids]  # fmt: skip
        return SimpleNamespace(messages_list=answers, message_object_trees=[None] * len(answers))

    transport = grid.FlowerTransport.__new__(grid.FlowerTransport)
    transport.grid, transport.runtime = SimpleNamespace(get_nodes=lambda: [node]), SimpleNamespace(PullMessages=pulled)
    transport.names, transport.ids, transport.pending, transport.lost = {b"key": "a"}, {}, dict(names), Counter()
    transport.coming, transport.threads = {}, ThreadPoolExecutor(2)
    monkeypatch.setattr(transport, "register", lambda running: None)
    return transport


def test_an_order_that_the_relay_gives_up_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was away for a moment keeps its session, and would wait for its order until the deadline."""
    transport = transport_to({"7": "a"}, monkeypatch)
    monkeypatch.setattr(transport, "_answer", lambda number, tree: None)
    before = transport.online()
    assert transport.online() == before
    assert transport.receive(1) == []
    assert transport.online()["a"] != before["a"]


def test_a_superlink_that_is_lost_while_an_answer_comes_ends_the_run_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = transport_to({"7": "a"}, monkeypatch)
    transport.address = "here:1"

    def lost(number: str, tree: Any) -> None:
        raise import_module("httpx").ConnectError("refused")

    monkeypatch.setattr(transport, "_answer", lost)
    with pytest.raises(ClientError, match=r"the SuperLink at here:1 no longer answers .* continue with resume=…"):
        transport.receive(1)


def test_an_answer_whose_parts_do_not_come_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node was killed after it had announced its answer: its parts are waited for beside the answers of others."""
    transport, given_up = transport_to({"7": "a", "8": "b"}, monkeypatch), Event()
    monkeypatch.setattr(
        transport, "_answer", lambda number, tree: b"answer" if number == "8" else given_up.wait(60) and None
    )
    assert [*transport.receive(30)] == [("b", b"answer")]
    assert transport.receive(0.3) == []
    assert transport.pending == {"7": "a"}
    assert not transport.lost
    given_up.set()
    assert transport.receive(1) == []
    assert transport.lost == {"a": 1}
    transport.threads.shutdown()


def test_answers_whose_parts_never_come_do_not_take_the_places_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, end = transport_to({"5": "a", "6": "a"}, monkeypatch), Event()
    monkeypatch.setattr(import_module("fedloom_apps.deploy.flower.grid"), "OF_A_NODE", 1, raising=False)
    monkeypatch.setattr(
        transport, "_answer", lambda number, tree: b"answer" if number == "8" else end.wait(60) and None
    )
    assert transport.receive(0.3) == []
    transport.pending |= {"7": "a", "8": "b"}
    assert transport.receive(1) == [("b", b"answer")]
    end.set()
    transport.threads.shutdown()


@pytest.mark.parametrize("why", ["certificate is not yet valid", "certificate has expired"])
def test_a_wrong_clock_is_not_taken_for_another_server(why: str) -> None:
    import httpx

    from fedloom_apps.deploy.flower.supernode import explained

    error = httpx.ConnectError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {why} (_ssl.c:1006)")
    sentence, final = explained(error, "fed.example.org:9440", True)
    assert f"is not valid today ({error}); set this machine's clock" in sentence
    assert final == "now"
