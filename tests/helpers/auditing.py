"""What this process opens, executes, starts and connects to, by Python's audit events."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fedloom

PACKAGE = str(Path(fedloom.__file__).parents[1])
INSIDE = (
    sys.prefix,
    sys.base_prefix,
    sysconfig.get_path("stdlib"),
    PACKAGE,
    "/proc",
    "/dev/null",
    "/dev/urandom",
    "/sys",
)
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
CONNECTIONS = ("socket.connect", "socket.getaddrinfo")
LOGS: list[list[str]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not LOGS:
        return
    if event == "open" and isinstance(args[0], str | bytes):
        LOGS[-1].append(f"open {args[0] if isinstance(args[0], str) else args[0].decode()}")
    elif event in (*PROCESSES, *CONNECTIONS):
        LOGS[-1].append(event)
    elif event == "exec" and not (name := args[0].co_filename).startswith(("<", *INSIDE)):
        LOGS[-1].append(f"exec {name}")


sys.addaudithook(_audit)  # no hook can be removed, so there is one


@contextmanager
def watch(*allowed: Path) -> Iterator[list[str]]:
    """What was opened outside the allowed places, executed, started or connected to."""
    LOGS.append(events := list[str]())
    try:
        yield events
    finally:
        LOGS.pop()
        places = (*map(str, allowed), *INSIDE)
        events[:] = [event for event in events if not event.removeprefix("open ").startswith(places)]
