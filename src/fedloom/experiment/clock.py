"""The durations of client work: what each client computes and sends, on its device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.tree import nbytes
from fedloom.compute.live import Live
from fedloom.core.timeline import Timeline
from fedloom.models.classifier import Operations
from fedloom.rounds.exchange import State
from fedloom.rounds.meeting import heard_by
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server, first_state
from fedloom.timing.devices import Devices, Fleet

LONGEST = 1e15  # seconds of a client's work, thirty million years
EVALUATION = 1 / 3  # of the operations of a step, which are a forward and a backward pass


class WorkParts(NamedTuple):
    """The seconds that clients spend on each part of their work, float64 [clients] each."""

    latency: np.ndarray
    down: np.ndarray
    computing: np.ndarray
    up: np.ndarray


class Outlook(NamedTuple):
    """A run on the clock, before anything is trained.

    Attributes:
        steps: its server steps.
        clock: the seconds until the last of them.
        utilisation: the share of the places at work, over all that time, that held work which counts.
        wasted: the share of all work that is thrown away.
        versions: the largest number of versions that clients are at work on after a step.
        version_bytes: the size of a version, with what clients download beside the model.
    """

    steps: int
    clock: float
    utilisation: float
    wasted: float
    versions: int
    version_bytes: int

    @classmethod
    def of(cls, timeline: Timeline, steps: int, version_bytes: int) -> Outlook:
        """The outlook on the first ``steps`` steps of a timeline."""
        work = lost = clock = 0.0
        versions = 0
        for number in range(steps):
            step = timeline.step(number)
            durations = step.end - step.begin
            work, lost, clock = work + float(durations.sum()), lost + float(durations[step.late].sum()), step.clock
            versions = max(versions, len(step.in_flight))
        places = clock * timeline.world.size
        shares = ((work - lost) / places if places else 0.0, lost / work if work else 0.0)
        return cls(steps, clock, *shares, versions, version_bytes)


@dataclass(frozen=True)
class Clock:
    """The duration of each client's work, as a function of (seed, client, version) alone.

    Attributes:
        devices: the devices.
        plan: the client plan.
        macs: multiply-accumulate operations of a local step for a sample, forward and backward, by level.
        down: bytes that a client receives, by level.
        up: bytes that a client sends, by level.
        fixed: bytes that a client's work takes, whatever its mini-batches, by level: what it receives, its state, the
            model, its gradient and the optimiser's moments.
        sample: bytes that a sample of a mini-batch takes, by level: the outputs of all layers.
    """

    devices: Devices
    plan: ClientPlan
    macs: np.ndarray
    down: np.ndarray
    up: np.ndarray
    fixed: np.ndarray
    sample: np.ndarray

    @classmethod
    def of(cls, devices: Devices, plan: ClientPlan, server: Server) -> Clock:
        """The clock of a run: one client of each level does one local step, whose operations and bytes are counted."""
        trials = np.array([_trial(plan, level, server) for level in range(len(plan.levels))])
        return cls(devices, plan, *trials.T)

    @cached_property
    def fleet(self) -> Fleet:
        """The devices of the clients."""
        return self.devices.fleet(self.plan.population.clients, self.plan.seed)

    @cached_property
    def memory(self) -> np.ndarray:
        """Bytes that each client's work takes, float64 [K]."""
        plan, sizes = self.plan, self.plan.population.sizes
        settings = [plan.at(client).local for client in range(plan.population.clients)]
        most = [local.micro_batch or local.batch_size or n for local, n in zip(settings, sizes.tolist(), strict=True)]
        return self.fixed[plan.level] + self.sample[plan.level] * np.minimum(most, sizes)

    @cached_property
    def fits(self) -> np.ndarray:
        """Whether each client's device has the memory for its work, bool [K]; the others are never invited."""
        if np.isinf(self.fleet.memory).all():
            return np.ones(len(self.fleet.memory), dtype=bool)
        fits = self.memory <= self.fleet.memory
        if not fits.any():
            raise ConfigError(
                f"no device has the memory that its client's work takes, {self.memory.min() / 1e6:.3g} MB or more; "
                "raise devices.memory, or choose a smaller model or mini-batch."
            )
        return fits

    @cached_property
    def invited(self) -> np.ndarray:
        """Whether each client is ever invited, bool [K]: its device has the memory, and is there at some time."""
        return self.fits & self.devices.ever_present(self.plan.population.clients)

    def _samples(self, clients: np.ndarray, version: int | None = None) -> np.ndarray:
        """Samples in the local steps of clients on a version, or as usual without stragglers; float64 [clients]."""
        plan, samples = self.plan, np.empty(len(clients))
        for row, (client, n) in enumerate(zip(clients.tolist(), plan.population.sizes[clients].tolist(), strict=True)):
            local = plan.at(client).local
            steps = local.steps_for(n) if version is None else local.steps_of(n, plan.seed, version, client)
            samples[row] = steps * n / (ceil(n / local.batch_size) if local.batch_size else 1)
        return samples

    def seconds(self, clients: np.ndarray, version: int) -> np.ndarray:
        """The durations of the work of clients on a version, float64 [clients]."""
        return self._seconds(
            clients, self._samples(clients, version), self.devices.noise(clients, version, self.plan.seed)
        )

    def expected(self) -> np.ndarray:
        """The durations of all clients without stragglers and noise, float64 [K]."""
        clients = np.arange(self.plan.population.clients)
        return self._seconds(clients, self._samples(clients), np.ones(len(clients)))

    def parts(self, clients: np.ndarray, samples: np.ndarray | None = None) -> WorkParts:
        """What clients spend their time on, without noise; as usual if no ``samples`` are given."""
        plan, level = self.plan, self.plan.level[clients]
        samples = self._samples(clients) if samples is None else samples
        if plan.method.needs("losses"):
            samples = samples + EVALUATION * plan.population.sizes[clients]
        speed, down, up, latency = (values[clients] for values in self.fleet[:4])
        return WorkParts(2 * latency, self.down[level] / down, samples * self.macs[level] / speed, self.up[level] / up)

    def _seconds(self, clients: np.ndarray, samples: np.ndarray, noise: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            parts = self.parts(clients, samples)
            seconds = parts.latency + parts.down + parts.computing * noise + parts.up
        if not (seconds < LONGEST).all():
            client = clients[np.argmin(seconds < LONGEST)]
            raise ConfigError(
                f"the work of client {client} takes its device more than {LONGEST:g} seconds; choose larger speed, "
                "down and up, or smaller latency and jitter, of devices."
            )
        return seconds

    def punctual(self, clients: np.ndarray, seconds: float) -> np.ndarray:
        """The probability that work takes at most so many seconds, over the noise of computing, float64 [clients]."""
        from scipy.special import ndtr  # slow to import

        samples = self._samples(clients)
        idle = self._seconds(clients, samples, np.zeros(len(clients)))
        computing = self._seconds(clients, samples, np.ones(len(clients))) - idle
        with np.errstate(divide="ignore", invalid="ignore"):
            spare = np.log(np.maximum(seconds - idle, 0.0) / computing)
            if not self.devices.jitter:
                return (spare >= 0).astype(np.float64)
            return ndtr(spare / self.devices.jitter)

    @property
    def conditions(self) -> dict[str, Any]:
        """What a schedule knows besides durations."""
        devices, seed, clients, fits = self.devices, self.plan.seed, self.plan.population.clients, self.fits
        conditions: dict[str, Any] = {"expected": self.expected}
        if not self.plan.local.stragglers:
            conditions["punctual"] = self.punctual
        if devices.always:
            return conditions
        return conditions | {
            "available": lambda candidates, time: devices.present(candidates, time, seed) & fits[candidates],
            "change": lambda time: devices.change(time, clients, seed),
        }


def _trial(plan: ClientPlan, level: int, server: Server) -> tuple[float, float, float, float, float]:
    """Operations of a step for a sample, bytes down and up, and the memory of a client of a level: fixed, a sample.

    Nothing of a run depends on the trial but its clock; where it fails, so does the first round, with its reason.
    """
    members = np.flatnonzero(plan.level == level)
    level_plan = plan.levels[level]
    down = server.broadcast(plan).at(level_plan)
    received = down.nbytes
    if not len(members):
        return 1.0, received, received, received, 0.0
    client = int(members[np.argsort(plan.population.sizes[members], kind="stable")[len(members) // 2]])
    if server.models is not None:
        model = int(plan.model_of[client])
        heard = heard_by(plan, server)(model) if plan.method.needs("heard") else None
        down = replace(server.model(model).broadcast(plan), heard=heard)
        received = down.nbytes
    trial_plan = replace(level_plan, local=replace(level_plan.local, steps=1, epochs=1, stragglers=0.0))
    state: State = first_state(trial_plan, down.theta)
    outputs: list[int] = []

    def keep(module: nn.Module, inputs: object, output: object) -> None:
        if next(module.children(), None) is None:
            outputs.extend(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    hook = register_module_forward_hook(keep)
    try:
        with rng.restore_generators(), Operations() as counter:
            fold = Live(trial_plan).fold(replace(down, invited=(client,)), [client], [state], np.ones(1))
    finally:
        hook.remove()
    samples = len(trial_plan.batches(0, client)[0])
    operations = counter.total / 2 / max(samples, 1)
    copies = 2 + trial_plan.local.memory  # the model, its gradient and the moments
    fixed = received + sum(map(nbytes, state.values())) + copies * down.theta.nbytes
    return max(operations, 1.0), received, fold.traffic.bytes or received, fixed, sum(outputs) / max(samples, 1)
