"""Where clients' work runs. Every engine takes every compute, and gives the same bits for it."""

from __future__ import annotations

from functools import partial

from fedloom.core.engine import EngineFactory
from fedloom.core.registry import Registry

engines: Registry[EngineFactory] = Registry("engine")


@engines.register
def serial() -> EngineFactory:
    """Run one block of clients after the other in this process, on the CPU or a GPU."""
    from fedloom.engines.serial import Serial

    return Serial


@engines.register
def processes(workers: int = 0) -> EngineFactory:
    """Run a process a core on the CPU, data and weights in shared memory; bit for bit the serial engine's results.

    Args:
        workers: number of processes; 0 takes one for each core this process may use.
    """
    from fedloom.engines.processes import Processes

    return partial(Processes, workers=workers)
