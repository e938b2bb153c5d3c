"""Atomic file writes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core import files

if TYPE_CHECKING:
    from torch import Tensor


def write_synced(path: Path, blob: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with files.new_file(path) as file:
        file.write(blob)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, blob: bytes, alone: bool = True) -> None:
    """Replace a file atomically: readers see either the old content or the new one.

    Args:
        path: the file.
        blob: the new content.
        alone: whether no other process, on any machine, may replace the file at the same time.
    """
    with files.replacement(path, alone) as part:
        write_synced(part, blob)


def append(path: Path, text: str, sync: bool = False) -> None:
    """Append to a file, which must not be a link; with ``sync``, wait until it is on disk.

    Raises:
        OSError: if it cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, 0o644), "a") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def discard(path: Path) -> None:
    """Delete a file; ignore errors."""
    with contextlib.suppress(OSError):
        os.remove(path)


def as_file(named: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Serialise named tensors, and texts about them, as the content of a safetensors file."""
    import torch  # slow to import, and the other functions do without
    from safetensors.torch import save as save_tensors

    plain = torch.contiguous_format
    return save_tensors(
        {k: v.detach().cpu().clone(memory_format=plain).contiguous() for k, v in named.items()}, metadata
    )
