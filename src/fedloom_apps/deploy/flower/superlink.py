"""Flower's SuperLink as a process beside the server, which alone can access its control interface.

The SuperLink serves three interfaces on one port: that of nodes, which authenticate by their keys, and those of
control and run time, which in the free edition are open to anyone. Here these two need a secret that is made anew for
every process and that only the server knows.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hmac
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from fedloom_apps.deploy.flower import LARGEST, QUIET, require

HEADER = "fedloom-key"
OPEN = "/v1/fleet/"
ASGI = Callable[..., Awaitable[None]]


class Guard:
    """An ASGI application that admits nodes to their interface, and the holder of the secret to all interfaces.

    A request to the interface of nodes is read whole before Flower looks at its signature; of one beyond ``LARGEST``,
    which may be anybody's, no more is taken into memory.
    """

    def __init__(self, app: ASGI, secret: bytes) -> None:
        self.app, self.secret = app, secret

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Pass authorised requests on; answer 403 to all others, and 413 to nodes' requests beyond ``LARGEST``."""
        if scope["type"] == "http":
            token = dict(scope["headers"]).get(HEADER.encode(), b"")
            if not hmac.compare_digest(token, self.secret):
                if not scope["path"].startswith(OPEN):
                    return await _answer(send, 403)
                if (body := await _whole(receive)) is None:
                    return await _answer(send, 413)
                receive = _after(body, receive)
        return await self.app(scope, receive, send)


async def _answer(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _whole(receive: Any) -> bytes | None:
    """The body of a request; None if it is too large, or the client left."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST or message["type"] == "http.disconnect":
            return None
    return bytes(body)


def _after(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """What an application receives: the whole body, and then what comes."""
    first = [{"type": "http.request", "body": body}]

    async def received() -> Any:
        return first.pop() if first else await receive()

    return received


def is_answer(request: Any, store: Any) -> bool:
    """Whether what a node pushes is an answer of its own, which names all its parts.

    Flower looks at the key alone: a node could give orders in the server's name, to others and to the server itself, or
    tell of parts one by one, each with the one before as its part twice, which are a tree beyond all memory.

    Args:
        request: a ``PushMessagesRequest``, whose ``node`` is that of the key.
        store: the object store, with the parts that are known.
    """
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    for message, tree in zip(request.messages_list, request.message_object_trees, strict=False):
        about, parts = message.metadata, dict[str, Any]()
        if not about.reply_to_message_id or about.src_node_id != request.node.node_id:
            return False
        for part in iterate_object_tree(tree):
            number = part.object_id
            if part != (store.get_object_tree(number) if number in store else parts.setdefault(number, part)):
                return False
    return True


def drop_false_parts(order: Any, store: Any) -> None:
    """Forget what a node has said of the parts of an order of the server, before it is stored.

    Flower keeps the first tree in which a part is named. A node that knows a broadcast beforehand, as it does after an
    evaluation, could name it in an answer as consisting of parts that never come, and no node would get an order.

    Args:
        order: the tree of the order's parts.
        store: the object store.
    """
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    with store.lock_store:
        for part in iterate_object_tree(order):
            entry = store.store.get(part.object_id)
            if entry is not None and entry.child_object_ids != [child.object_id for child in part.children]:
                del store.store[part.object_id]
                for other in store.store.values():
                    other.child_object_ids = [child for child in other.child_object_ids if child != part.object_id]


def start(folder: Path, host: str, port: int, secret: str, certificates: Path | None) -> subprocess.Popen[bytes]:
    """Start a SuperLink, which ends with this process; ``certificates`` holds ca.pem, server.pem and server.key."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "secret"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
    words = ["--isolation", "process", "--superexec-auth-secret-file", str(path), "--host", host, "--port", str(port)]
    words += ["--disable-runtime-dependency-installation"]
    if certificates is None:
        words += ["--insecure"]
    else:
        words += ["--ssl-ca-certfile", str(certificates / "ca.pem"), "--ssl-certfile", str(certificates / "server.pem")]
        words += ["--ssl-keyfile", str(certificates / "server.key"), "--enable-supernode-auth"]
    with (folder / "superlink.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | QUIET | {"FLWR_HOME": str(folder)},
        )  # fmt: skip


def main() -> None:
    """Run a guarded SuperLink: the parent's process id, then the arguments of ``flower-superlink``."""
    from fedloom.engines.processes import die_with_parent

    parent = int(sys.argv.pop(1))
    die_with_parent(parent)
    require()
    from fastapi import HTTPException
    from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
    from flwr.superlink import main as application
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers

    push, store = fleet_handlers.push_messages, InMemoryLinkState.store_message_and_object_tree

    def push_answer(request: Any, state: Any) -> Any:
        if not is_answer(request, state.object_store):
            raise HTTPException(403)
        return push(request, state)

    def store_message(state: Any, message: Any, tree: Any, session: str) -> Any:
        with state._lock_object_push_sessions, state.lock:  # the order in which Flower takes them elsewhere
            if not message.metadata.reply_to_message_id:
                drop_false_parts(tree, state.object_store)
            return store(state, message, tree, session)

    fleet_handlers.push_messages = push_answer
    InMemoryLinkState.store_message_and_object_tree = store_message
    secret = Path(sys.argv[sys.argv.index("--superexec-auth-secret-file") + 1]).read_bytes()
    make = application.create_app
    application.create_app = lambda *args: Guard(make(*args), secret)
    flower_superlink()


if __name__ == "__main__":
    main()
