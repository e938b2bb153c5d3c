"""A node's own log, for its owner alone: every event with its time, in a file of limited size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from fedloom.core.errors import CheckpointError, printable
from fedloom.experiment.atomic import append

FILE = "node.log"
LONGEST = 1 << 24  # bytes of a log; the one before is kept beside it
EVENT = 10_000  # characters of an event
BAD = ("refused: ", "failed: ")


class Log:
    """Writes events to a file, and passes them on.

    Args:
        path: the file.
        tell: called with every event as well.
    """

    def __init__(self, path: Path, tell: Callable[[str], None] = lambda sentence: None) -> None:
        self.path, self.tell = path, tell

    def __call__(self, event: str) -> None:
        """Note an event; what a server chose in it cannot control a terminal, or look like another event."""
        lines = [printable(line) for line in event[:EVENT].splitlines()]
        event = "\n    ".join(lines)
        if self.path.exists() and self.path.stat().st_size > LONGEST:
            os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
        append(self.path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {event}\n")
        self.tell(event)


def reasons(path: Path, last: int = 5) -> list[str]:
    """The last refusals and failures in a log, the newest last.

    Raises:
        CheckpointError: if there is no log.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path} is no log of a node ({error.strerror}).") from error
    events: list[str] = []
    for line in text.splitlines():
        if line.startswith("    ") and events:
            events[-1] += f"\n{line}"
        else:
            events.append(line)
    return [event for event in events if event[20:].startswith(BAD)][-last:]
