"""What a deployment costs: the server's own work per answer, and a round over Flower on loopback.

    python benchmarks/deployment.py --out benchmarks/results/deployment.json

First, a cohort of answers that are ready, as the server reads, checks and folds them. Second, rounds of FedAvg with
four nodes, TLS and node keys, split into the slowest node's work and everything else; medians over rounds. Third, the
time of one poll for messages, of which every idle node takes one per second.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import machine, options, save

from fedloom.compute.live import Live
from fedloom.rounds.engine import Group
from fedloom_apps.deploy.certificates import make
from fedloom_apps.deploy.engine import Deployed
from fedloom_apps.deploy.flower.host import any_port, end, hosting, start_node
from fedloom_apps.deploy.flower.supernode import Link, read_private_key
from fedloom_apps.deploy.messages import Delivered, NodeRequest, Order
from fedloom_apps.deploy.recipe import split_for_nodes
from fedloom_apps.deploy.server import DeployTask, Recipe, Roster, run
from fedloom_apps.deploy.settings import DEPLOY, Deployment
from fedloom_apps.deploy.wire import pack

COHORT, NODES, ROUNDS, POLLS = 1000, 4, 9, 200
HIDDEN = {"20 thousand": "[256]", "2 million": "[1024,1024,768]"}


class Canned:
    """Nodes that answer every order at once with the same update."""

    def __init__(self, names: tuple[str, ...], size: int) -> None:
        self.names, self.size, self.ready = names, size, list[Delivered]()
        self.spent = 0.0  # seconds that are no work of the server

    def online(self) -> Mapping[str, str]:
        return dict.fromkeys(self.names, "")

    def send(self, requests: Mapping[str, NodeRequest]) -> None:
        started = time.process_time()
        for name, request in requests.items():
            ticket = Order.read(request.order, 1 << 30).ticket
            tensors = {"update": torch.ones(self.size), "buffers": torch.zeros(0)}
            facts = {"ticket": ticket, "status": "done", "loss": 1.0, "sent": None, "seconds": 0.0}
            self.ready.append(Delivered(name, pack("answer", facts, tensors)))
        self.spent += time.process_time() - started

    def receive(self, seconds: float) -> list[Delivered]:
        answers, self.ready = self.ready[:1], self.ready[1:]
        return answers

    def close(self) -> None:
        """Do nothing."""


def recipe(*words: str) -> Recipe:
    settings = ["method=fedavg", "data=digits", "participation=1.0", "local.steps=5", "evaluation.what=[]", *words]
    return Recipe.of(DEPLOY.resolve(settings))


def answers(hidden: str) -> tuple[int, float, float]:
    """Parameters, the server's milliseconds per answer, and its peak memory in MB."""
    cohort = COHORT if "," not in hidden else COHORT // 10
    recipe_settings = recipe(f"model.hidden={hidden}")
    roster = Roster("a", {f"node-{n:04d}": (100, 0, 0) for n in range(cohort)})
    task = DeployTask(recipe_settings, roster, Canned(roster.names, 0))
    size = task.plan.layout.shared_size
    transport = Canned(roster.names, size)
    engine = Deployed(task.plan, Live, transport, roster.names, recipe_settings.assignment("a"))
    down, weights = task.state.server.broadcast(task.plan), np.full(cohort, 1 / cohort)
    started = time.process_time()
    engine.begin(down, np.arange(cohort), 0.0)
    engine.gather([work.ticket for work in engine.work.values()], 0)
    for _ in engine.run([Group(down, np.arange(cohort), lambda client: {}, weights)]):
        pass
    seconds = time.process_time() - started - transport.spent
    return size, 1e3 * seconds / cohort, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rounds(folder: Path, hidden: str) -> dict[str, float]:
    """Medians of a round over Flower."""
    recipe_settings = recipe(
        f"model.hidden={hidden}", f"clients={NODES}", f"rounds={ROUNDS + 1}", "checkpoint.every=100"
    )
    deployment = Deployment(NODES, 60.0, port=any_port(), certificates=folder / "certificates")
    data = split_for_nodes(recipe_settings.config, folder / "data")
    make(deployment.certificates, ["127.0.0.1"], [path.stem for path in data])
    address = f"127.0.0.1:{deployment.port}"
    with hosting(deployment, folder) as (transport, count):
        nodes = [start_node(p.stem, p, folder / "nodes", address, deployment.certificates) for p in data]
        try:
            result = run(replace(recipe_settings, deployment=deployment), transport, count)
            make(deployment.certificates, [], ["probe"])
            transport.online()  # registers the new key
            ca = (deployment.certificates / "ca.pem").read_bytes()
            link = Link(address, ca, read_private_key(deployment.certificates / "probe.key"), folder)
            started = time.perf_counter()
            for _ in range(POLLS):
                link.receive(1 << 30)
            poll = 1e3 * (time.perf_counter() - started) / POLLS
            link.close()
        finally:
            end(nodes)
    names = ("seconds", "deploy/work_seconds", "deploy/transport_seconds", "deploy/down_bytes", "deploy/up_bytes")
    return {"poll_ms": poll} | {
        name: statistics.median(record[name] for record in result.history[1:]) for name in names
    }


def main() -> None:
    """Run everything and print it; write JSON if requested."""
    args = options(__doc__).parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "command": "python benchmarks/deployment.py",
        "machine": machine(),
        "flwr": version("flwr"),
    }
    for name, hidden in HIDDEN.items():
        size, milliseconds, memory = answers(hidden)
        results[name] = {"parameters": size, "server_ms_per_answer": round(milliseconds, 2), "peak_mb": round(memory)}
        print(name, results[name], flush=True)
    for name, hidden in HIDDEN.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] |= {key: float(f"{value:.4g}") for key, value in rounds(Path(folder), hidden).items()}
        print(name, results[name], flush=True)
    save(results, args.out)


if __name__ == "__main__":
    main()
