"""What a round costs on a GPU: each compute, with recorded steps and without, against a bare loop on that GPU.

    python benchmarks/device.py [--minutes 8] [--device cuda] [--repeats 9] [--only pfl W1 W3 CNN ...] [--out FILE]
    python benchmarks/device.py --dry-run                     # everything with two clients a round, on the CPU

pfl: pfl-research's benchmark on CIFAR-10, its 1500 rounds cut to 150 or to what there is time for, beside pfl-research
with one process and with five, if it can be imported or is installed under ``--envs``; see ``benchmarks/peers``.
femnist, shakespeare: FLUTE's CNN and LSTM, likewise. Without FEDLOOM_DATA their samples are noise of the same shape.
W1: TwoNN, 1000 clients of 60 samples, cohort 100, batch 10, 1 epoch.   W3: the same with a cohort of 10 and 5 epochs.
CNN: FedDyn's, 100 clients of 500 images, cohort 10, batch 50, 1 epoch.   recipe: the same in bfloat16 with gradients
clipped and images cropped and flipped, as in recipes/feddyn/cifar.py (the floor neither clips nor augments).
everybody: that with a cohort of 100.
dropout: pfl-research's CNN for CIFAR-10, 50 images a client, cohort 50, batch 10, 1 epoch.
adamw: the same with AdamW and a rate that falls along a cosine within a round (the floor takes plain steps).
The floor is the plain PyTorch loop of ``benchmarks/engines.py`` with model and samples on the GPU. All contestants
take turns on the same cohort; a ratio compares two rounds of one turn (above 1: faster than the floor) and is the
median over turns, with the quartiles beside it. Every round ends when the GPU has finished it. Workloads are measured
in the order of ``--only``, each in at most ``SHARE`` of the time that is left, and what is known is written after each.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import bare_round, rounds_of, workload
from record import machine, options, save
from torch import nn

sys.path.append(str(Path(__file__).parent / "peers"))
from peers.__main__ import timed
from workload import SETTINGS  # pyright: ignore[reportMissingImports]

from fedloom import methods
from fedloom.compute import computes
from fedloom.compute.cohort import descent
from fedloom.core.federation import Arrays, Split
from fedloom.core.local import Local, draw_cohort
from fedloom.data.augment import pipeline
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.rounds.plan import ClientPlan

WORKLOADS = {
    "W1": ("W1", 100, 1),
    "W3": ("W1", 10, 5),
    "CNN": ("W2", 10, 1),
    "recipe": ("W2", 10, 1),
    "everybody": ("W2", 100, 1),
    "dropout": ("dropout", 50, 1),
    "adamw": ("dropout", 50, 1),
}
ORDER = ("pfl", "W1", "W3", "CNN", "femnist", "shakespeare", "dropout", "adamw", "recipe", "everybody")
SHARE = 1 / 3
FEWEST = 4  # turns, with the first two, which warm up
PEERS = {"pfl": 150, "femnist": 100, "shakespeare": 100}  # rounds
CONTESTANTS = ("live", "batched", "batched, not recorded", "batched, feddyn", "batched, scaffold", "batched, ditto")


def placed(split: Split, device: str) -> Split:
    """The samples on a device."""
    arrays = split.arrays
    return dataclasses.replace(split, arrays=Arrays(arrays.x.to(device), arrays.y.to(device), arrays.classes))


def contestant(
    model: nn.Module, split: Split, local: Local, label: str, cohort: int, device: str, augmented: bool
) -> Callable[[np.ndarray, int], None]:
    """A function that runs one round of a compute and a method, by default FedAvg."""
    compute, _, rest = label.partition(", ")
    method = "fedavg" if rest in ("", "not recorded") else rest
    plan = ClientPlan.of(copy.deepcopy(model), methods.make(method), split, local, device=device)
    augment = pipeline(("crop", "flip"), split.arrays) if augmented else None
    plan = dataclasses.replace(
        plan, theta0=plan.theta0.to(device), buffers0=plan.buffers0.to(device), cohort=cohort, rounds=100,
        make=lambda: copy.deepcopy(model), augment=augment,
    )  # fmt: skip
    once = rounds_of(plan, engines.make("serial")(plan, computes.make(compute)))

    def go(cohort: np.ndarray, round: int) -> None:
        recorder = descent.recorder
        if rest == "not recorded":
            descent.recorder = lambda device: None
        once(cohort, round)
        descent.recorder = recorder

    return go


def compare(
    name: str, repeats: int, device: str, labels: list[str], until: float = inf, tiny: bool = False
) -> dict[str, Any]:
    """Median seconds of a round and ratios to the floor, everyone taking turns."""
    base, size, epochs = WORKLOADS[name]
    size = 2 if tiny else size
    model, split, local, _ = workload(base)
    local, split = dataclasses.replace(local, epochs=epochs), placed(split, device)
    bare = copy.deepcopy(model).to(device)
    rounds: dict[str, Callable] = {"floor": lambda cohort, r, local=local: bare_round(bare, split, local, cohort, r)}
    recipe = name in ("recipe", "everybody")
    if recipe:
        local = dataclasses.replace(local, clip=10, weight_decay=1e-3, precision="bf16")
    if name == "adamw":
        local = dataclasses.replace(local, optimiser="adamw", lr=1e-3, weight_decay=0.01, step_schedule="cosine")
        labels = [label for label in labels if label.rpartition(", ")[2] not in ("feddyn", "scaffold")]  # for SGD alone
    rounds |= {label: contestant(model, split, local, label, size, device, recipe) for label in labels}
    seconds: dict[str, list[float]] = {label: [] for label in rounds}
    for repeat in range(repeats + 2):  # the first two turns warm up
        if repeat >= FEWEST and time.monotonic() > until:
            break
        cohort = draw_cohort(len(split), size, seed=0, round=repeat)
        for label, go in rounds.items():
            begin = time.perf_counter()
            go(cohort, repeat)
            if device != "cpu":
                torch.cuda.synchronize()
            if repeat > 1:
                seconds[label].append(time.perf_counter() - begin)
    cell: dict[str, Any] = {"floor_seconds": round(statistics.median(seconds["floor"]), 4)}
    for label in labels:
        ratios = [
            floor / fedloom_seconds for floor, fedloom_seconds in zip(seconds["floor"], seconds[label], strict=True)
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cell[label] = {
            "seconds": round(statistics.median(seconds[label]), 4),
            "times_the_floor": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)],
        }  # fmt: skip
    return cell


def beside_peers(name: str, device: str, envs: Path, until: float, tiny: bool) -> dict[str, Any]:
    """Rounds of a workload of ``benchmarks/peers``, with pfl-research if there is any."""
    this_python, pfl_python = Path(sys.executable), envs / "pfl" / "bin" / "python"
    pythons = {"bare": this_python, "fedloom": this_python}
    if pfl_python.exists() or find_spec("pfl"):
        pythons |= dict.fromkeys(
            ("pfl:1", "pfl:2" if tiny else "pfl:5"), pfl_python if pfl_python.exists() else this_python
        )
    if tiny:
        SETTINGS[name] |= {"clients": 10, "cohort": 2, "samples": 20}
    real = "FEDLOOM_DATA" in os.environ and not tiny
    seconds = timed(name, pythons, 3 if tiny else PEERS[name], device, until, real)
    return {"data": "real" if real else "noise of the same shape"} | seconds


def main() -> None:
    """Run everything in order while there is time and print a table; write JSON if requested."""
    parser = options(__doc__, 9)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=ORDER, default=list(ORDER))
    parser.add_argument("--contestants", nargs="*", default=list(CONTESTANTS))
    parser.add_argument("--envs", type=Path, default=Path("envs"), help="folder with the environment of pfl")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    device, repeats = ("cpu", 2) if args.dry_run else (args.device, args.repeats)
    end = time.monotonic() + 60 * args.minutes
    results: dict[str, Any] = {
        "command": f"python benchmarks/device.py --minutes {args.minutes:g} --repeats {repeats}",
        "machine": machine() | ({"gpu": torch.cuda.get_device_name()} if device != "cpu" else {}),
    }
    with reproducible():
        for name in args.only:
            left = end - time.monotonic()
            if left <= 0:
                print(f"no time for {name}")
                continue
            until = end - (1 - SHARE) * left
            try:
                if name in PEERS:
                    results[name] = beside_peers(name, device, args.envs, until, args.dry_run)
                else:
                    results[name] = compare(name, repeats, device, args.contestants, until, args.dry_run)
            except Exception as error:  # the others are still of use
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(name, *(f"{label}: {ratio}" for label, ratio in results[name].items()), sep="\n  ", flush=True)
            save(results, args.out)


if __name__ == "__main__":
    main()
