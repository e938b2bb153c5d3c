"""The messages between server and nodes: an order with a broadcast, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedloom.base.errors import CheckpointError, ClientError, ConfigError, DataError, FedLoomError
from fedloom.base.settings import from_plain, signature, validate
from fedloom.experiment.store import flat, nested
from fedloom.rounds.exchange import Broadcast
from fedloom_apps.deploy.versions import FILE, TICKET
from fedloom_apps.deploy.wire import Packet, WireError, is_count, is_number, pack, unpack

JOIN, LOSSES, VALIDATION_LOSSES, WORK, EVALUATE = "join", "losses", "validation_losses", "work", "evaluate"
MODERATE = 1e12  # largest value of a model, an update or an upload


class Code(str, Enum):
    """Why a node gives no result: all that it says of the reason to a server. The sentence is in the node's own log."""

    __str__ = str.__str__

    MESSAGE = "message"
    SETTINGS = "settings"
    VERSION = "version"
    AGREEMENT = "agreement"
    DATA = "data"
    BROADCAST = "broadcast"
    STATE = "state"
    DISK = "disk"
    UNCOVERED = "uncovered"
    BUDGET = "budget"
    QUOTA = "quota"
    FAILED = "failed"
    STOPPED = "stopped"


REASONS = {
    Code.MESSAGE: "it cannot read the message",
    Code.SETTINGS: "it does not take these settings from a server",
    Code.VERSION: (
        "its model has other parameters than the server's; install the same versions of fedloom and torch at both"
    ),
    Code.AGREEMENT: "its owner has agreed to another data specification",
    Code.DATA: "its data do not fit the data specification, or are not those with which it began the run",
    Code.BROADCAST: "it does not take this model",
    Code.STATE: "a stored state is missing or damaged",
    Code.DISK: "its folder cannot be written",
    Code.UNCOVERED: "the order asks for quantities that no noise covers",
    Code.BUDGET: "the order does not suit its privacy budget",
    Code.QUOTA: "the order exceeds a quota of the owner",
    Code.FAILED: "its work raised an exception",
    Code.STOPPED: "it has stopped, and waits for its owner",
}
"""What the server's people read for each code."""


def reason_in(facts: Mapping[str, Any]) -> str:
    """The reason in an answer without a result, in words of the server's own."""
    if facts.get("status") == "left out":
        return {
            "diverged": "its update is not finite", "code": REASONS[Code.FAILED],
        }.get(str(facts.get("kind")), "it was left out")  # fmt: skip
    code = facts.get("code")
    if not isinstance(code, str) or code not in REASONS:
        return "it gave no answer to the order"
    return f"{REASONS[Code(code)]} ({code}); see the log of the node"


class Refusal(ConfigError):
    """Raised where a node refuses an order; the server learns the code, the node's owner the sentence."""

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def code_of(error: Exception) -> Code:
    """The code of an error.

    >>> [str(code_of(kind("the value is 'Smith'"))) for kind in (DataError, ClientError, KeyError)]
    ['data', 'failed', 'failed']
    """
    if isinstance(error, Refusal):
        return error.code
    kinds = {
        WireError: Code.MESSAGE, DataError: Code.DATA, CheckpointError: Code.STATE, ClientError: Code.FAILED,
        FedLoomError: Code.SETTINGS,
    }  # fmt: skip
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), Code.FAILED)


class NodeRequest(NamedTuple):
    """A message to one node: the order is for it alone, the broadcast is the same bytes for many nodes."""

    order: bytes
    broadcast: bytes = b""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.order) + len(self.broadcast)


@dataclass(frozen=True)
class Order:
    """An order to a node.

    Args:
        ticket: 32 random hexadecimal digits; the answer repeats them. The same ticket is the same message again.
        do: the requested work: any of ``join``, ``losses`` or ``validation_losses``, ``work`` and ``evaluate``.
        assignment: the node's part in the run, see ``Assignment``.
        level: the level of the model that is sent, if clients train networks of different size.
        base: the version of the client's state that counted last; None if none did.
        oldest: completed rounds of the oldest checkpoint of the server.
    """

    ticket: str
    do: tuple[str, ...]
    assignment: Mapping[str, Any]
    level: int = 0
    base: str | None = None
    oldest: int = 0

    def __post_init__(self) -> None:
        if not TICKET.fullmatch(self.ticket):
            raise WireError("an order has no ticket of 32 hexadecimal digits.")
        if self.base is not None and not FILE.fullmatch(f"{self.base}.counted"):
            raise WireError("an order names no version as its base.")
        if not self.do or not set(self.do) <= {JOIN, LOSSES, VALIDATION_LOSSES, WORK, EVALUATE}:
            raise WireError(f"an order asks for {', '.join(self.do) or 'nothing'}, which this node does not know.")

    def packed(self) -> bytes:
        """The order as a message."""
        return pack("order", vars(self))

    @classmethod
    def read(cls, blob: bytes, limit: int) -> Order:
        """Read the order in a message.

        Raises:
            WireError: if the message is not an order.
        """
        packet = unpack(blob, limit)
        if packet.kind != "order":
            raise WireError(f"a message is an {packet.kind[:20]!r} where an order is expected.")
        parameters = signature(cls)
        try:
            return cls(**from_plain(parameters, validate("an order", "", parameters, packet.facts)))
        except ConfigError as error:
            raise WireError(str(error)) from error


def pack_broadcast(down: Broadcast) -> bytes:
    """A broadcast as a message; the numbers of the other clients of the cohort stay at the server."""
    tensors = {"theta": down.theta, "buffers": down.buffers}
    tensors |= {f"parts|{key}": value for key, value in flat(down.parts).items()}
    return pack("broadcast", {"round": down.round, "lr": down.lr}, tensors)


def read_broadcast(blob: bytes, limit: int) -> Broadcast:
    """The broadcast in a message.

    Raises:
        WireError: if the message is not a broadcast.
    """
    packet = unpack(blob, limit)
    round, lr = packet.facts.get("round"), packet.facts.get("lr")
    valid = packet.kind == "broadcast" and {"theta", "buffers"} <= packet.tensors.keys()
    if not valid or not is_count(round) or round >= 10**9 or not is_number(lr, -1e300, 1e300):
        raise WireError("a message holds no broadcast.")
    return Broadcast(round, float(lr), packet.tensors["theta"], packet.tensors["buffers"], tree(packet, "parts"))


def tree(packet: Packet, name: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of a packet whose names begin with ``name|``, by place and name."""
    prefix = f"{name}|"
    tensors = {key.removeprefix(prefix): t for key, t in packet.tensors.items() if key.startswith(prefix)}
    if any("|" not in key for key in tensors):
        raise WireError(f"a message holds {name} without places.")
    return nested(tensors)


def is_moderate(values: Tensor) -> bool:
    """Whether all real numbers are finite and at most ``MODERATE`` in size."""
    return not values.is_floating_point() or bool((values.abs() <= MODERATE).all())  # NaN is not


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
