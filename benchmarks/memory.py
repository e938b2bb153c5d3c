"""Peak memory of a run, over rounds and over the number of clients; and what a round costs the driver.

    python benchmarks/memory.py [--only W1 CNN] [--out benchmarks/results/memory.json]

Each run is a process of its own, with automatic engine and compute. ``peak_mb`` is what it and its workers hold (of
shared pages each one's share, by Linux's ``smaps_rollup``; libraries are left out), as its largest value at the end of
a round; ``data_mb`` is the part of the samples. FedAvg keeps nothing of a client; FedDyn keeps a vector of the
model's size of every client that took part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import machine, options, save

COHORTS = {"W1": ("W1", 100), "CNN": ("W2", 10)}
# method, rounds, times the clients
RUNS = (("fedavg", 5, 1), ("fedavg", 20, 1), ("fedavg", 5, 4), ("feddyn", 5, 1), ("scaffold", 5, 1))


def memory(process: int) -> float:
    """What a process and its children hold, in MB: each page by its share of those who map it, libraries left out."""
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        lists = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:  # it has ended
        return 0.0
    megabytes = sum(int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024
    return megabytes + sum(memory(int(child)) for children in lists for child in children.split())


def measure(name: str, method: str, rounds: int, times: int) -> dict[str, float]:
    """Peak memory of this process and its workers; ``times`` as many clients share the same samples."""
    from compute import contestant
    from engines import workload

    from fedloom.core.federation import Index, Split
    from fedloom.core.local import draw_cohort
    from fedloom.experiment.runtime import reproducible

    base, cohort = COHORTS[name]
    model, split, local, _ = workload(base)
    split = Split(split.arrays, Index.of([split.index[client] for client in range(len(split))] * times))
    before, peak = memory(os.getpid()), 0.0
    with reproducible():
        go, close = contestant(model, split, dataclasses.replace(local, epochs=1), method, cohort, "auto", "auto")
        for number in range(rounds):
            go(draw_cohort(len(split), cohort, seed=0, round=number), number)
            peak = max(peak, memory(os.getpid()))
        close()
    data_mb = sum(t.numel() * t.element_size() for t in (split.arrays.x, split.arrays.y)) / 1e6
    return {"peak_mb": round(peak), "before_the_run_mb": round(before), "data_mb": round(data_mb)}


def main() -> None:
    """Measure everything, each in a process of its own; write JSON if requested."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", default=list(COHORTS))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, method, rounds, times = args.one
        print(json.dumps(measure(name, method, int(rounds), int(times))))
        return
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    here = machine()
    day = {"date": here.pop("date")}  # of each row, since single ones may be run again
    results |= {"command": "python benchmarks/memory.py", "machine": here}
    for name in args.only:
        for method, rounds, times in RUNS:
            words = [sys.executable, __file__, "--one", name, method, str(rounds), str(times)]
            process = subprocess.run(words, capture_output=True, text=True, check=True)
            clients = "" if times == 1 else f", {times} times the clients"
            label = f"{name}, {method}, {rounds} rounds{clients}"
            results[label] = json.loads(process.stdout.splitlines()[-1]) | day
            print(label, results[label], flush=True)
            save(results, args.out)


if __name__ == "__main__":
    main()
