"""Processes that a server starts around its rounds: a SuperLink and, for local trials, nodes on the same machine."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedloom.base.errors import ConfigError
from fedloom_apps.deploy.certificates import read_authority
from fedloom_apps.deploy.flower import require
from fedloom_apps.deploy.flower.superlink import start
from fedloom_apps.deploy.messages import Transport
from fedloom_apps.deploy.settings import Deployment

ENDING = 5.0  # seconds in which a process may end by itself
MAIN = "import sys; from fedloom.cli import main; sys.exit(main())"


@contextmanager
def hosting(deployment: Deployment, folder: Path, insecure: bool = False) -> Iterator[tuple[Transport, int]]:
    """A SuperLink and the transport to its nodes; K is ``nodes``, or the number of registered keys."""
    require()
    from fedloom_apps.deploy.flower.grid import FlowerTransport

    home = deployment.certificates.expanduser()
    keys, count = home / "nodes", deployment.nodes
    if not insecure:
        if missing := [name for name in ("ca.pem", "server.pem", "server.key") if not (home / name).is_file()]:
            raise ConfigError(
                f"there is no {home / missing[0]}; make certificates with fedloom deploy certificates {home}, or name "
                "their folder with deploy.certificates=…"
            )
        count = count or len(list(keys.glob("*.pub")))
    if not count:
        where = "with deploy.nodes=…" if insecure else f"by their public keys in {keys}, or with deploy.nodes=…"
        raise ConfigError(f"say how many nodes there are, {where}.")
    if not free(deployment.host, deployment.port):
        raise ConfigError(
            f"{deployment.host}:{deployment.port} is in use or not an address of this machine; choose deploy.port or "
            "deploy.host."
        )
    ca = None if insecure else read_authority(home / "ca.pem")
    secret = secrets.token_hex(32)
    process = start(folder, deployment.host, deployment.port, secret, None if insecure else home)
    try:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(deployment.host, deployment.host)
        address = f"[{host}]:{deployment.port}" if ":" in host else f"{host}:{deployment.port}"
        public_keys, lifetime = None if insecure else keys, deployment.deadline + 60
        transport = FlowerTransport(
            address, secret, ca, public_keys, lifetime, deployment.limit, lambda: process.poll() is None
        )
        try:
            yield transport, count
        finally:
            transport.close()
    finally:
        end([process])


def free(host: str, port: int) -> bool:
    """Whether a server can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def any_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_node(
    name: str, data: Path, folder: Path, address: str, certificates: Path | None, imports: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start ``fedloom deploy node`` on this machine; it ends with this process.

    Args:
        name: name of the node and its key.
        data: its samples.
        folder: folder for its state and its log.
        address: address of the server.
        certificates: folder with ``ca.pem`` and ``<name>.key``; None for no encryption.
        imports: modules of the user that it needs, too.
    """
    words = ["deploy", "node", "--data", str(data), "--state", str(folder / name), "--server", address]
    words += [f"--import={module}" for module in imports]
    if certificates is None:
        words += ["--insecure"]
    else:
        words += ["--ca", str(certificates / "ca.pem"), "--key", str(certificates / f"{name}.key")]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = os.environ | {"FEDLOOM_PARENT": str(os.getpid())}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment,
        )  # fmt: skip


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes; kill those that do not end when asked."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    last = time.monotonic() + ENDING
    for process in processes:
        try:
            process.wait(max(last - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
