"""One run at a time in a folder."""

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
except ImportError:  # no Unix: nobody is kept out
    fcntl = None

NAME = ".lock"
PATIENCE = 0.5  # seconds: a process that was killed a moment ago may not be gone

_held: dict[Path, int] = {}  # the files' handles


class Lock:
    """Keeps everybody else out of a folder, in this process and in others.

    The system releases it when the process ends, however it ends: a file that was left behind locks nothing. Where a
    file system has no locks, only this process is kept out.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> lock = Lock(Path(folder.name))
    >>> Lock(Path(folder.name))
    Traceback (most recent call last):
    ...
    fedloom.core.errors.CheckpointError: ... is in use by this very process; wait until that run has ended.
    >>> lock.release()
    >>> folder.cleanup()

    Args:
        folder: a folder that is there.

    Raises:
        CheckpointError: if somebody is in it already; the sentence has the number of the process.
        OSError: if its file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / NAME
        if self.path in _held:
            raise CheckpointError(f"{folder} is in use by this very process; wait until that run has ended.")
        deadline = time.monotonic() + PATIENCE
        while (handle := self._open()) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{folder} is in use by {self._holder()}; wait until it has ended, or end it.")
            time.sleep(0.02)
        _held[self.path] = handle
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())

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
        os.close(handle)  # whoever had it before has removed the file in between
        return None

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            if (number := self.path.read_text().strip()).isdecimal():
                return f"process {number}"
        return "another process"

    def release(self) -> None:
        """Let others in again."""
        handle = _held.pop(self.path, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(handle)


def _forget() -> None:
    """A forked child holds no locks: one that outlives its parent must not keep anybody out."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
