"""Blobs inside Flower's messages."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

KEY = "blob"
PIECE = 4 << 20  # bytes of a blob in one object, which is one request
SALT = 16  # bytes before each piece


def content(blobs: Mapping[str, bytes], salt: bytes = bytes(SALT)) -> RecordDict:
    """Named blobs as the content of a message.

    Args:
        blobs: the blobs.
        salt: random bytes, if nobody is to know the hashes of pieces beforehand, by which the SuperLink stores them.
            With the same salt equal blobs are stored once, for however many nodes.
    """
    return RecordDict({name: _record(blob, salt) for name, blob in blobs.items() if blob})


def _record(blob: bytes, salt: bytes) -> Any:
    if len(blob) <= PIECE:
        return ConfigRecord({KEY: salt + blob})
    pieces = [salt + blob[at : at + PIECE] for at in range(0, len(blob), PIECE)]
    return ArrayRecord({f"{n:06d}": Array("uint8", (len(piece),), "bytes", piece) for n, piece in enumerate(pieces)})


def inflated(number: str, contents: dict[str, bytes]) -> Message:
    """The message with this number, given the bytes of its parts; raises whatever Flower raises for other bytes.

    Raises:
        ValueError: if arrays repeat parts, and would so take memory without a limit, or it is no message.
    """
    size = 0  # of all arrays
    for part in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(part)
        if kind == Array.__qualname__:
            chunks = json.loads(get_object_body(part, Array))["arraychunk_ids"]
            size += sum(len(contents[children[chunk]]) for chunk in chunks)
    if size > sum(map(len, contents.values())):
        raise ValueError("its arrays repeat parts")
    message = inflate_object_from_contents(number, contents)
    if not isinstance(message, Message):
        raise ValueError("it is no message")
    return message


def blob_in(message: Message, name: str, most: float) -> bytes:
    """The blob of this name in a message; empty if there is none.

    Raises:
        ValueError: if it has more than ``most`` bytes.
    """
    record = message.content.get(name, {}) if message.has_content() else {}
    values = [value.data if isinstance(value, Array) else value for _, value in sorted(record.items())]
    pieces = [value for value in values if isinstance(value, bytes)]
    if sum(map(len, pieces)) > most + SALT * len(pieces):  # a record may name the same piece many times
        raise ValueError(f"it has more than {most:,} bytes")
    return b"".join(memoryview(piece)[SALT:] for piece in pieces)
