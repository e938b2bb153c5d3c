"""A node's side of the transport over Flower: a resident process that speaks the Fleet protocol itself."""

# pyright: reportMissingImports=false

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
)
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedloom.base.errors import CheckpointError, ConfigError, in_one_line
from fedloom.base.files import writing
from fedloom.experiment.atomic import write_whole
from fedloom_apps.deploy.flower import LARGEST
from fedloom_apps.deploy.flower.objects import SALT, blob_in, content, inflated
from fedloom_apps.deploy.messages import NodeRequest
from fedloom_apps.deploy.node import Node

HEARTBEAT = 10.0  # seconds; after two that are missing a node counts as offline
POLL = 0.05  # seconds between looks for messages after one
PATIENCE = 2.5 * HEARTBEAT  # seconds in which a server may not know a key yet, or hold on to a killed session
BACKOFF = 1.0, 20.0  # seconds between attempts to reconnect: the first, and the longest
AVAILABLE = 0.05  # seconds between looks for a part of a message that is still on its way
LATEST = 600.0  # seconds in which it must come; Flower gives up a message of which nothing has come for 180 s
MESSAGE = 1 << 31  # bytes of all parts of a message


class Refused(ConfigError):
    """Raised for a server that permanently refuses this node."""


class FleetClient(FleetHttpClient):
    """Flower's client, for a server that is not trusted.

    It follows no redirection to other addresses, and reads no answer beyond ``LARGEST`` or one that is compressed; an
    answer that is no message of the protocol is an ``HTTPError``.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._client.follow_redirects = False
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [_bound]}

    def _unary_unary(self, **call: Any) -> Any:
        try:
            return super()._unary_unary(**call)
        except ValueError as error:
            raise httpx.DecodingError(str(error)) from error


class Bounded(httpx.SyncByteStream):
    """The bytes of an answer, of which no more than ``LARGEST`` are taken."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self.stream:
            size += len(part)
            if size > LARGEST:
                raise httpx.DecodingError(f"an answer has more than {LARGEST:,} bytes")
            yield part

    def close(self) -> None:
        self.stream.close()


def _bound(response: httpx.Response) -> None:
    """Refuse more of an answer than memory is meant for; what is compressed may be any number of bytes."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx.DecodingError("an answer is compressed")
    response.stream = Bounded(response.stream)  # type: ignore[arg-type]


class Link:
    """A connection to a SuperLink.

    Raises:
        Refused: if the server does not match the certificate, or does not know the key.
        httpx.HTTPError: if it cannot be reached.
    """

    def __init__(self, address: str, ca: bytes | None, key: ec.EllipticCurvePrivateKey, state: Path) -> None:
        public = key.public_key()
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperNode")]
        interceptors.append(NodeAuthHttpInterceptor(key, public))
        self.address, self.remembered = address, state / "supernode"
        self.client = FleetClient.from_server_address(address, ca is None, ca, interceptors=interceptors)
        self.ended = threading.Event()
        try:
            self.node = FlowerNode(node_id=self._activated(public_key_to_bytes(public), ca is None))
        except BaseException:
            self.client.close()
            raise
        with suppress(OSError):  # a full disk: a killed node waits until its session has ended
            write_whole(self.remembered, str(self.node.node_id).encode())
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()

    def _activated(self, public: bytes, insecure: bool) -> int:
        """The node's number; a session left behind by a killed process is ended first."""
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT)
        with suppress(OSError, ValueError, httpx.HTTPStatusError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=int(self.remembered.read_text())))
        if insecure:
            with suppress(httpx.HTTPStatusError):  # it is registered already
                self.client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
        return self.client.ActivateNode(request).node_id

    def _beat(self) -> None:
        while not self.ended.wait(0.8 * HEARTBEAT):
            with suppress(httpx.HTTPError):
                self.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT))

    def receive(self, limit: int) -> tuple[Message, NodeRequest] | None:
        """The next message and what it holds, if there is one."""
        answer = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not answer.messages_list:
            return None
        message, root = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
        run, number = message.metadata.run_id, message.metadata.message_id
        contents, size = dict[str, bytes](), 0
        for part in iterate_object_tree(root):
            contents[part.object_id] = self._part(run, part)
            size += len(contents[part.object_id])
            if size > min(2 * limit, MESSAGE):
                raise ConfigError(f"a message is larger than {limit:,} bytes; raise the limit.")
        self.client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=number)
        )
        try:
            full_message = inflated(root.object_id, contents)
            full_message.metadata.__dict__["_message_id"] = number
            order, broadcast = (blob_in(full_message, name, 2 * limit) for name in NodeRequest._fields)
            return full_message, NodeRequest(order, broadcast)
        except Exception as error:  # each kind of record fails in its own ways
            raise ConfigError(f"a message cannot be read: {in_one_line(error)}.") from error

    def _part(self, run: int, part: ObjectTree) -> bytes:
        request = PullObjectRequest(node=self.node, run_id=run, object_id=part.object_id)
        end = time.monotonic() + LATEST
        while True:
            answer = self.client.PullObject(request)
            if not answer.object_found:
                raise ConfigError("a part of a message no longer exists at the SuperLink.")
            if answer.object_available:
                return answer.object_content
            if time.monotonic() > end:
                raise ConfigError(f"a part of a message did not come within {LATEST:g} s.")
            time.sleep(AVAILABLE)

    def reply(self, message: Message, blob: bytes, seconds: float) -> None:
        """Send an answer."""
        run = TaskIdentity.run_id = message.metadata.run_id
        TaskIdentity.node_id = TaskIdentity.task_id = self.node.node_id
        answer = Message(content({"answer": blob}, secrets.token_bytes(SALT)), reply_to=message)
        answer.metadata.__dict__["_message_id"] = answer.object_id
        with no_object_id_recompute():
            objects = get_all_nested_objects(answer)
            sent = self.client.PushMessages(
                PushMessagesRequest(
                    node=self.node,
                    messages_list=[message_to_proto(remove_content_from_message(answer))],
                    message_object_trees=[get_object_tree(answer)],
                    clientapp_runtime_list=[seconds],
                )
            )
            for number in sent.objects_to_push:
                self.client.PushObject(
                    PushObjectRequest(
                        node=self.node, run_id=run, session_id=sent.session_id, object_id=number,
                        object_content=objects[number].deflate(),
                    )
                )  # fmt: skip

    def close(self) -> None:
        """End the session at the SuperLink."""
        self.ended.set()
        with suppress(httpx.HTTPError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()


def serve(
    node: Node,
    address: str,
    ca: bytes | None,
    key: ec.EllipticCurvePrivateKey,
    tell: Callable[[str], None] = lambda sentence: None,
    poll: float = 1.0,
) -> None:
    """Answer a server's orders forever; reconnect whenever the connection is lost.

    Args:
        node: the node.
        address: address of the server, ``host:port``.
        ca: certificate of its authority; None for no encryption.
        key: the node's private key.
        tell: called with a message about every event.
        poll: seconds between polls for messages when nothing has happened for a while.

    Raises:
        Refused: if the server permanently refuses this node, with which it never was connected.
        CheckpointError: if the node cannot note that it must stop.
    """
    backoff, first = BACKOFF[0], time.monotonic()
    was_connected, last_sentence = False, ""
    while True:
        try:
            link = Link(address, ca, key, node.home)
        except httpx.HTTPError as error:
            sentence, final = explained(error, address, ca is not None)
            if final and not was_connected and time.monotonic() - first > (0.0 if final == "now" else PATIENCE):
                raise Refused(sentence) from error
            if sentence != last_sentence:
                tell(f"{sentence.removesuffix('.')}; trying again")
            last_sentence = sentence
            time.sleep(backoff)
            backoff = min(1.5 * backoff, BACKOFF[1])
            continue
        tell(f"connected to {address}")
        was_connected, last_sentence, backoff, pause = True, "", BACKOFF[0], POLL
        try:
            while True:
                received = link.receive(node.limit)
                if received is None:
                    time.sleep(pause)
                    pause = min(1.2 * pause, max(poll, POLL))
                    continue
                message, request = received
                started, pause = time.perf_counter(), POLL
                blob = node.answer(*request)
                link.reply(message, blob, time.perf_counter() - started)
        except CheckpointError:
            raise  # of its folder, without which it must not go on
        except Exception as error:  # whatever a server sends
            tell(f"the connection to {address} was lost ({in_one_line(error)}); trying again")
            time.sleep(backoff)
        finally:
            link.close()


def explained(error: httpx.HTTPError, address: str, secure: bool) -> tuple[str, str]:
    """A sentence on the error, and whether it is final: ``now``, ``later`` or not at all."""
    text = str(error)
    if "not yet valid" in text or "has expired" in text:
        return (
            f"the certificate of the server at {address} is not valid today ({text}); set this machine's clock or, if "
            "it is right, ask the people who run the server for new certificates.",
            "now",
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"the server at {address} is not the one that ca.pem vouches for ({text}); take the ca.pem of the people "
            "who run the server, and the address that they named.",
            "now",
        )
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER" in text:
        return f"the server at {address} does not encrypt; use one that does, or pass --insecure.", "now"
    if isinstance(error, httpx.RemoteProtocolError) and not secure:
        return f"the server at {address} gave no answer without encryption; leave --insecure out.", "later"
    if isinstance(error, httpx.HTTPStatusError) and error.response.is_client_error:
        return (
            f"the server at {address} does not know this node's key; give its file .pub to the people who run the "
            "server, and make sure that no other process uses the key and that this machine's clock is right.",
            "later",
        )
    return f"the server at {address} cannot be reached ({text}).", ""


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A node's private key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it needs a password
        raise ConfigError(f"{path} is not the private key of a node ({error}).") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not an elliptic-curve key; make one with fedloom deploy certificates.")
    return key


def own_key(state: Path) -> ec.EllipticCurvePrivateKey:
    """The node's own key, created on first use; without encryption it serves as the node's name."""
    path = state / "node.key"
    if not path.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        with writing(f"{path}, this node's key,", CheckpointError):
            write_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
            path.chmod(0o600)
    return read_private_key(path)
