"""What engines and computes cost: each with each, against a bare PyTorch loop over the same batches.

    python benchmarks/engines.py [--repeats 5] [--out benchmarks/results/engines.json]

W1: TwoNN, 1000 clients of 60 samples, cohort 100, batch 10, 1 epoch.   W2: FedDyn CNN, 100 clients of 500 images
(3x32x32), cohort 10, batch 50, 1 epoch.   The floor is one module, ``torch.optim.SGD`` and ``cross_entropy`` on one
thread, over the same batches in the same order, with a fresh optimiser and a state reset per client and the mean of
all models. All contestants take turns on the same cohort in one process tree; a ratio compares two rounds of one turn
(above 1: faster than the floor, or than the serial engine with live modules) and is the median over turns; noise is the
floor's interquartile range over its median, and ``steal`` the share of time that the hypervisor gave to others.
``reached`` are the floating point operations and bytes of plain SGD over what ``limits.py`` measures of the machine: a
compute that factors layers does fewer of either.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from limits import limits
from record import machine, options, save
from torch import nn

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.local import Local, draw_cohort
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.store import StateStore
from fedloom.models import models
from fedloom.rounds.engine import Engine
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.round import federated_round
from fedloom.rounds.server import Server


def workload(name: str) -> tuple[nn.Module, Split, Local, int]:
    """Model, data, local training and cohort size of a workload, on random data of the true shapes."""
    draw = np.random.default_rng(0)
    clients, samples, inputs, batch, cohort = {
        "W1": (1000, 60, (1, 28, 28), 10, 100),
        "W2": (100, 500, (3, 32, 32), 50, 10),
        "dropout": (200, 50, (3, 32, 32), 10, 50),
    }[name]
    torch.manual_seed(0)
    if name == "dropout":  # pfl-research's network for CIFAR-10
        convolutions = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        dense = nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
        model: nn.Module = nn.Sequential(*convolutions, nn.Dropout(0.25), nn.Flatten(), *dense)
    else:
        model = models.make({"W1": "two_nn", "W2": "feddyn_cnn"}[name], classes=10, inputs=inputs)
    x = torch.from_numpy(draw.standard_normal((clients * samples, *inputs), dtype=np.float32))
    y = torch.from_numpy(draw.integers(0, 10, clients * samples))
    rows = draw.permutation(clients * samples).reshape(clients, samples)
    return model, Split(Arrays(x, y, 10), Index.of(list(rows))), Local(batch_size=batch, lr=0.05), cohort


def bare_round(model: nn.Module, split: Split, local: Local, cohort: np.ndarray, round: int) -> None:
    """One round of FedAvg as one would write it in plain PyTorch, over the same batches."""
    start = copy.deepcopy(model.state_dict())
    total = {k: torch.zeros_like(v) for k, v in start.items()}
    samples = split.index.sizes[cohort].sum()
    model.train()
    for client in cohort:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        rows = split.index[int(client)]
        for batch in local.batches(rows, 0, round, int(client)):
            at = torch.from_numpy(batch)
            optimizer.zero_grad()
            F.cross_entropy(model(split.arrays.x[at]), split.arrays.y[at]).backward()
            optimizer.step()
        for k, v in model.state_dict().items():
            total[k] += v * (len(rows) / samples)
    model.load_state_dict(total)


def rounds_of(plan: ClientPlan, engine: Engine) -> Callable[[np.ndarray, int], None]:
    """A function that runs one round, of which server and clients keep what they keep."""
    server, store = Server.initial(plan, plan.theta0, plan.buffers0), StateStore()

    def go(cohort: np.ndarray, round: int) -> None:
        nonlocal server
        server, report = federated_round(plan, engine, server, store, cohort)
        store.put(report.states, server.round)

    return go


def compare(name: str, repeats: int, contestants: dict[str, tuple[str, str]]) -> dict:
    """Median seconds of a round and ratios to the floor, everyone taking turns."""
    model, split, local, size = workload(name)
    plan = ClientPlan.of(copy.deepcopy(model), methods.fedavg(), split, local)
    runners = {
        label: engines.make(name)(plan, computes.make(compute)) for label, (name, compute) in contestants.items()
    }
    rounds: dict[str, Callable] = {"floor": lambda cohort, r: bare_round(model, split, local, cohort, r)}
    rounds |= {label: rounds_of(plan, engine) for label, engine in runners.items()}
    seconds: dict[str, list[float]] = {label: [] for label in rounds}
    started, steal = time.perf_counter(), stolen()
    for repeat in range(repeats + 1):  # the first turn warms up
        cohort = draw_cohort(len(split), size, seed=0, round=repeat)
        for label, go in rounds.items():
            begin = time.perf_counter()
            go(cohort, repeat)
            if repeat:
                seconds[label].append(time.perf_counter() - begin)
    for engine in runners.values():
        engine.close()
    low, middle, high = statistics.quantiles(seconds["floor"], n=4)
    limit = limits(model, tuple(split.arrays.x.shape[1:]), local.batch_size)
    steps = size * local.steps_for(round(plan.population.mean_size))
    cores = {label: engine_cores(label) for label in seconds}

    def ratios(base: str) -> dict[str, float]:
        pairs = {label: zip(seconds[base], s, strict=True) for label, s in seconds.items() if label != base}
        return {label: round(statistics.median(b / s for b, s in turns), 2) for label, turns in pairs.items()}

    return {
        "noise": round((high - low) / middle, 3),
        "steal": round((stolen() - steal) / (time.perf_counter() - started) / (os.cpu_count() or 1), 3),
        "seconds": {label: round(statistics.median(s), 4) for label, s in seconds.items()},
        "times_the_floor": ratios("floor"),
        "times_serial": ratios("serial"),
        "limits_of_a_core": {key: float(f"{value:.3g}") for key, value in vars(limit).items()},
        "reached": {label: limit.reached(steps / statistics.median(s), cores[label]) for label, s in seconds.items()},
    }


def engine_cores(label: str) -> int:
    """How many cores a contestant computes on."""
    return len(os.sched_getaffinity(0)) if label.startswith(("processes", "auto")) else 1


def stolen() -> float:
    """Seconds that the hypervisor has taken from this machine since it started (0 where the system does not say)."""
    stat = Path("/proc/stat")
    return int(stat.read_text().split("\n")[0].split()[8]) / os.sysconf("SC_CLK_TCK") if stat.exists() else 0.0


def driver_overhead(repeats: int) -> dict:
    """Seconds a round with a cohort of 10 out of 1 000 000 clients of one sample each and a tiny model."""
    clients = 1_000_000
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((clients, 2), dtype=np.float32))
    split = Split(
        Arrays(x, torch.from_numpy(draw.integers(0, 2, clients)), 2),
        Index(np.arange(clients), np.arange(clients + 1)),
    )
    plan = ClientPlan.of(models.make("logistic", classes=2, inputs=(2,)), methods.feddyn(), split, Local())
    go, seconds = rounds_of(plan, engines.make("serial")(plan, computes.make("live"))), []
    for number in range(repeats * 10):
        begin = time.perf_counter()
        go(draw_cohort(clients, 10, seed=0, round=number), number)
        seconds.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms_per_round": round(1e3 * statistics.median(seconds), 2), "peak_mb": round(peak)}


def main() -> None:
    """Run everything and print a table; write JSON if requested."""
    parser = options(__doc__, 7)
    parser.add_argument("--only", nargs="*", default=["overhead", "W1", "W2"])
    args = parser.parse_args()
    contestants = {
        engine if compute == "live" else f"{engine}, {compute}": (engine, compute)
        for engine in ("serial", "processes")
        for compute in computes.names()
        if compute != "auto"
    }
    command = f"python benchmarks/engines.py --repeats {args.repeats}"
    results: dict[str, Any] = {"command": command, "machine": machine(), "repeats": args.repeats}
    with reproducible():
        if "overhead" in args.only:
            results["driver, 10 of 1 000 000 clients"] = driver_overhead(args.repeats)
        for name in ("W1", "W2"):
            if name in args.only:
                results[name] = compare(name, args.repeats, contestants)
    print(json.dumps(results, indent=1))
    save(results, args.out)


if __name__ == "__main__":
    main()
