"""Files that others may read at any time: atomic writes, locks of folders, and tensors by name with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedloom.base import files
from fedloom.base.errors import CheckpointError

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on Windows


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
    """Append to a file, which must not be a link; with ``sync``, wait until it is on disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NOFOLLOW, 0o644), "a") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def refuse_link(path: Path, writer: str) -> None:
    """Raise ``CheckpointError`` for a symbolic link in a folder that may be a stranger's: writes would follow it."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link, through which {writer} would write; remove it.")


def discard(path: Path) -> None:
    """Delete a file; ignore errors."""
    with contextlib.suppress(OSError):
        os.remove(path)


def as_file(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Serialise named tensors, and texts about them, as the content of a safetensors file."""
    plain = torch.contiguous_format
    return save_tensors(
        {k: v.detach().cpu().clone(memory_format=plain).contiguous() for k, v in tensors.items()}, metadata
    )


fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not Unix: no lock between processes
    fcntl = None

NAME = ".lock"
PATIENCE = 0.5  # seconds to wait for a process that was just killed

_handles: dict[Path, int] = {}  # lock file -> its handle


class Lock:
    """An exclusive lock on a folder, within this process and between processes.

    The system releases it when the process ends, however it ends: a leftover file locks nothing. On file systems
    without locks it only works within this process.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> lock = Lock(Path(folder.name))
    >>> Lock(Path(folder.name))
    Traceback (most recent call last):
    ...
    fedloom.base.errors.CheckpointError: ... is in use by this process already; wait until that run has ended.
    >>> lock.release()
    >>> folder.cleanup()

    Args:
        folder: an existing folder.

    Raises:
        CheckpointError: if the folder is locked; the message has the holder's process id and machine.
        OSError: if the lock file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / NAME
        if self.path in _handles:
            raise CheckpointError(f"{folder} is in use by this process already; wait until that run has ended.")
        deadline = time.monotonic() + PATIENCE
        while (handle := self._open()) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{folder} is in use by {self._holder()}; wait until it has ended, or end it.")
            time.sleep(0.02)
        _handles[self.path] = handle
        with contextlib.suppress(OSError):  # a full disk: the text is for messages alone
            os.truncate(handle, 0)
            os.write(handle, f"{os.getpid()} on {platform.node()}\n".encode())

    @staticmethod
    def may_be_held(folder: Path) -> bool:
        """Whether another process has a folder locked; True where that cannot be known."""
        try:
            handle = os.open(folder / NAME, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return fcntl is None
        except OSError:  # held, or a file system without locks
            return True
        finally:
            os.close(handle)

    def _open(self) -> int | None:
        """The handle of the file, locked; None if another process has the lock."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o644)
        if fcntl is None:
            return handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # a file system without locks
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(self.path)):
                return handle
        os.close(handle)  # the previous holder has removed the file in the meantime
        return None

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            if re.fullmatch(r"\d+ on [\w.-]+", holder := self.path.read_text().strip()):
                return f"process {holder}"
        return "another process"

    def release(self) -> None:
        """Release the lock."""
        handle = _handles.pop(self.path, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(handle)


def _forget() -> None:
    """Drop inherited locks in a forked child, which might outlive its parent."""
    for handle in _handles.values():
        os.close(handle)
    _handles.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


SUM = "sha256"


def as_model_file(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file with these tensors; its metadata hold their checksum."""
    return as_file(dict(tensors), {SUM: checksum(tensors)})


def read_model_file(path: Path) -> dict[str, Tensor]:
    """The tensors of such a file, or of any safetensors file without a checksum.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = path.write_bytes(as_model_file({"w": torch.ones(2)}))
    >>> read_model_file(path)
    {'w': tensor([1., 1.])}
    >>> _ = path.write_bytes(path.read_bytes()[:-1] + b"!")
    >>> read_model_file(path)
    Traceback (most recent call last):
    ...
    safetensors...SafetensorError: its numbers are not those that were written

    Raises:
        OSError: if it cannot be read.
        SafetensorError: if it is damaged.
    """
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(SUM)
    tensors = load_file(path)
    if expected is not None and checksum(tensors) != expected:
        raise SafetensorError("its numbers are not those that were written")
    return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of tensors with their names, types and shapes, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        for part in (f"{name};".encode(), *content(value)):
            digest.update(part)
    return digest.hexdigest()


def content(value: Tensor) -> tuple[bytes, memoryview]:
    """Type and shape of a tensor as text, and its bytes."""
    return f"{value.dtype}{tuple(value.shape)}".encode(), raw(value).data


def raw(value: Tensor) -> np.ndarray:
    """The bytes of a tensor, uint8; those of a contiguous one on the host are not copied."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
