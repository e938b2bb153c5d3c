"""Blobs inside Flower's messages."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

KEY = "blob"
WHOLE = 4 << 20  # bytes up to which a blob is one object, which is one request; larger ones are cut into chunks


def content(blobs: Mapping[str, bytes]) -> RecordDict:
    """Named blobs as the content of a message; equal blobs are stored once, for however many nodes."""
    return RecordDict({name: _record(blob) for name, blob in blobs.items() if blob})


def _record(blob: bytes) -> Any:
    if len(blob) <= WHOLE:
        return ConfigRecord({KEY: blob})
    return ArrayRecord({KEY: Array("uint8", (len(blob),), "bytes", blob)})


def blobs(message: Message) -> dict[str, bytes]:
    """The named blobs in a message; empty for any other content."""
    content: dict[str, bytes] = {}
    for name, record in (message.content if message.has_content() else {}).items():
        value: Any = record.get(KEY)
        value = value.data if isinstance(value, Array) else value
        if isinstance(value, bytes):
            content[name] = value
    return content
