"""The wire format of deployments: facts as JSON and tensors as safetensors in one blob, which is data and never code.

::

    "fedloom", 0 | version, uint16 | length of the JSON, uint32 | JSON {"kind": ..., "facts": {...}} | safetensors

Numbers are little-endian. Whatever a blob holds, reading it ends in a ``Packet`` or a ``WireError``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.base.errors import FedLoomError, in_one_line
from fedloom.base.tree import fresh_copy
from fedloom.experiment.atomic import as_file

MAGIC, VERSION = b"fedloom\0", 1
START = struct.Struct("<8sHI")
LIMIT = 1 << 30  # bytes of a message, unless a deployment sets another limit
FACTS = 1 << 24  # bytes of its JSON
DEEPEST = 32  # lists and mappings in one another
MOST = 2**40  # what numbers in answers stay below, so that they can be summed
LARGEST_LOSS = 1e30  # likewise losses, and metrics without a smaller bound


class WireError(FedLoomError, ValueError):
    """Raised for a message that cannot be read, or must not be accepted."""


class Packet(NamedTuple):
    """A message."""

    kind: str
    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def pack(kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Encode a message."""
    text = json.dumps({"kind": kind, "facts": facts}, separators=(",", ":")).encode()
    return START.pack(MAGIC, VERSION, len(text)) + text + as_file(dict(tensors or {}))


def unpack(blob: bytes, limit: float = LIMIT) -> Packet:
    """Decode a message.

    Raises:
        WireError: if it is longer than ``limit`` bytes, of another version, or damaged.
    """
    if len(blob) > limit:
        raise WireError(f"a message has {len(blob):,} bytes, but at most {limit:,} are allowed; raise deploy.limit.")
    if len(blob) < START.size or blob[: len(MAGIC)] != MAGIC:
        raise WireError(f"a message of {len(blob)} bytes is not one of FedLoom.")
    _, version, length = START.unpack_from(blob)
    if version != VERSION:
        raise WireError(
            f"a message is of version {version}, but this FedLoom reads version {VERSION}; install the same FedLoom "
            "at the server and at all nodes."
        )
    if length > FACTS:
        raise WireError(f"a message is damaged: it announces {length:,} bytes of facts.")
    end = START.size + length
    try:
        content = json.loads(blob[START.size : end])
        kind, facts = content["kind"], content["facts"]
        if not isinstance(kind, str) or not isinstance(facts, dict):
            raise TypeError("it names no kind, or holds no facts")
        _check_depth(facts)
        tensors = {name: fresh_copy(t) for name, t in load_tensors(blob[end:]).items()}
    except Exception as error:  # each reader fails in its own ways
        raise WireError(f"a message is damaged: {in_one_line(error)}.") from error
    return Packet(kind, facts, tensors)


def _check_depth(facts: dict[str, Any]) -> None:
    """Raise a ``ValueError`` for facts on which other functions would exceed Python's recursion limit."""
    values: list[Any] = [facts]
    for _ in range(DEEPEST):
        children = [
            value.values() if isinstance(value, dict) else value for value in values if isinstance(value, dict | list)
        ]
        if not (values := [*chain.from_iterable(children)]):
            return
    raise ValueError(f"its facts are more than {DEEPEST} lists in one another")


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a fact is a number of samples, parameters or bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def is_number(value: Any, least: float = -LARGEST_LOSS, most: float = LARGEST_LOSS) -> TypeGuard[float]:
    """Whether a fact is a number within these bounds, and not NaN.

    >>> is_number(0.5, 0, 1), is_number(float("nan")), is_number(True), is_number(10**400)
    (True, False, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
