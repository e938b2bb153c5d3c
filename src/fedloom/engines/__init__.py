"""Interpreters of client work: serial, processes, vmap. All do the same work on the same batches."""

from __future__ import annotations

from collections.abc import Callable

from fedloom.core.plan import Plan
from fedloom.core.registry import Registry
from fedloom.core.round import Engine

engines: Registry[Callable[[Plan], Engine]] = Registry("engine")


@engines.register
def serial() -> Callable[[Plan], Engine]:
    """The reference: one client after the other in one live module, on the CPU or a GPU."""
    from fedloom.engines.serial import Serial

    return Serial


@engines.register
def processes(workers: int = 0) -> Callable[[Plan], Engine]:
    """A process a core on the CPU, data and weights in shared memory; bit for bit the serial engine's results.

    Args:
        workers: number of processes; 0 takes one for each core this process may use.
    """
    from fedloom.engines.processes import Processes

    return lambda plan: Processes(plan, workers)


@engines.register
def vmap(chunk: int = 0, compile: bool = False) -> Callable[[Plan], Engine]:
    """A cohort at once with ``torch.func.vmap``, padded and masked; equal to serial within float tolerance.

    Args:
        chunk: clients at once; 0 takes the whole cohort.
        compile: whether to compile the step with ``torch.compile`` (pays on small models and long runs).
    """
    from fedloom.compute.batched import Vmap

    return lambda plan: Vmap(plan, chunk, compile)
