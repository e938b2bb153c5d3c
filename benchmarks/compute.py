"""What a run costs with automatic engine and compute: methods against a bare FedAvg loop on every core.

    python benchmarks/compute.py [--repeats 5] [--only W1 W3 CNN] [--methods fedavg feddyn] [--out FILE]

The floor is the plain PyTorch loop of ``benchmarks/engines.py``, shared out to one forked process a core with the model
and the sum of the updates in shared memory. W1: TwoNN, 1000 clients of 60 samples, cohort 100, batch 10, 1 epoch.
W3: the same with a cohort of 10 and 5 epochs. CNN: FedDyn's, 100 clients of 500 images, cohort 10, batch 50, 1 epoch.
All contestants take turns on the same cohort; a ratio compares two rounds of one turn (above 1: faster than the floor)
and is the median over turns, with the quartiles beside it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import bare_round, stolen, workload
from record import machine, save
from torch import nn

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.federation import Split
from fedloom.core.local import Local, draw_cohort
from fedloom.core.plan import ClientPlan
from fedloom.core.round import federated_round
from fedloom.core.server import Server
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.store import StateStore

WORKLOADS = {"W1": ("W1", 100, 1), "W3": ("W1", 10, 5), "CNN": ("W2", 10, 1)}
METHODS = ("fedavg", "fedavg, momentum", "fedprox", "feddyn", "scaffold", "ditto", "superfed_mm")
LOCALS = {"": {}, "momentum": {"momentum": 0.9}, "bf16": {"precision": "bf16"}}


class Floor:
    """The bare loop on one forked process a core."""

    def __init__(self, model: nn.Module, split: Split, local: Local, cores: int) -> None:
        self.model, self.split, self.cores = model.share_memory(), split, cores
        context = multiprocessing.get_context("fork")
        self.totals = [copy.deepcopy(model).share_memory() for _ in range(cores)]
        self.pipes = []
        for number in range(cores):
            ours, theirs = context.Pipe()
            context.Process(target=self._serve, args=(theirs, self.totals[number], local), daemon=True).start()
            self.pipes.append(ours)

    def _serve(self, pipe, total: nn.Module, local: Local) -> None:
        torch.set_num_threads(1)
        while True:
            cohort, round = pipe.recv()
            total.load_state_dict(self.model.state_dict())
            bare_round(total, self.split, local, cohort, round)
            pipe.send(None)

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


def contestant(
    model: nn.Module, split: Split, local: Local, name: str, cohort: int, engine: str, compute: str
) -> tuple[Callable[[np.ndarray, int], None], Callable[[], None]]:
    """A function that runs one round of a method, and one that closes its engine."""
    method, _, changed = name.partition(", ")
    local = dataclasses.replace(local, **LOCALS[changed])
    plan = ClientPlan.of(copy.deepcopy(model), methods.make(method), split, local)
    plan = dataclasses.replace(plan, cohort=cohort, rounds=100, make=lambda: copy.deepcopy(model))
    made = engines.make(engine)(plan, computes.make(compute))
    state, store = [Server.initial(plan, plan.theta0, plan.buffers0)], StateStore()

    def go(cohort: np.ndarray, round: int) -> None:
        state[0], report = federated_round(plan, made, state[0], store, cohort)
        store.put(report.states, state[0].round)

    return go, made.close


def compare(name: str, repeats: int, names: list[str], engine: str, compute: str) -> dict:
    """Median seconds of a round and ratios to the floor, everyone taking turns."""
    base, size, epochs = WORKLOADS[name]
    model, split, local, _ = workload(base)
    local = dataclasses.replace(local, epochs=epochs)
    rounds: dict[str, Callable] = {"floor": Floor(copy.deepcopy(model), split, local, len(os.sched_getaffinity(0)))}
    closers = []
    for label in names:
        rounds[label], close = contestant(model, split, local, label, size, engine, compute)
        closers.append(close)
    seconds: dict[str, list[float]] = {label: [] for label in rounds}
    started, steal = time.perf_counter(), stolen()
    for repeat in range(repeats + 1):  # the first turn warms up
        cohort = draw_cohort(len(split), size, seed=0, round=repeat)
        for label, go in rounds.items():
            begin = time.perf_counter()
            go(cohort, repeat)
            if repeat:
                seconds[label].append(time.perf_counter() - begin)
    for close in closers:
        close()
    found: dict[str, object] = {
        "steal": round((stolen() - steal) / (time.perf_counter() - started) / (os.cpu_count() or 1), 3),
        "floor_seconds": round(statistics.median(seconds["floor"]), 4),
    }
    for label in names:
        ratios = [floor / own for floor, own in zip(seconds["floor"], seconds[label], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        found[label] = {"times_the_floor": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
    return found


def main() -> None:
    """Run everything and print a table; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "command": f"python benchmarks/compute.py --repeats {args.repeats}", "machine": machine(),
        "engine": args.engine, "compute": args.compute,
    }  # fmt: skip
    with reproducible():
        for name in args.only:
            found[name] = compare(name, args.repeats, args.methods, args.engine, args.compute)
            print(name, *(f"{label}: {each}" for label, each in found[name].items()), sep="\n  ", flush=True)
    save(found, args.out)


if __name__ == "__main__":
    main()
