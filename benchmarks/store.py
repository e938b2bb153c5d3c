"""Memory and time of runs whose clients keep more than fits: a private ResNet-18 each, or a model of a topology each.

    python benchmarks/store.py [--work private models] [--rounds 40] [--memory-rounds 10] [--room FOLDER] [--out FILE]

private: Ditto with 5000 clients, each of which keeps a second ResNet-18 for itself (44.7 MB). Cohorts of 5 do one step
on two 3x16x16 images each, so that what is measured is the states and not the training; nothing is evaluated. ``disk``
keeps the states in the run directory and writes a checkpoint every 10 rounds, ``memory`` keeps them in memory, without
a run directory. Each runs in a process of its own on one thread. ``rss_mb`` is the process's resident memory after a
round, ``anon_mb`` the part of it that no file backs, which the kernel cannot take back (the rest are pages of
libraries), ``peak_mb`` the most there was, ``states_mb`` all distinct states so far, ``ms_per_state`` what it takes to
get one at the end, checksum included, and ``checkpoint_mb`` what the last checkpoint takes besides the states' own
files.
The disk arm leaves 45 MB a client that takes part (9 GB after 40 rounds) in a temporary folder of ``--room``, and
removes it.

models: as many TwoNN as clients on a ring (``dfedavgm``), 1000 and 10 000 of them; cohorts of 100 do one step on ten
1x28x28 images each, and have the means of those of their neighbours that take part. On disk, and 1000 in memory too.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from record import machine, options, save

from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.local import Local
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.store import CLIENTS, ROWS
from fedloom.methods import make
from fedloom.models import models

SHOWN = (1, 5, 10, 20, 30, 40)
MEMORY = {"rss_mb": "VmRSS", "anon_mb": "RssAnon"}


def resident() -> dict[str, int]:
    """Resident memory of this process, all of it and what no file backs, in MB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: round(int(status[key].split()[0]) * 1.024e-3) for name, key in MEMORY.items()}


class Gauge(Callback):
    """Reads memory after every round."""

    def __init__(self) -> None:
        self.memory: dict[int, dict[str, int]] = {}
        self.seconds: list[float] = []

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Read it."""
        self.memory[record["round"]] = resident()
        self.seconds.append(record["seconds"])


WORK = {  # method, model, cohort, images of a client, their shape, numbers of clients
    "private": ("ditto", "resnet18", 5, 2, (3, 16, 16), (5000,)),
    "models": ("dfedavgm", "two_nn", 100, 10, (1, 28, 28), (1000, 10_000)),
}


def experiment(work: str, clients: int, states: Literal["memory", "disk"], rounds: int) -> Experiment:
    """Clients with a few random images each, of 10 000 in all."""
    method, model, cohort, samples, inputs, _ = WORK[work]
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((min(clients * samples, 10_000), *inputs), dtype=np.float32))
    arrays = Arrays(x, torch.from_numpy(draw.integers(0, 10, len(x))), 10)
    owned = Index(np.arange(clients * samples) % len(x), np.arange(0, clients * samples + 1, samples))
    few = Arrays(x[:10], arrays.y[:10], 10)
    nobody = Split(few, Index.of([[] for _ in range(clients)]))
    return Experiment(
        make(method),
        Federation(Split(arrays, owned), nobody, nobody, few),
        partial(models.make, model, classes=10, inputs=inputs),
        rounds=rounds,
        cohort=cohort,
        local=Local(epochs=1, batch_size=samples, lr=0.01),
        evaluation=Evaluation(what=()),
        device="cpu",
        engine="serial",
        client_state=states,
    )


def measure(
    work: str, clients: int, states: Literal["memory", "disk"], rounds: int, out: Path | None
) -> dict[str, Any]:
    """One run: memory after some of its rounds, and what lies on disk at its end."""
    gauge = Gauge()
    result = run(experiment(work, clients, states, rounds), out, checkpoint_every=10, callbacks=[gauge])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 * 1.024
    start = time.perf_counter()
    states_kept = result.snapshot.rows if work == "models" else result.snapshot.store
    assert states_kept is not None
    sizes = [_size(state) for _, state in states_kept]
    seconds = time.perf_counter() - start
    cell: dict[str, Any] = {
        "rounds": rounds,
        "with_state": len(sizes),
        "states_mb": round(sum(sizes) / 1e6),
        "ms_per_state": round(1e3 * seconds / len(sizes), 1),
        **{
            name: {str(number): gauge.memory[number][name] for number in SHOWN if number in gauge.memory}
            for name in MEMORY
        },
        "peak_mb": round(peak),
        "seconds_per_round": round(statistics.median(gauge.seconds), 2),
    }
    if out is not None:
        last = sorted((out / "checkpoint").iterdir())[-1]
        cell["checkpoint_mb"] = round(sum(file.stat().st_size for file in last.iterdir()) / 1e6, 1)
        folder = out / (ROWS if work == "models" else CLIENTS)
        cell["folder_mb"] = round(sum(file.stat().st_size for file in folder.iterdir()) / 1e6)
    return cell


def _size(state: dict[str, dict[str, torch.Tensor]]) -> int:
    return sum(value.nbytes for tree in state.values() for value in tree.values())


def measure_in_process(work: str, clients: int, states: str, rounds: int, room: Path | None) -> dict[str, Any]:
    """``measure`` in a process of its own; what it writes is removed."""
    with tempfile.TemporaryDirectory(dir=room) as folder:
        out = [str(Path(folder) / "run")] if states == "disk" else []
        command = [sys.executable, __file__, "--arm", work, str(clients), states, str(rounds), *out]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout)


def main() -> None:
    """Run all arms and print them; write JSON if requested."""
    parser = options(__doc__)
    parser.add_argument("--work", nargs="+", choices=[*WORK], default=[*WORK])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory-rounds", type=int, default=10)
    parser.add_argument("--room", type=Path, help="where the disk arm may write; default: the temporary folder")
    parser.add_argument("--arm", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        work, clients, states, rounds, *out = args.arm
        print(json.dumps(measure(work, int(clients), states, int(rounds), Path(out[0]) if out else None)))
        return
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    for work in args.work:
        several = WORK[work][-1]
        arms = [*(("disk", clients, args.rounds) for clients in several), ("memory", several[0], args.memory_rounds)]
        for states, clients, rounds in arms:
            name = f"{work}, {clients} clients, {states}"
            results[name] = measure_in_process(work, clients, states, rounds, args.room)
            print(name, json.dumps(results[name]), flush=True)
            save(results, args.out)


if __name__ == "__main__":
    main()
