"""The timeline alone: 100 000 devices, 1 000 at work, one hour of virtual time.

    python benchmarks/timeline.py [--clients 100000] [--cohort 1000] [--hours 1] [--out FILE]

Durations are lognormal with a median of 40 s and a jitter of .3, drawn as in a run. Every schedule is passed through in
a process of its own; processor seconds, and the memory that it takes beyond what was imported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import machine, save

from fedloom.core.local import draw_cohort
from fedloom.core.timeline import Schedule, World
from fedloom.timing import Asynchronous, Buffered, Deadline, Lognormal, OverSelect, Rounds, Semi, Tiers

MEDIAN = 40.0  # seconds of computing on the median device
SEED = 0


def world(clients: int, size: int) -> World:
    """Clients with devices."""
    devices = Lognormal(sigma=1.0, jitter=0.3)
    fleet = devices.fleet(clients, SEED)
    usual = MEDIAN * devices.speed / fleet.speed

    def seconds(clients: np.ndarray, version: int) -> np.ndarray:
        return usual[clients] * devices.noise(clients, version, SEED)

    return World(clients, size, lambda t, count: draw_cohort(clients, count, SEED, t), seconds, SEED, lambda: usual)


def measure(schedule: Schedule, clients: int, size: int, hours: float) -> dict[str, Any]:
    """Steps, arrivals, seconds and megabytes of one schedule."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    steps = arrivals = versions = 0
    for step in schedule.steps(world(clients, size)):
        steps, arrivals = steps + 1, arrivals + len(step.clients)
        versions = max(versions, len(step.in_flight))
        if step.clock >= 3600 * hours:
            break
    seconds = time.process_time() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    return {"schedule": repr(schedule), "steps": steps, "arrivals": arrivals, "versions": versions,
            "seconds": round(seconds, 2), "us_per_arrival": round(1e6 * seconds / max(arrivals, 1), 1),
            "megabytes": round(grown, 1)}  # fmt: skip


def main() -> None:
    """Measure every schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/timeline.json"))
    args = parser.parse_args()
    tenth = max(args.cohort // 10, 1)
    table = []
    for schedule in (Rounds(), Deadline(60.0), OverSelect(0.3), Tiers(5), Buffered(tenth), Semi(10.0), Asynchronous()):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            table.append(pool.apply(measure, (schedule, args.clients, args.cohort, args.hours)))
        print(table[-1], flush=True)
    about = {"clients": args.clients, "cohort": args.cohort, "hours": args.hours, "machine": machine()}
    save({"command": "python benchmarks/timeline.py", **about, "table": table}, args.out)


if __name__ == "__main__":
    main()
