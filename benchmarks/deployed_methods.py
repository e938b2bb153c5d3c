"""Methods over Flower: the same bits as the serial engine on the same partition?

    python benchmarks/deployed_methods.py [--methods fedavg feddyn …] [--rounds 5] [--out FILE]

A SuperLink with TLS and node keys on loopback and four resident nodes, each of which holds one client of digits
(Dirichlet 0.3). Three of them take part in a round. Compared with a simulation by ``engine=serial compute=live`` are
the server's model, the server states of all parts, every client's own state as its node keeps it, and the losses and
metrics that nodes measure on their test samples. ``equal`` says which of these have the same bits, ``values`` how many
numbers that are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from record import machine, options, save
from torch import Tensor

from fedloom.config.keys import build, resolve
from fedloom.experiment.federated import RunResult
from fedloom.experiment.federated import run as simulate
from fedloom.experiment.store import flat
from fedloom_apps.deploy.certificates import make
from fedloom_apps.deploy.engine import version_in
from fedloom_apps.deploy.flower.host import any_port, end, hosting, start_node
from fedloom_apps.deploy.recipe import split_for_nodes
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.settings import DEPLOY, Deployment
from fedloom_apps.deploy.versions import Versions

NODES = 4
SETTINGS = (
    "data=digits", "partition=dirichlet", f"clients={NODES}", "cohort=3", "local.epochs=2",
    "evaluation.what=[clients]",
)  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "feddyn": (),
    "scaffold": (),
    "superfed_mm": (),
    "fedper": (),
    "aaggff_d": (),
    "fedevg": ("model=energy_cnn", "evaluation.what=[]"),
}
Parts = dict[str, dict[str, Tensor]]


def compare(method: str, folder: Path, rounds: int) -> dict[str, Any]:
    """A deployed run and a simulated one, bit by bit."""
    words = [f"method={method}", *SETTINGS, *METHODS.get(method, ()), f"rounds={rounds}"]
    settings = DEPLOY.resolve(words)
    deployment = Deployment(NODES, 60.0, port=any_port(), certificates=folder / "certificates")
    data = split_for_nodes(settings, folder / "data")
    make(deployment.certificates, ["127.0.0.1"], [path.stem for path in data])
    homes, address = folder / "nodes", f"127.0.0.1:{deployment.port}"
    with ExitStack() as stack:
        transport, count = stack.enter_context(hosting(deployment, folder))
        nodes = [start_node(p.stem, p, homes, address, deployment.certificates) for p in data]
        stack.callback(end, nodes)
        there = run(replace(Recipe.of(settings), deployment=deployment), transport, count)
    here = simulate(build(resolve([*words, "engine=serial", "compute=live"])))
    both = zip(
        tensors_by_kind(there, at_nodes(there, homes)), tensors_by_kind(here, dict(here.snapshot.store)), strict=True
    )
    pairs = {name: (deployed, simulated) for (name, deployed), (_, simulated) in both if deployed or simulated}
    return {
        "equal": {name: same(*pair) for name, pair in pairs.items()},
        "values": {name: sum(t.numel() for t in deployed.values()) for name, (deployed, _) in pairs.items()},
        "left out": len(there.failures),
    }


def at_nodes(result: RunResult, homes: Path) -> dict[int, Parts]:
    """The states that the nodes keep, in the versions that the server counts, by client."""
    states_by_node = {}
    for client, state in result.snapshot.store:
        (home,) = {path.parent for path in homes.glob(f"node-{client}/*/*.*") if version_in(state) in path.name}
        states_by_node[client] = Versions(home).state(version_in(state))
    return states_by_node


def tensors_by_kind(result: RunResult, states: Mapping[int, Parts]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The results of a run, by kind, as named tensors."""
    server = result.snapshot.server
    yield "model", {"theta": server.theta, "buffers": server.buffers}
    yield "server state", flat(server.parts)
    yield "client states", {f"{client}|{key}": t for client, parts in states.items() for key, t in flat(parts).items()}
    rows = [{k: v for k, v in r.items() if k.startswith("clients/") and v is not None} for r in result.history]
    yield "evaluation", {f"{n}|{k}": torch.tensor(v).double() for n, row in enumerate(rows) for k, v in row.items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the same names, types and bits."""
    return first.keys() == second.keys() and all(
        t.dtype == second[name].dtype and t.numpy().tobytes() == second[name].numpy().tobytes()
        for name, t in first.items()
    )


def main() -> None:
    """Compare the methods, print each as it is done, and write JSON if requested; fails if bits differ."""
    parser = options(__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "command": f"python benchmarks/deployed_methods.py --rounds {args.rounds}",
        "machine": machine(),
        "flwr": version("flwr"),
        "methods": {},
    }
    if args.out and args.out.exists():
        results["methods"] = json.loads(args.out.read_text())["methods"]
    for method in args.methods:
        with tempfile.TemporaryDirectory() as folder:
            results["methods"][method] = compare(method, Path(folder), args.rounds)
        print(method, json.dumps(results["methods"][method]), flush=True)
        save(results, args.out)
    if any(not all(row["equal"].values()) for row in results["methods"].values()):
        raise SystemExit("some bits differ")


if __name__ == "__main__":
    main()
