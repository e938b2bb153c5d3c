"""Settings of the machine that make runs reproducible and fast on a CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedloom.core.errors import ConfigError, nearest

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread a process inside the block: faster on small models, and sums have one order on all engines.

    Also asks glibc's allocator to keep freed memory, since returning every activation to the system costs more than
    computing it; this stays in force.
    """
    if sys.platform == "linux":
        try:
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        except (OSError, AttributeError):  # another C library: only slower
            pass
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pick_device(wanted: str) -> str:
    """``auto`` means a GPU if there is one.

    Raises:
        ConfigError: for a device that is unknown or not here.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = wanted.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {wanted!r}; {nearest(wanted, ('auto', 'cpu', 'cuda'))}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {wanted!r} on this machine; choose device=auto or cpu.")
    return wanted
