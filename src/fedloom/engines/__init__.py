"""Engines run clients' work: any engine takes any compute, and gives the same bits for it."""

from __future__ import annotations

import os
from functools import partial

from fedloom.core.engine import ComputeFactory, Engine, EngineFactory
from fedloom.core.plan import ClientPlan
from fedloom.core.registry import Registry

engines: Registry[EngineFactory] = Registry("engine")

STEP_SECONDS, FLOPS = 3e-4, 5e9  # what a local step costs at least, and a core's rate on small networks
WORTH_FORKING = 1.0  # seconds of work in the whole run


@engines.register
def auto() -> EngineFactory:
    """Choose processes where there are several cores and the run is long enough for them, and serial otherwise."""

    def choose(plan: ClientPlan, compute: ComputeFactory) -> Engine:
        name = "processes" if can_fork(plan.device) and seconds(plan) > WORTH_FORKING else "serial"
        return engines.make(name)(plan, compute)

    return choose


def can_fork(device: str) -> bool:
    """Whether processes can share the work: several cores, a system that forks, and data on the CPU."""
    from fedloom.engines.processes import reason_against_forking

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return device == "cpu" and cores > 1 and reason_against_forking() is None


def seconds(plan: ClientPlan) -> float:
    """A low estimate of a run's work on one core."""
    samples = round(plan.mean_size)
    steps = plan.local.steps_for(samples)
    flops = 6 * plan.layout.size * (plan.local.batch_size or samples)
    return plan.rounds * plan.cohort * steps * (STEP_SECONDS + flops / FLOPS)


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
