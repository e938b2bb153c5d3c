"""What the Ray engine costs on one machine: a round against ``processes``, bytes to the driver, memory, and kills.

    python benchmarks/ray_engine.py [--only W1 W2 states constants memory kills nodes] [--repeats 11] [--out FILE]

W1 and W2 are those of ``engines.py``, with ``compute=auto``; contestants take turns on the same cohort, and a ratio is
the median over turns of a round's seconds over those of ``processes``. ``bytes`` left the driver in a round, the
broadcast aside, and came back to it. ``states`` is SCAFFOLD on W1 with clients that all have a state of .8 MB:
``shared`` keeps these in files that the workers read and write (``client_state=shared``), ``disk`` in files that the
driver reads and writes. ``memory`` is the resident memory of the driver and of its workers over 500 rounds,
``kills`` what a run with killed workers has in common with one without.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from engines import workload
from record import machine, options, save

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.local import draw_cohort
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.store import ROOM, StateFolder, StateStore
from fedloom.rounds.engine import Engine
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.round import federated_round
from fedloom.rounds.server import Server
from fedloom_apps.ray.actor import pack, unpack
from fedloom_apps.ray.engine import Ray


def engine_for(plan: ClientPlan, name: str) -> Engine:
    """An engine with the compute that it chooses."""
    return engines.make(name)(plan, computes.make("auto"))


class Contestant:
    """A run on an engine, which it may share with others; ``gather`` is how its sums come back."""

    def __init__(
        self, plan: ClientPlan, engine: Engine, gather: str = "auto", files: Path | None = None, shared: bool = False
    ) -> None:
        self.plan, self.engine, self.gather, self.shared = plan, engine, gather, shared
        self.server = Server.initial(plan, plan.theta0, plan.buffers0)
        self.store = StateStore() if files is None else StateStore(StateFolder(files), ROOM)
        self.light = False  # as the engine would see it alone

    def round(self, cohort: np.ndarray) -> float:
        """Seconds of a round."""
        if isinstance(self.engine, Ray):
            self.engine.gather, self.engine.light = self.gather, self.light
            shared = self.shared and self.store.folder is not None
            self.engine.files = partial(self.store.block, round=self.server.round + 1) if shared else None
        begin = time.perf_counter()
        self.server, report = federated_round(self.plan, self.engine, self.server, self.store, cohort)
        self.store.put(report.states, self.server.round)
        seconds = time.perf_counter() - begin
        self.light = isinstance(self.engine, Ray) and self.engine.light
        return seconds


def plan_of(name: str, method: str = "fedavg") -> tuple[ClientPlan, int]:
    """The plan of a workload and its cohort size."""
    model, split, local, size = workload(name)
    return ClientPlan.of(copy.deepcopy(model), methods.make(method), split, local), size


def compare(name: str, repeats: int, method: str = "fedavg", files: Path | None = None) -> dict[str, object]:
    """Seconds of a round and bytes at the driver, everyone taking turns; with a folder, states in files as well."""
    plan, size = plan_of(name, method)
    forked = engine_for(plan, "processes")  # before Ray has threads
    cluster = engine_for(plan, "ray")
    runs = {"processes": Contestant(plan, forked)}
    runs |= {f"ray, {way}": Contestant(plan, cluster, way) for way in ("fold", "chain")}
    clients, warm = plan.population.clients, 2
    if files is None:
        runs["ray, chain again"] = Contestant(plan, cluster, "chain")  # says how much the ratios vary
    else:
        runs["ray, fold, disk"] = Contestant(plan, cluster, "fold", files / "disk")
        for way in ("fold", "chain"):
            runs[f"ray, {way}, shared"] = Contestant(plan, cluster, way, files / way, shared=True)
        clients, warm = size + size // 5, 4
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    returned: dict[str, list[int]] = {}
    for turn in range(repeats + warm):  # the first turns warm up, until most clients have a state
        cohort = draw_cohort(clients, size, seed=0, round=turn)
        for label, run in runs.items():
            before = (run.engine.sent, run.engine.received) if isinstance(run.engine, Ray) else (0, 0)
            took = run.round(cohort)
            if turn >= warm:
                seconds[label].append(took)
            if isinstance(run.engine, Ray):
                returned[label] = [run.engine.sent - before[0], run.engine.received - before[1]]
    same = len({run.server.theta.numpy().tobytes() for run in runs.values()}) == 1
    for engine in (forked, cluster):
        engine.close()
    base = seconds["processes"]
    return {
        "same bits": same,
        "seconds": {label: round(statistics.median(s), 4) for label, s in seconds.items()},
        "over processes": {
            label: round(statistics.median(a / b for a, b in zip(s, base, strict=True)), 3)
            for label, s in seconds.items()
            if label != "processes"
        },
        "bytes sent and received": returned,
    }


def with_files(repeats: int) -> dict[str, object]:
    """SCAFFOLD with client states in memory, with the driver, and in files."""
    with tempfile.TemporaryDirectory() as folder:
        return compare("W1", repeats, "scaffold", Path(folder))


def resident(pid: int | str = "self") -> float:
    """Resident memory of a process in MB, without what it shares."""
    words = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE") / 1e6


def workers(engine: Engine) -> list[int]:
    """The processes of the workers of an engine, whose parent is called with the folder of its cluster."""
    assert isinstance(engine, Ray)
    folder = engine.cluster.folder.encode()
    processes = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                here = folder in Path("/proc", parent, "cmdline").read_bytes()
                if here and (path / "cmdline").read_bytes().startswith(b"ray::Actor"):
                    processes.append(int(path.name))
            except OSError:  # it ended
                continue
    return processes


def memory(rounds: int) -> dict[str, object]:
    """Resident memory of the driver and of the workers, in MB, every hundred rounds of SCAFFOLD, chained and folded."""
    cell: dict[str, object] = {}
    for way in ("fold", "chain"):
        plan, _ = plan_of("W1", "scaffold")
        run = Contestant(plan, engine_for(plan, "ray"), way)
        rows = []
        for t in range(rounds + 1):
            run.round(draw_cohort(40, 20, seed=0, round=t))  # of few clients, so that their states are soon all there
            if t % (rounds // 5) == 0 and t:
                rows.append(
                    {
                        "round": t,
                        "driver": round(resident()),
                        "workers": [round(resident(p)) for p in workers(run.engine)],
                    }
                )
        run.engine.close()
        cell[way] = rows
    return cell


def kills(count: int, rounds: int) -> dict[str, object]:
    """Kill workers at random moments of a run of FedDyn; compare with the serial engine."""
    plan, size = plan_of("W1", "feddyn")
    there, here = (Contestant(plan, engine_for(plan, name)) for name in ("ray", "serial"))
    over, killed = threading.Event(), []

    def hunt() -> None:
        draw = np.random.default_rng(0)
        while len(killed) < count and not over.wait(float(draw.uniform(1, 6))):
            if alive := workers(there.engine):
                victim = alive[int(draw.integers(len(alive)))]
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    thread = threading.Thread(target=hunt, daemon=True)
    thread.start()
    finished = 0
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        while len(killed) < count or finished < rounds:
            cohort = draw_cohort(plan.population.clients, size, seed=0, round=finished)
            there.round(cohort)
            here.round(cohort)
            finished += 1
    over.set()
    thread.join()
    there.engine.close()
    same = there.server.theta.numpy().tobytes() == here.server.theta.numpy().tobytes()
    return {"killed": len(killed), "rounds": finished, "same bits": same, "told": [str(w.message) for w in messages]}


def constants(repeats: int) -> dict[str, float]:
    """Milliseconds of a call, of a broadcast of TwoNN (0.8 MB), and of bringing such a fold back, medians."""
    plan, _ = plan_of("W1")
    engine = engine_for(plan, "ray")
    assert isinstance(engine, Ray)
    ray, (member, *_) = engine.cluster.ray, engine.cluster.ready
    sums = pack({"update": plan.theta0})
    steps: dict[str, Callable[[], object]] = {
        "call": lambda: ray.get(member.actor.alive.remote()),
        "broadcast": lambda: ray.put(sums),
        "fold": lambda: unpack(ray.get(member.actor.chain.remote(None, [], sums))),
    }
    cell = {}
    for label, step in steps.items():
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        cell[label] = round(1e3 * statistics.median(seconds), 2)
    engine.close()
    return cell


def node_kills(count: int) -> dict[str, object]:
    """Kill one of two nodes in the midst of a round, add another, and so on; compare with the serial engine."""
    cluster = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    node = cluster.add_node(num_cpus=1)
    plan, size = plan_of("W1", "feddyn")
    settings = {"address": cluster.address, "workers": 2}
    there = Contestant(plan, engines.make("ray", **settings)(plan, computes.make("auto")), "chain")
    here, finished = Contestant(plan, engine_for(plan, "serial")), 0

    def rounds(number: int) -> None:
        nonlocal finished
        for _ in range(number):
            cohort = draw_cohort(plan.population.clients, size, seed=0, round=finished)
            there.round(cohort)
            here.round(cohort)
            finished += 1

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(count):
            rounds(2)
            threading.Timer(0.05, cluster.remove_node, (node,), {"allow_graceful": False}).start()
            rounds(3)
            node = cluster.add_node(num_cpus=1)
            deadline = time.monotonic() + 120
            while len(there.engine.cluster.ready) < 2 and time.monotonic() < deadline:  # type: ignore[attr-defined]
                rounds(1)
        members = len(there.engine.cluster.ready)  # type: ignore[attr-defined]
    there.engine.close()
    cluster.shutdown()
    same = there.server.theta.numpy().tobytes() == here.server.theta.numpy().tobytes()
    messages = [str(w.message) for w in record if "worker" in str(w.message)]
    return {"killed": count, "rounds": finished, "same bits": same, "workers in the end": members, "told": messages}


def main() -> None:
    """Run everything and print it; write JSON if requested."""
    parser = options(__doc__, 11)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--only", nargs="*", default=["W1", "W2", "states", "constants", "memory", "kills", "nodes"])
    args = parser.parse_args()
    results: dict[str, Any] = {
        "command": f"python benchmarks/ray_engine.py --repeats {args.repeats} --rounds {args.rounds}",
        "machine": machine(),
    }
    if args.out and args.out.exists():
        results = json.loads(args.out.read_text())
    parts: dict[str, tuple[str, Callable[[], object]]] = {
        "W1": ("W1, FedAvg", lambda: compare("W1", args.repeats)),
        "W2": ("W2, FedAvg", lambda: compare("W2", args.repeats)),
        "states": ("W1, SCAFFOLD", lambda: with_files(args.repeats)),
        "constants": ("milliseconds", lambda: constants(100)),
        "memory": ("memory in MB, W1, SCAFFOLD", lambda: memory(args.rounds)),
        "kills": ("kills of workers, W1, FedDyn", lambda: kills(20, 20)),
        "nodes": ("kills of nodes, W1, FedDyn", lambda: node_kills(3)),
    }
    for name in args.only:
        label, measure = parts[name]
        with reproducible():
            results[label] = measure()
        print(label, json.dumps(results[label]), flush=True)
        save(results, args.out)


if __name__ == "__main__":
    main()
