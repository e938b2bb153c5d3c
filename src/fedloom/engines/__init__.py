"""Engines decide where client work runs: in this process, in several, or on a cluster; results are bitwise the same.

A new way to distribute clients belongs here: an ``Engine`` (``rounds.engine``) and a registered factory. Engines know
neither methods nor models; how a block of clients is stepped is a *compute*.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Literal

import numpy as np

from fedloom.applications import at
from fedloom.base.errors import ClientError, ConfigError
from fedloom.base.registry import Registry
from fedloom.core.missing_needs import as_loss_error
from fedloom.rounds.aggregate import Fold
from fedloom.rounds.engine import ComputeFactory, Engine, EngineFactory, Group, States
from fedloom.rounds.exchange import Broadcast
from fedloom.rounds.plan import ClientPlan

engines: Registry[EngineFactory] = Registry("engine")

STEP_SECONDS, FLOPS = 3e-4, 5e9  # overhead of a local step; FLOP/s of a core on small networks
WORTH_FORKING = 1.0  # seconds of work in the whole run above which processes pay off
WORTH_SPAWNING = 30.0  # likewise where each of them has to import PyTorch


@engines.register
def auto() -> EngineFactory:
    """Choose ``processes`` if it can be used, there are several cores and the run is long enough, else ``serial``."""

    def choose(plan: ClientPlan, compute: ComputeFactory) -> Engine:
        from fedloom.engines.processes import count_cores, reason_against_forking

        work = seconds(plan) if plan.device == "cpu" and count_cores() > 1 else 0.0
        forks = work > WORTH_FORKING and reason_against_forking() is None
        if forks or work > WORTH_SPAWNING:
            with nullcontext() if forks else suppress(ConfigError):  # of what cannot be sent to other processes
                return engines.make("processes")(plan, compute)
        return engines.make("serial")(plan, compute)

    return EngineFactory(choose)


def seconds(plan: ClientPlan) -> float:
    """A lower estimate of the run's work on one core, in seconds."""
    samples = round(plan.population.mean_size)
    steps = plan.local.steps_for(samples)
    flops = 6 * plan.layout.size * (plan.local.batch_size or samples)
    return plan.rounds * plan.cohort * steps * (STEP_SECONDS + flops / FLOPS)


@engines.register
def serial() -> EngineFactory:
    """Run blocks of clients one after the other in this process, on the CPU or a GPU."""

    return EngineFactory(Serial, Serial.traits)


@engines.register
def processes(
    workers: int = 0, start: Literal["auto", "fork", "spawn"] = "auto", devices: tuple[str, ...] = ()
) -> EngineFactory:
    """Run one process per core or GPU with data and weights in shared memory; results equal ``serial`` bitwise.

    Args:
        workers: number of processes; 0 means one per core available to this process, or one per GPU.
        start: ``fork`` copies this process, which takes no time; ``spawn`` starts each afresh, which takes seconds;
            ``auto`` forks where that is safe, not on macOS, Windows, or after a backward pass where PyTorch sees a GPU.
        devices: GPUs that processes work on in turn, like ``[cuda:0,cuda:1]``; by default they work on the CPU. Results
            have the same bits for any number of them.
    """
    from fedloom.engines.processes import Processes

    return EngineFactory(partial(Processes, workers=workers, start=start, devices=devices), Processes.traits)


engines.register_loader("ray", lambda: at("fedloom_apps.ray.engine:ray"), "fedloom_apps.ray.engine.ray")


class Serial(Engine):
    """The single-process engine, for the CPU or a GPU."""

    def __init__(self, plan: ClientPlan, compute: ComputeFactory) -> None:
        self.computes = [compute(level) for level in plan.levels]
        self.joint = self.computes[0].joint

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        for number, group in enumerate(groups):
            compute = self.computes[group.level]
            for block in group.blocks(compute):
                members = group.clients[block.start : block.stop].tolist()
                part = None if group.weights is None else group.weights[block.start : block.stop]
                yield number, compute.fold(group.down, members, [group.states(client) for client in members], part)

    def losses(
        self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0, on_validation: bool = False
    ) -> np.ndarray:
        work = partial(self.computes[level].losses, down, clients, states, on_validation)
        if isinstance(error := as_loss_error(work), ClientError):
            raise error
        return error
