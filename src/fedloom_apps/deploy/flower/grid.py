"""The server's side of the transport over Flower."""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedloom.base.errors import ClientError, ConfigError
from fedloom_apps.deploy.flower.objects import blob_in, content, inflated
from fedloom_apps.deploy.flower.superlink import HEADER
from fedloom_apps.deploy.messages import Delivered, NodeRequest
from fedloom_apps.deploy.wire import LIMIT

STARTING = 60.0  # seconds in which a SuperLink must come up, or come back
LOOK = 0.1  # seconds between looks for answers
PULLS = 0.05, 1.0  # seconds between looks for a part of an answer that is still on its way: at first, and at most
ON_THEIR_WAY = 1000  # answers that are waited for at a time
OF_A_NODE = 10  # of these, so that none takes the places of all by answers whose parts never come
REMEMBERED = 100_000  # messages whose answers are still recognised as late
PROJECT = b"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "fedloom"
version = "1.0.0"
description = "Messages of FedLoom; there is no code in this app"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fedloom"
fab-format-version = 0
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
[tool.flwr.app.config]
"""


class Key:
    """Adds the secret of a guarded SuperLink to every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Send the request with the secret."""
        add_headers(context.request, {HEADER: self.secret})
        return call_next(context)


class Grid(HttpGrid):
    """Flower's grid behind the guard of the SuperLink."""

    key: Key

    def _connect(self) -> None:
        super()._connect()
        client: Any = self._client
        client._interceptors = (*client._interceptors, self.key)


class FlowerTransport:
    """Messages to nodes through a SuperLink.

    Args:
        address: address of the SuperLink, ``host:port``.
        secret: secret of its control interface.
        ca: the certificate of the authority that signed its certificate; None for no encryption.
        keys: folder with the public keys of the nodes, ``<name>.pub``; not used without encryption.
        lifetime: seconds for which an order may wait for its node.
        limit: largest size of an answer in bytes; one of twice this size is not read.
        alive: whether the SuperLink's process runs.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        ca: bytes | None,
        keys: Path | None,
        lifetime: float,
        limit: int = LIMIT,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.address, self.keys, self.lifetime, self.limit = address, keys, lifetime, limit
        self.names: dict[bytes, str] = {}
        self.ids: dict[str, int] = {}
        self.pending: dict[str, str] = {}  # message -> node
        self.coming: dict[str, Future[bytes | None]] = {}  # message -> its answer, whose parts may be on their way
        self.threads = ThreadPoolExecutor(ON_THEIR_WAY)
        self.lost = Counter[str]()  # by node: orders that the relay gave up, which are sent again as in a new session
        security = {"server_address": address, "insecure": ca is None, "root_certificates": ca}
        key = Key(secret)
        self.control = ControlHttpClient.from_server_address(
            **security, interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-cli"), key]
        )
        self._await(alive)
        self.register()
        token = self._run(security, key, secret)
        self.grid = Grid(address, ca is None, ca, token=token)
        self.grid.key = key
        self.grid._retry_invoker.max_time = STARTING
        self.runtime = self.grid._runtime_client
        self.heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(self.runtime))
        self.heartbeat.start()
        task = self.runtime.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        self.grid.set_run(run_from_proto(task.run))

    def _await(self, alive: Callable[[], bool]) -> None:
        """Wait until the SuperLink listens."""
        end = time.monotonic() + STARTING
        while True:
            try:
                self.control._client.get(f"{self.control._base_url}/")
                return
            except httpx.TransportError as error:
                if time.monotonic() > end or not alive() or "CERTIFICATE" in str(error):
                    raise ConfigError(
                        f"no SuperLink can be reached at {self.address} ({error}); see its log."
                    ) from error
                time.sleep(0.1)

    def _run(self, security: Mapping[str, Any], key: Key, secret: str) -> str:
        """Start a run at the SuperLink; return the token of its server."""
        fab, _ = build_fab_from_files({"pyproject.toml": PROJECT, "nothing.py": b"app = None\n"})
        self.control.StartRun(StartRunRequest(fab=Fab(hash_str=hashlib.sha256(fab).hexdigest(), content=fab)))
        protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperExec"), key,
            SuperExecAuthHttpInterceptor(master_secret=secret.encode(), protected_methods=protected),
        ]  # fmt: skip
        client = RuntimeHttpClient.from_server_address(**security, interceptors=interceptors)
        try:
            task = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        finally:
            client.close()
        return task.token

    def register(self, running: bool = False) -> None:
        """Register the public keys in the folder that are not registered yet.

        In a deployment that is ``running``, a file that is no key does not end it: one that is being copied is read
        again at the next look.

        Raises:
            ConfigError: for a file that is no key, before the deployment runs.
        """
        for path in sorted(self.keys.glob("*.pub")) if self.keys is not None else ():
            try:
                encoded = read_public_key(path)
            except ConfigError:
                if running:
                    continue
                raise
            if encoded not in self.names:
                self.names[encoded] = path.stem
                self.control.RegisterNode(RegisterNodeRequest(public_key=encoded, name=path.stem))

    @contextmanager
    def _linked(self) -> Iterator[None]:
        """Turn the loss of a SuperLink into an error message."""
        try:
            yield
        except httpx.HTTPError as error:
            raise ClientError(
                f"the SuperLink at {self.address} no longer answers ({error}); see its log, and continue with resume=…"
            ) from error

    def online(self) -> Mapping[str, str]:
        with self._linked():
            self.register(running=True)
            nodes = self.grid.get_nodes()
        numbers = {}
        for node in nodes:
            if node.status == "online":
                name = self.names.get(node.public_key) or f"node-{hashlib.sha256(node.public_key).hexdigest()[:12]}"
                self.ids[name] = node.node_id
                numbers[name] = f"{node.last_activated_at} {self.lost[name]}"
        return numbers

    def send(self, requests: Mapping[str, NodeRequest]) -> None:
        messages = [
            Message(content(request._asdict()), self.ids[name], "train", ttl=self.lifetime)
            for name, request in requests.items()
        ]
        with self._linked():
            numbers = list(self.grid.push_messages(messages))
        for name, number in zip(requests, numbers, strict=True):
            if number:
                self.pending[number] = name
        for number in list(self.pending)[: len(self.pending) - REMEMBERED]:
            del self.pending[number]

    def receive(self, seconds: float) -> list[Delivered]:
        end, arrived = time.monotonic() + seconds, list[Delivered]()
        while self.pending and not arrived:
            with self._linked():
                if numbers := [number for number in self.pending if number not in self.coming]:
                    response = self.runtime.PullMessages(PullAppMessagesRequest(message_ids=numbers))
                    coming = Counter(self.pending.get(number) for number in self.coming)
                    for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                        number = message.metadata.reply_to_message_id
                        if coming[self.pending[number]] < OF_A_NODE:
                            coming[self.pending[number]] += 1
                            self.coming[number] = self.threads.submit(self._answer, message.metadata.message_id, tree)
                wait(self.coming.values(), min(LOOK, seconds), FIRST_COMPLETED)
                for number in [number for number, answer in self.coming.items() if answer.done()]:
                    with self._linked():
                        blob, name = self.coming.pop(number).result(), self.pending.pop(number, None)
                    if name is not None and blob is not None:
                        arrived.append(Delivered(name, blob))
                    elif name is not None:  # an error of the relay, for whom the node was away for a moment
                        self.lost[name] += 1
            if time.monotonic() > end:
                return arrived
            if not arrived and not self.coming:
                time.sleep(min(LOOK, seconds))
        if not arrived:
            time.sleep(max(end - time.monotonic(), 0.0))
        return arrived

    def _answer(self, number: str, tree: ObjectTree) -> bytes | None:
        """The answer in a message, once all its parts are there; None if some never come, as of a killed node."""
        node, run = self.grid.node, TaskIdentity.run_id
        pull = make_pull_object_fn_protobuf(self.runtime.PullObject, node, run)
        parts = [part.object_id for part in iterate_object_tree(tree)]
        try:
            contents = pull_objects(parts, pull, initial_backoff=PULLS[0], backoff_cap=PULLS[1])
        except ObjectPullError:
            return None
        self.runtime.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=number)
        )
        with suppress(Exception):  # whatever a node sends in the place of a message, it answers no order
            return blob_in(inflated(number, contents), "answer", 2 * self.limit) or None
        return None

    def close(self) -> None:
        """Tell the SuperLink that the run is over."""
        with suppress(httpx.HTTPError):
            self.runtime.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
        self.heartbeat.stop()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.grid.close()
        self.control.close()


def read_public_key(path: Path) -> bytes:
    """A node's public key, in the form that Flower uses to identify it."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not the public key of a node ({error}).") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is not an elliptic-curve key; make one with fedloom deploy certificates.")
    return public_key_to_bytes(key)
