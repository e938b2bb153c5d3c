"""Memory of a live learner over many observed tasks: what it keeps, and what the process holds.

    python benchmarks/observed.py [--tasks 100000] [--out benchmarks/results/observed.json]

Tasks are tiny (nine points of three classes in the plane, a network 2-4-3, one step without adaptation), so that only
their number counts. ``state_bytes`` and ``task_bytes`` are counted from the learner's tensors; ``rss_mb`` is the
process's resident memory, ``objects`` those that Python's collector tracks. MOML keeps no task and B-MOML three (a
tenth of the tasks is enough to see it); FTML keeps all, and observes a thousandth of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import save

from fedloom.core.federation import Arrays
from fedloom.core.local import Local
from fedloom.core.parts import Adaptation
from fedloom.models import models
from fedloom_apps.online import BufferedMoml, Ftml, LiveLearner, Moml, Online, OnlineLearner, grid
from fedloom_apps.online.ensemble import state_bytes, task_bytes
from fedloom_apps.online.streams import TaskStream
from fedloom_apps.online.task import OnlineTask

LEARNERS: dict[str, tuple[OnlineLearner, float]] = {  # and the fraction of the tasks that it observes
    "ftml": (Ftml(), 0.001),
    "b_moml": (BufferedMoml(buffer=4, draws=1), 0.1),
    "moml": (Moml(), 1.0),
}


def points(number: int) -> Arrays:
    """Nine samples of a task, whose three classes have centres of their own."""
    draw = np.random.default_rng([0, number])
    y = np.arange(9) % 3
    x = 2 * draw.normal(size=(3, 2))[y] + 0.3 * draw.normal(size=(9, 2))
    return Arrays(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), 3)


def resident() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def observe(learner: OnlineLearner, tasks: int) -> list[dict[str, Any]]:
    """What a learner keeps after 10, 100, … tasks and after every tenth of all."""
    experts = grid(learner, Adaptation(), Local(steps=1, batch_size=4, lr=0.1), {})
    first = points(0)
    model = partial(models.make, "mlp", classes=3, inputs=(2,), hidden=(4,))
    live = LiveLearner(OnlineTask(Online("observed", experts, TaskStream.of([(first, first)]), model, support=4)))
    looks: list[dict[str, Any]] = []
    start = time.perf_counter()
    for number in range(1, tasks + 1):
        task = points(number)
        live.observe((task.x, task.y))
        if number % max(tasks // 5, 1) == 0 or number in (10, 100, 1000, 10000):
            gc.collect()
            sizes = {"state_bytes": state_bytes(live.state), "task_bytes": task_bytes(live.state)}
            process = {"rss_mb": resident(), "objects": len(gc.get_objects())}
            looks.append({"tasks": number, **sizes, **process, "seconds": round(time.perf_counter() - start, 1)})
    return looks


def main() -> None:
    """Observe the tasks with each learner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/observed.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python benchmarks/observed.py --tasks {args.tasks}"
    results: dict[str, Any] = {"command": command, "torch": torch.__version__, "looks": {}}
    for name, (learner, fraction) in LEARNERS.items():
        results["looks"][name] = observe(learner, max(round(fraction * args.tasks), 10))
        save(results, args.out)
        print(name, results["looks"][name][-1])


if __name__ == "__main__":
    main()
