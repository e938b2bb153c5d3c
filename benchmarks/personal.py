"""What a client's local step costs with a second model: SuperFed, APFL, Ditto and pFedMe against FedAvg.

    python benchmarks/personal.py [--repeats 9] [--out benchmarks/results/personal.json]

W1: TwoNN, 600 samples (1x28x28), batches of 10, 60 steps.   W2: FedDyn CNN, 500 images (3x32x32), batches of 50, 10
steps.   All methods run one client's round in the live module that the serial engine and every worker process use, on
the same mini-batches, with learning rate .01, momentum .9 and weight decay 1e-4, on one thread. They take turns; a
ratio compares two rounds of one turn (2: twice the time of FedAvg's step) and is the median over turns, with the
quartiles beside it. Time is the processor's, so that other programs of the machine count little. Aims for SuPerFed with
model mixing: at most 2.0 on W1 and 1.3 on W2; APFL and Ditto take two gradients a step, pFedMe five.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fedloom.core.client import Broadcast, State
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.local import Local
from fedloom.engines.live import LiveClient
from fedloom.methods import make
from fedloom.models import models
from fedloom.run.experiment import Experiment
from fedloom.run.machine import one_thread
from fedloom.run.prepare import make_plan

METHODS = ("fedavg", "superfed_mm", "superfed_lm", "apfl", "ditto", "pfedme")
WORK = {  # model, samples, inputs, batch
    "W1": ("two_nn", 600, (1, 28, 28), 10),
    "W2": ("feddyn_cnn", 500, (3, 32, 32), 50),
}


def federation(samples: int, inputs: tuple[int, ...]) -> Federation:
    """One client with random data."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((samples, *inputs), dtype=np.float32))
    arrays = Arrays(x, torch.from_numpy(draw.integers(0, 10, samples)), 10)
    none = Split(arrays, Index.of([[]]))
    return Federation(Split(arrays, Index.of([range(samples)])), none, none, arrays)


def compare(work: str, repeats: int, names: tuple[str, ...] = METHODS) -> dict[str, dict[str, float]]:
    """Milliseconds of a local step, and its ratio to FedAvg's."""
    model, samples, inputs, batch = WORK[work]
    local = Local(batch_size=batch, lr=0.01, momentum=0.9, weight_decay=1e-4)
    data = federation(samples, inputs)
    contestants = {}
    for name in names:
        chosen = Experiment(make(name), data, lambda: models.make(model, classes=10, inputs=inputs), local=local)
        plan = make_plan(chosen, data, "cpu")
        down = Broadcast(0, local.lr, {"shared": plan.theta0[: plan.layout.shared_size]}, plan.buffers0, {})
        contestants[name] = (LiveClient(plan), down)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    states: dict[str, State] = {name: {} for name in names}  # a client's second model is made in the warm-up
    for repeat in range(repeats + 1):  # the first turn warms up
        for name, (live, down) in contestants.items():
            began = time.process_time()
            result = live.work(down, 0, states[name])
            spent = time.process_time() - began
            if result.failure is not None:
                raise RuntimeError(f"{name}: {result.failure}")
            states[name] = states[name] or result.state
            if repeat:
                seconds[name].append(spent / result.steps)
    found = {}
    for name in names:
        ratios = [a / b for a, b in zip(seconds[name], seconds["fedavg"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {"ms": round(1e3 * statistics.median(seconds[name]), 3), "times_fedavg": round(middle, 2)}
        found[name] |= {"from": round(low, 2), "to": round(high, 2)}
    return found


def main() -> None:
    """Run everything and print it; write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("quartiles need at least two repeats.")
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "torch": torch.__version__}
    with one_thread():
        found = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine,
            "repeats": args.repeats,
            **{work: compare(work, args.repeats) for work in args.work},
        }
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
