"""The runtime environment: threads, allocator, device, and a record of versions."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fedloom.base.determinism import exact_gpu, prepare_gpu
from fedloom.base.errors import ConfigError, nearest

PACKAGES = ("fedloom", "torch", "numpy", "scipy", "pyyaml", "safetensors", "pyarrow")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
THRESHOLD = 128 * 1024
"""Bytes from which glibc returns freed memory to the system, unless told otherwise."""
_keeping = 0


@contextmanager
def reproducible() -> Iterator[None]:
    """Compute the same bits every time: with one thread, and on a GPU with deterministic kernels in full precision.

    One thread is also faster for small models, and adds in the same order on all engines. ``exact_gpu`` has the GPU's
    settings.

    Meanwhile glibc's allocator keeps freed memory, see ``keeping_memory``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with keeping_memory(), exact_gpu():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def keeping_memory() -> Iterator[None]:
    """Let glibc's allocator keep freed memory: returning every activation to the system costs more than computing it.

    After the outermost block the thresholds are glibc's own again, and what was kept is returned.
    """
    global _keeping
    try:
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        libc = libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except OSError:
        libc = None  # another C library: slower, but correct
    if libc is not None and not _keeping:
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    _keeping += 1
    try:
        yield
    finally:
        _keeping -= 1
        if libc is not None and not _keeping:
            libc.mallopt(M_MMAP_THRESHOLD, THRESHOLD)
            libc.mallopt(M_TRIM_THRESHOLD, THRESHOLD)
            libc.malloc_trim(0)


@contextmanager
def own_draws() -> Iterator[None]:
    """Restore PyTorch's global random streams afterwards: computes seed them for a client's dropout."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        yield


def pick_device(name: str, among: Sequence[str] = ("cpu", "cuda")) -> str:
    """Resolve a device name; ``auto`` means a GPU if there is one, and ``gpu`` is ``cuda``.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        among: the kinds of devices to choose from.
    """
    if name == "auto":
        name = "cuda" if "cuda" in among and torch.cuda.is_available() else "cpu"
    name = re.sub(r"^gpu(?=:|$)", "cuda", name)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"unknown device {name!r}; {nearest(name, ('auto', 'cpu', 'cuda', 'cuda:1'))}")
    kind, _, number = name.partition(":")
    if kind not in among:
        raise ConfigError(
            f"device={name}: this engine's main process works on the CPU; leave device out (workers get "
            "GPUs by engine.devices, with engine=ray by engine.gpus), or use engine=serial."
        )
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {name!r} on this machine; choose device=auto or cpu.")
    if kind == "cuda":
        prepare_gpu()
    return name


def reason_against_bf16(device: str) -> str | None:
    """The reason why bfloat16 products bring no gain on a device; None if they do."""
    if device.startswith("cuda"):
        return None if torch.cuda.is_bf16_supported(including_emulation=False) else "this GPU has no bfloat16"
    can = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if any(can.get(feature) for feature in ("avx512_bf16", "amx_bf16", "bf16")):  # the last one on ARM
        return None
    return "this processor does not multiply in bfloat16 (it has neither AVX512-BF16 nor AMX)"


def environment() -> dict[str, Any]:
    """Package versions, the machine with its GPU in use, and the git revision of the sources if they have one."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_initialized() else ""
    return {"versions": dict(_versions()), "machine": platform.machine() + gpu, "git": revision(Path(__file__))}


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@cache
def revision(file: Path) -> str | None:
    """The git revision of the repository that tracks a file; None if no repository tracks it.

    Git is asked once in a process, which goes on with the sources that it has loaded, whatever is committed later.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    answer = ""
    for words in (("ls-files", "--error-unmatch", file.name), ("rev-parse", "HEAD")):
        try:
            answer = subprocess.run(
                ["git", "-C", str(file.parent), *words],
                capture_output=True, text=True, check=True, timeout=10, env=environment,
            ).stdout.strip()  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return None
    return answer
