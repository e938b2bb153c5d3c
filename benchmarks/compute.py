"""What a run costs with automatic engine and compute: methods against bare loops on every core.

    python benchmarks/compute.py [--repeats 5] [--only W1 W3 CNN models] [--methods fedavg feddyn] [--out FILE]

The floor is the plain FedAvg loop of ``benchmarks/engines.py``, shared out to one forked process a core with the model
and the sum of the updates in shared memory; FedDyn, SCAFFOLD and Ditto are compared with a loop of their own as well,
whose states are rows of shared memory. W1: TwoNN, 1000 clients of 60 samples, cohort 100, batch 10, 1 epoch.
W3: the same with a cohort of 10 and 5 epochs. CNN: FedDyn's, 100 clients of 500 images, cohort 10, batch 50, 1 epoch.
models: W1 with all 1000 clients in a round, each of which has a model of its own on a ring (``dfedavgm``).
All contestants take turns on the same cohort, of clients that have taken part before; a ratio compares two rounds of
one turn (above 1: faster than the loop) and is the median over turns, with the quartiles beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from engines import bare_round, rounds_of, stolen, workload
from record import machine, options, save
from torch import Tensor, nn

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.federation import Split
from fedloom.core.local import Local, draw_cohort
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.rounds.plan import ClientPlan

WORKLOADS = {"W1": ("W1", 100, 1), "W3": ("W1", 10, 5), "CNN": ("W2", 10, 1), "models": ("W1", 1000, 1)}
METHODS = ("fedavg", "fedavg, momentum", "fedprox", "feddyn", "scaffold", "ditto", "superfed_mm")
SEVERAL = ("dfedavgm",)  # what is timed where every client has a model
SEEN = 10  # cohorts of clients at most, each of which takes part once before
LOCALS = {"": {}, "momentum": {"momentum": 0.9}, "bf16": {"precision": "bf16"}}


class Floor:
    """The bare loop on one forked process a core."""

    def __init__(self, model: nn.Module, split: Split, local: Local, cores: int) -> None:
        self.model, self.split, self.cores = model.share_memory(), split, cores
        context = multiprocessing.get_context("fork")
        self.totals = [copy.deepcopy(model).share_memory() for _ in range(cores)]
        self.pipes = []
        for number in range(cores):
            parent_end, child_end = context.Pipe()
            context.Process(target=self._serve, args=(child_end, number, local), daemon=True).start()
            self.pipes.append(parent_end)

    def _serve(self, pipe, number: int, local: Local) -> None:
        torch.set_num_threads(1)
        while True:
            cohort, round = pipe.recv()
            self.totals[number].load_state_dict(self.model.state_dict())
            self.work(number, local, cohort, round)
            pipe.send(None)

    def work(self, number: int, local: Local, cohort: np.ndarray, round: int) -> None:
        """The share of one process: the mean of its clients' models, in place of the received one."""
        bare_round(self.totals[number], self.split, local, cohort, round)

    @torch.no_grad()
    def __call__(self, cohort: np.ndarray, round: int) -> None:
        """One round: the mean of the processes' means."""
        shares = np.array_split(cohort, self.cores)
        for pipe, share in zip(self.pipes, shares, strict=True):
            pipe.send((share, round))
        for pipe in self.pipes:
            pipe.recv()
        sizes = [self.split.index.sizes[share].sum() for share in shares]
        for target, *parts in zip(self.model.parameters(), *(t.parameters() for t in self.totals), strict=True):
            target.copy_(sum(part * float(size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)))


class OwnFloor(Floor):
    """The bare loop of a method whose clients keep a vector each, in the order of the model's parameters."""

    def __init__(self, model: nn.Module, split: Split, local: Local, cores: int) -> None:
        size = sum(p.numel() for p in model.parameters())
        self.kept = torch.zeros(len(split), size).share_memory_()
        self.known = torch.zeros(len(split), dtype=torch.bool).share_memory_()
        self.common = torch.zeros(size).share_memory_()  # the server's vector
        self.changes = torch.zeros(cores, size).share_memory_()  # sums over the clients of each process
        super().__init__(model, split, local, cores)

    def work(self, number: int, local: Local, cohort: np.ndarray, round: int) -> None:
        """The same with corrected gradients."""
        model, common = self.totals[number], self.split_up(self.common)
        parameters, change = list(model.parameters()), self.split_up(self.changes[number].zero_())
        start = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in start]
        for client in map(int, cohort):
            state = self.split_up(self.kept[client])
            _load(parameters, start)
            self.train(model, local, client, round, lambda state=state: self.correct(parameters, start, state, common))
            share = float(self.split.index.sizes[client] / self.split.index.sizes[cohort].sum())
            for mean, p in zip(total, parameters, strict=True):
                mean.add_(p.detach(), alpha=share)
            self.keep(model, local, client, round, start, state, common, change)
            self.known[client] = True
        _load(parameters, total)

    def split_up(self, vector: Tensor) -> list[Tensor]:
        """A vector [P] as views in the parameters' shapes."""
        parts = vector.split([p.numel() for p in self.model.parameters()])
        return [part.view_as(p) for part, p in zip(parts, self.model.parameters(), strict=True)]

    def train(self, model: nn.Module, local: Local, client: int, round: int, correct: Callable[[], None]) -> None:
        """Local SGD with a correction of every gradient."""
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        for batch in local.batches(self.split.index[client], 0, round, client):
            at = torch.from_numpy(batch)
            optimizer.zero_grad()
            F.cross_entropy(model(self.split.arrays.x[at]), self.split.arrays.y[at]).backward()
            with torch.no_grad():
                correct()
            optimizer.step()

    def correct(
        self, parameters: list[nn.Parameter], start: list[Tensor], state: list[Tensor], common: list[Tensor]
    ) -> None:
        """Change the gradients."""

    def keep(
        self, model: nn.Module, local: Local, client: int, round: int, start: list[Tensor], state: list[Tensor],
        common: list[Tensor], change: list[Tensor],
    ) -> None:  # fmt: skip
        """Change what the client keeps."""


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


class FedDynFloor(OwnFloor):
    """g + α(θ - θ^t) - h_i; h_i ← h_i - α(θ_i - θ^t), and the same for their mean h at the server."""

    alpha = 0.01

    def correct(self, parameters, start, state, common):
        for p, before, h in zip(parameters, start, state, strict=True):
            _gradient(p).add_(p - before, alpha=self.alpha).sub_(h)

    @torch.no_grad()
    def keep(self, model, local, client, round, start, state, common, change):
        for p, before, h, total in zip(model.parameters(), start, state, change, strict=True):
            moved = before - p
            h.add_(moved, alpha=self.alpha)
            total.add_(moved)

    @torch.no_grad()
    def __call__(self, cohort: np.ndarray, round: int) -> None:
        super().__call__(cohort, round)
        self.common.add_(self.changes.sum(0), alpha=self.alpha / len(self.kept))
        for p, h in zip(self.model.parameters(), self.split_up(self.common), strict=True):
            p.sub_(h, alpha=1 / self.alpha)


class ScaffoldFloor(OwnFloor):
    """g - c_i + c; c_i ← c_i - c + (θ^t - θ_i)/(kη), and c ← c + the sum of all changes over K."""

    def correct(self, parameters, start, state, common):
        for p, c_i, c in zip(parameters, state, common, strict=True):
            _gradient(p).add_(c).sub_(c_i)

    @torch.no_grad()
    def keep(self, model, local, client, round, start, state, common, change):
        length = local.steps_for(len(self.split.index[client])) * local.lr
        for p, before, c_i, c, total in zip(model.parameters(), start, state, common, change, strict=True):
            moved = ((before - p) / length).sub_(c)
            c_i.add_(moved)
            total.add_(moved)

    @torch.no_grad()
    def __call__(self, cohort: np.ndarray, round: int) -> None:
        super().__call__(cohort, round)
        self.common.add_(self.changes.sum(0), alpha=1 / len(self.kept))


class DittoFloor(OwnFloor):
    """After FedAvg's training, that of a model v of the client's own on F_i(v) + (μ/2)‖v - θ^t‖²."""

    mu = 0.1

    def keep(self, model, local, client, round, start, state, common, change):
        parameters = list(model.parameters())

        def pull() -> None:
            for p, before in zip(parameters, start, strict=True):
                _gradient(p).add_(p - before, alpha=self.mu)

        _load(parameters, state if self.known[client] else start)
        self.train(model, local, client, round, pull)
        _load(state, parameters)


class RingFloor(OwnFloor):
    """A model at each client, which after its training becomes the mean of it and its two neighbours' on a ring."""

    def __init__(self, model: nn.Module, split: Split, local: Local, cores: int) -> None:
        super().__init__(model, split, local, cores)
        self.kept.copy_(nn.utils.parameters_to_vector(model.parameters()).detach())
        self.mixed = torch.empty_like(self.kept)

    def work(self, number: int, local: Local, cohort: np.ndarray, round: int) -> None:
        parameters = list(self.totals[number].parameters())
        for client in map(int, cohort):
            state = self.split_up(self.kept[client])
            _load(parameters, state)
            self.train(self.totals[number], local, client, round, lambda: None)
            _load(state, parameters)

    @torch.no_grad()
    def __call__(self, cohort: np.ndarray, round: int) -> None:
        super().__call__(cohort, round)
        self.mixed.copy_(self.kept)
        for to, source in ((slice(1, None), slice(-1)), (slice(1), slice(-1, None)),
                           (slice(-1), slice(1, None)), (slice(-1, None), slice(1))):  # fmt: skip
            self.mixed[to] += self.kept[source]
        torch.div(self.mixed, 3, out=self.kept)


OWN: dict[str, type[Floor]] = {
    "feddyn": FedDynFloor, "scaffold": ScaffoldFloor, "ditto": DittoFloor, "dfedavgm": RingFloor
}  # fmt: skip


@torch.no_grad()
def _load(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def contestant(
    model: nn.Module, split: Split, local: Local, name: str, cohort: int, engine: str, compute: str
) -> tuple[Callable[[np.ndarray, int], None], Callable[[], None]]:
    """A function that runs one round of a method, and one that closes its engine."""
    method, _, changed = name.partition(", ")
    local = dataclasses.replace(local, **LOCALS[changed])
    plan = ClientPlan.of(copy.deepcopy(model), methods.make(method), split, local)
    plan = dataclasses.replace(plan, cohort=cohort, rounds=100, make=lambda: copy.deepcopy(model))
    runner = engines.make(engine)(plan, computes.make(compute))
    return rounds_of(plan, runner), runner.close


def compare(name: str, repeats: int, names: Sequence[str], engine: str, compute: str) -> dict:
    """Median seconds of a round and ratios to the floor, everyone taking turns."""
    base, size, epochs = WORKLOADS[name]
    model, split, local, _ = workload(base)
    local = dataclasses.replace(local, epochs=epochs)
    cores, samples = len(os.sched_getaffinity(0)), min(SEEN, len(split) // size)
    floors = {"floor": Floor} | {f"{label}, bare": OWN[label] for label in names if label in OWN}
    rounds: dict[str, Callable] = {
        label: floor(copy.deepcopy(model), split, local, cores) for label, floor in floors.items()
    }
    closers = []
    for label in names:
        rounds[label], close = contestant(model, split, local, label, size, engine, compute)
        closers.append(close)
    seconds: dict[str, list[float]] = {label: [] for label in rounds}
    started, steal = time.perf_counter(), stolen()
    for repeat in range(samples + repeats):
        new = repeat < samples
        cohort = np.arange(repeat * size, (repeat + 1) * size) if new else draw_cohort(samples * size, size, 0, repeat)
        for label, go in rounds.items():
            begin = time.perf_counter()
            go(cohort, repeat)
            if not new:
                seconds[label].append(time.perf_counter() - begin)
    for close in closers:
        close()
    cell: dict[str, Any] = {
        "steal": round((stolen() - steal) / (time.perf_counter() - started) / (os.cpu_count() or 1), 3),
        "floor_seconds": round(statistics.median(seconds["floor"]), 4),
    }
    for label in names:
        for key, base in (("times_the_floor", "floor"), ("times_its_own_loop", f"{label}, bare")):
            if base in seconds:
                ratios = [
                    floor / fedloom_seconds
                    for floor, fedloom_seconds in zip(seconds[base], seconds[label], strict=True)
                ]
                low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                numbers = {key: round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
                if base == "floor":
                    cell[label] = numbers
                else:
                    cell[label]["own"] = numbers
    return cell


def main() -> None:
    """Run everything and print a table; write JSON if requested."""
    parser = options(__doc__, 9)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="*")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--compute", default="auto")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "command": f"python benchmarks/compute.py --repeats {args.repeats}", "machine": machine(),
        "engine": args.engine, "compute": args.compute,
    }  # fmt: skip
    with reproducible():
        for name in args.only:
            names = args.methods or (SEVERAL if name == "models" else METHODS)
            results[name] = compare(name, args.repeats, names, args.engine, args.compute)
            print(name, *(f"{label}: {ratio}" for label, ratio in results[name].items()), sep="\n  ", flush=True)
    save(results, args.out)


if __name__ == "__main__":
    main()
