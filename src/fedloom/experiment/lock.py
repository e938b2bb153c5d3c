"""Locks: one run at a time in a folder."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import ModuleType

from fedloom.core.errors import CheckpointError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not Unix: no lock between processes
    fcntl = None

NAME = ".lock"
PATIENCE = 0.5  # seconds to wait for a process that was just killed

_held: dict[Path, int] = {}  # lock file -> its handle


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
    fedloom.core.errors.CheckpointError: ... is in use by this process already; wait until that run has ended.
    >>> lock.release()
    >>> folder.cleanup()

    Args:
        folder: an existing folder.

    Raises:
        CheckpointError: if the folder is locked; the message has the process id of the holder.
        OSError: if the lock file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / NAME
        if self.path in _held:
            raise CheckpointError(f"{folder} is in use by this process already; wait until that run has ended.")
        deadline = time.monotonic() + PATIENCE
        while (handle := self._open()) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{folder} is in use by {self._holder()}; wait until it has ended, or end it.")
            time.sleep(0.02)
        _held[self.path] = handle
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())

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
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
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
            if (number := self.path.read_text().strip()).isdecimal():
                return f"process {number}"
        return "another process"

    def release(self) -> None:
        """Release the lock."""
        handle = _held.pop(self.path, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(handle)


def _forget() -> None:
    """Drop inherited locks in a forked child, which might outlive its parent."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
