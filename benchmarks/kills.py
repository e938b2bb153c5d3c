"""Killing runs and their workers at random moments: what is left, and whether the bits are the same.

    python benchmarks/kills.py [--kills 120] [--seed 0] [--states disk] [--room BYTES]
                               [--schedule rounds] [--out FILE]

For each engine and method, a run is started in its own process, killed with SIGKILL at a random moment, and resumed,
again and again; with the processes engine, random single workers are killed as well, while the parent continues. At the
end the run directory must equal that of an undisturbed run, bit for bit, no process of the run may be alive, and no
shared memory or half-written file may be left. ``--room`` says how many bytes of client states, or last models, wait in
memory with ``--states disk`` (0: every round writes its own). With another schedule than ``rounds`` clients have
unequal devices, and kills fall while several versions are in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.base.errors import CheckpointError
from fedloom.config import build, resolve
from fedloom.experiment import checkpoint as checkpoints
from fedloom.experiment import store
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory

METHODS, ENGINES = ("scaffold", "feddyn", "fedper"), ("serial", "processes")
ROUNDS, PAUSE = 12, 0.02  # seconds after each round, so that kills fall into rounds and between them
SETTINGS = ("clients=12", "participation=0.5", "model.hidden=[16]", "local.batch_size=20", "evaluation.every=3",
            "evaluation.what=[global,clients,average]")  # fmt: skip
TIME = ("devices=lognormal", "devices.jitter=0.3")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "rounds": (),
    "deadline": ("schedule=deadline", "schedule.seconds=0.15", *TIME),
    "buffered": ("schedule=buffered", "schedule.k=2", *TIME),
    "asynchronous": ("schedule=asynchronous", *TIME),
}


class Slow(Callback):
    """Slows rounds down, so that there is time to kill the run."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Sleep."""
        time.sleep(PAUSE)


def experiment(method: str, engine: str, states: str, schedule: str) -> Experiment:
    """A small run on the digits."""
    words = [f"method={method}", f"rounds={ROUNDS}", f"engine={engine}", f"client_state={states}", *SETTINGS]
    words += SCHEDULES[schedule]
    return build(resolve([*words, "engine.workers=2"] if engine == "processes" else words))


def begin(method: str, engine: str, states: str, schedule: str, out: Path) -> int:
    """Start or resume the run in a child process; return its process id."""
    number = os.fork()
    if number:
        return number
    os.setpgid(0, 0)  # workers have the same group
    settings: dict[str, Any] = {"checkpoint_every": 2, "callbacks": [Slow()]}
    try:
        try:
            run(experiment(method, engine, states, schedule), out, resume=RunDirectory(out).is_begun, **settings)
        except CheckpointError as error:
            print(error, file=sys.stderr)
            os._exit(1)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(2)
    os._exit(0)


def alive(group: int) -> list[int]:
    """Processes of a group that are not zombies."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            processes.append(int(path.parent.name))
    return processes


def mapped(group: int) -> set[Path]:
    """The files in shared memory that processes of a group have mapped; those of other programs are not theirs."""
    files: set[Path] = set()
    for number in alive(group):
        try:
            lines = Path(f"/proc/{number}/maps").read_text().splitlines()
        except OSError:
            continue
        files |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return files


def contents(out: Path) -> dict[str, Any]:
    """The contents of a run directory, except times and all checkpoints but the last."""
    directory = RunDirectory(out)
    records = [{k: v for k, v in record.items() if k != "seconds"} for record in directory.metrics()]
    tables = {name: {k: v.tobytes() for k, v in directory.table(name).items()} for name in ("clients", "mixing")}
    last = checkpoints.available(out / "checkpoint")[-1]
    paths = [*(out / "clients").glob("*"), *(out / "models").glob("*"), *last.glob("*.safetensors")]
    states = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths}
    return {"records": records, "tables": tables, "model": (out / "model.safetensors").read_bytes(), "states": states}


def disturb(
    method: str,
    engine: str,
    kills: int,
    draw: np.random.Generator,
    folder: Path,
    states: str = "auto",
    schedule: str = "rounds",
) -> dict[str, Any]:
    """Kill parents and workers of one run until enough have died; finished runs start again."""
    run(experiment(method, "serial", states, schedule), folder / "whole", checkpoint_every=2)
    expected, shared = contents(folder / "whole"), set[Path]()
    counts = {"parents": 0, "workers": 0, "runs": 0, "orphans": 0, "failures": 0, "same": True, "left_over": 0}
    while counts["parents"] + counts["workers"] < kills or counts["runs"] == 0:
        out = folder / f"run-{counts['runs']}"
        ended = False
        while not ended:
            parent = begin(method, engine, states, schedule, out)
            moment = time.monotonic() + float(draw.uniform(0.02, 0.5))
            hunted = engine == "processes" and draw.random() < 0.5  # a worker, and the parent goes on
            spared = counts["parents"] + counts["workers"] >= kills
            hits = 0  # a client with which three workers die is left out, which an undisturbed run leaves in
            while os.waitpid(parent, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
                if time.monotonic() < moment:
                    continue
                shared |= mapped(parent)
                if spared or hits == 2:
                    moment = time.monotonic() + 0.1
                    continue
                workers = [number for number in alive(parent) if number != parent]
                if hunted and workers:
                    os.kill(int(draw.choice(workers)), signal.SIGKILL)
                    counts["workers"] += 1
                    hits += 1
                    moment = time.monotonic() + float(draw.uniform(0.1, 0.5))
                elif not hunted:
                    os.kill(parent, signal.SIGKILL)
                    os.waitpid(parent, 0)
                    counts["parents"] += 1
                    break
            deadline = time.monotonic() + 10
            while alive(parent) and time.monotonic() < deadline:
                time.sleep(0.005)
            counts["orphans"] += len(alive(parent))
            ended = RunDirectory(out).is_begun and RunDirectory(out).status.ended
        counts["runs"] += 1
        counts["failures"] += len(RunDirectory(out).summary().get("failures", []))
        counts["same"] &= contents(out) == expected
        counts["left_over"] += len(list(out.rglob(".*"))) + sum(path.exists() for path in shared)
    return counts


def main() -> None:
    """Disturb every method on every engine, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--states", default="auto")
    parser.add_argument("--room", type=int, default=store.ROOM)
    parser.add_argument("--schedule", choices=[*SCHEDULES], default="rounds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kills.json"))
    arguments = parser.parse_args()
    store.ROOM = arguments.room
    draw, cells = np.random.default_rng(arguments.seed), [(m, e) for m in METHODS for e in ENGINES]
    table = []
    for method, engine in cells:
        with tempfile.TemporaryDirectory() as folder:
            kills = -(-arguments.kills // len(cells))
            row = disturb(method, engine, kills, draw, Path(folder), arguments.states, arguments.schedule)
        table.append({"method": method, "engine": engine, **row})
        print(table[-1], flush=True)
    about = {"kills": sum(row["parents"] + row["workers"] for row in table), "seed": arguments.seed}
    about |= {"states": arguments.states, "room": arguments.room, "schedule": arguments.schedule}
    about |= {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    arguments.out.write_text(json.dumps({**about, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
