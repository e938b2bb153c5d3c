"""How far two correct implementations of FedAvg drift apart: FedLoom's and the bare loop, in both precisions.

    python benchmarks/peers/rounding.py [--only W1 CNN] [--rounds 6] [--cohort 2] [--out FILE]

A difference is the distance between the two models relative to how far they moved. A sum in another order is off by
rounding; a ReLU or a maximum near its kink then switches, and each step multiplies what is there. In double precision
the same code stays together to many digits: a real difference would show there at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from workload import Workload, read, write

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.local import Local
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.store import StateStore
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.round import federated_round
from fedloom.rounds.server import Server


def bare(work: Workload, dtype: torch.dtype, rounds: int, cohort: int) -> list[Tensor]:
    """The bare loop's model after every round, as vectors [P] in the order of the module."""
    model = work.module().to(dtype)
    parameters, x, y = list(model.parameters()), torch.from_numpy(work.x).to(dtype), torch.from_numpy(work.y)
    theta, models = torch.nn.utils.parameters_to_vector(parameters).detach().clone(), []
    for round in range(rounds):
        total = torch.zeros_like(theta)
        for order in torch.from_numpy(work.order[round, :cohort]):
            torch.nn.utils.vector_to_parameters(theta.clone(), parameters)
            optimizer = torch.optim.SGD(parameters, lr=work.lr)
            for at in order.split(work.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[at]), y[at]).backward()
                optimizer.step()
            total += torch.nn.utils.parameters_to_vector(parameters).detach() / cohort
        theta = total
        models.append(theta)
    return models


def loom(work: Workload, dtype: torch.dtype, rounds: int, cohort: int) -> list[Tensor]:
    """FedLoom's, likewise."""
    arrays = Arrays(torch.from_numpy(work.x).to(dtype), torch.from_numpy(work.y), 10)
    model = work.module().to(dtype)
    local = Local(epochs=work.epochs, batch_size=work.batch, lr=work.lr)
    plan = ClientPlan.of(model, methods.fedavg(), Split(arrays, Index.of(list(work.rows))), local)
    engine = engines.make("serial")(replace(plan, rounds=rounds, cohort=cohort), computes.make("auto"))
    server, models = Server.initial(plan, plan.theta0, plan.buffers0), []
    for round in range(rounds):
        server, _ = federated_round(plan, engine, server, StateStore(), work.cohorts[round, :cohort])
        plan.layout.write(model, server.theta, server.buffers)
        models.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return models


def drift(name: str, rounds: int, cohort: int) -> dict[str, dict[str, list[float]]]:
    """The differences after 1, 2 and 5 steps of a first round, and after each of several rounds of 5 steps."""
    precisions = (torch.float32, torch.float64)
    differences = {str(dtype): {"after steps 1, 2, 5": [], "after rounds of 5 steps": []} for dtype in precisions}
    for steps, turns, kind in ((1, 1, 0), (2, 1, 0), (5, rounds, 1)):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), name, turns, steps)
            work = read(folder)
        for dtype in precisions:
            start = torch.nn.utils.parameters_to_vector(work.module().parameters()).detach().to(dtype)
            pairs = zip(*(run(work, dtype, turns, cohort) for run in (bare, loom)), strict=True)
            relative = [float(f"{float((a - b).norm() / (a - start).norm()):.2g}") for a, b in pairs]
            after_steps, after_rounds = differences[str(dtype)].values()
            after_steps.append(relative[0])
            after_rounds += relative * kind
    return differences


def main() -> None:
    """Measure and print; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["W1", "CNN"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cohort", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"command": "python benchmarks/peers/rounding.py", "torch": torch.__version__}
    with reproducible():
        for name in args.only:
            results[name] = drift(name, args.rounds, args.cohort)
            print(name, json.dumps(results[name], indent=1), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
