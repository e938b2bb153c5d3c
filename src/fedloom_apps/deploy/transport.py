"""The transport of messages between server and nodes: the interface, and queues within one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fedloom_apps.deploy.messages import NodeRequest


class Delivered(NamedTuple):
    """A delivered answer: its sender and the message."""

    node: str
    blob: bytes


class Transport(Protocol):
    """A way to reach nodes. Messages may be lost, come twice, or late; nodes are known by authenticated names."""

    def online(self) -> Mapping[str, str]:
        """The names of the nodes that can be reached now, each with its session.

        A node that was started again has a new session, and has forgotten the messages of the one before.
        """
        ...

    def send(self, requests: Mapping[str, NodeRequest]) -> None:
        """Send each message to its node; return without waiting for answers."""
        ...

    def receive(self, seconds: float) -> list[Delivered]:
        """The answers that have arrived; waits for one, but not much longer than the given number of seconds."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
