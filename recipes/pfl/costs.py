"""What a local step through an adaptation costs, relative to one of FedAvg, on the thesis' CNN.

    python recipes/pfl/costs.py [--repeats 7] [--steps 4] [--model feddyn_cnn]

Batches of 50 noise images of 32 by 32. All variants take turns in one process; the table shows the median CPU time of
a step over the repetitions, and the median ratio to FedAvg's in the same repetition.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import common
import reporting
import torch

from fedloom import methods
from fedloom.compute.live import Live
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.local import Local
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.setup import make_plan
from fedloom.models import models
from fedloom.rounds.server import Server

VARIANTS = {
    "FedAvg": methods.fedavg(),
    "Proto": methods.p_avg_proto(),
    "MAML, 1 step, first order": methods.per_fedavg(second_order=False),
    "MAML, 1 step, second order": methods.per_fedavg(),
    "MAML, 5 steps, first order": methods.per_fedavg(steps=5, second_order=False),
    "MAML, 5 steps, second order": methods.per_fedavg(steps=5),
}


def noise(size: int = 100) -> Federation:
    """One client with noise images."""
    draw = torch.Generator().manual_seed(0)
    arrays = Arrays(torch.randn(size, 3, 32, 32, generator=draw), torch.arange(size) % 10, 10)
    data, empty = Split(arrays, Index.of([range(size)])), Split(arrays, Index.of([[]]))
    return Federation(data, empty, empty, arrays)


def measure(model: str, repeats: int, steps: int) -> dict[str, list[float]]:
    """CPU milliseconds per step, by variant and repetition, after one uncounted repetition."""
    federation = noise()
    workers = {}
    for name, method in VARIANTS.items():
        experiment = Experiment(
            method,
            federation,
            lambda: models.make(model, classes=10, inputs=(3, 32, 32)),
            local=Local(steps=steps, batch_size=50, lr=0.01, weight_decay=1e-3, clip=10),
        )
        plan = make_plan(experiment, federation, "cpu")
        down = Server.initial(plan, plan.theta0, plan.buffers0).broadcast(plan)
        workers[name] = (Live(plan), down)
    milliseconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(repeats + 1):
        for name, (worker, down) in workers.items():
            start = time.process_time()
            list(worker.work(replace(down, round=turn), (0,), ({},)))
            if turn:
                milliseconds[name].append((time.process_time() - start) * 1000 / steps)
    return milliseconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", choices=("feddyn_cnn", "fedssa_cnn"), default="feddyn_cnn")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    milliseconds = measure(args.model, args.repeats, args.steps)
    rows = []
    for name, values in milliseconds.items():
        ratios = sorted(value / base for value, base in zip(values, milliseconds["FedAvg"], strict=True))
        rows.append([name, f"{median(values):.0f}", f"{median(ratios):.1f}", f"{ratios[0]:.1f} to {ratios[-1]:.1f}"])
    text = [f"# What a local step costs: {args.model}, batches of 50 images of 32 by 32", ""]
    text += [
        reporting.table(["local step", "ms of one core", "relative to FedAvg", "range over repetitions"], rows),
        "",
    ]
    text += [
        f"`python recipes/pfl/costs.py`, median of {args.repeats} repetitions of {args.steps} steps. "
        f"{reporting.machine()}."
    ]
    reporting.write(args.out / "costs.md", "\n".join(text))
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
