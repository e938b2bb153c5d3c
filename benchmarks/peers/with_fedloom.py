"""FedLoom, with the engine and compute that it chooses by default; on one process if ``PROCESSES`` is 1."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch
from turns import Turns
from workload import MU, read

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.local import Local
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.store import StateStore
from fedloom.models import wrap
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.round import federated_round
from fedloom.rounds.server import Server

SETTINGS = {"fedprox": {"mu": MU}, "ditto": {"lam": MU}}


def main() -> None:
    """Do rounds until there are no more turns."""
    turns, work = Turns(), read(sys.argv[1])
    device = os.environ["DEVICE"]
    x, y = torch.from_numpy(work.x).to(device), torch.from_numpy(work.y).to(device)
    arrays = Arrays(x, y, work.settings["classes"])
    local = Local(epochs=work.epochs, batch_size=work.batch, lr=work.lr)
    model = work.module()
    if work.method == "fedper":
        model = wrap(model, head=str(len(model) - 1))
    split = Split(arrays, Index.of(list(work.rows)))
    method = methods.make(work.method, **SETTINGS.get(work.method, {}))
    plan = ClientPlan.of(model, method, split, local, device=device)
    plan = replace(plan, theta0=plan.theta0.to(device), buffers0=plan.buffers0.to(device))
    plan = replace(plan, rounds=1000, cohort=work.cohorts.shape[1])  # what "auto" looks at
    compute = "auto" if "auto" in computes.names() else "batched"
    with reproducible():
        engine = engines.make("serial" if os.environ["PROCESSES"] == "1" else "auto")(plan, computes.make(compute))
        print(f"{type(engine).__name__}, {compute}")
        server, store = Server.initial(plan, plan.theta0, plan.buffers0), StateStore()
        while turns.wait():
            server, report = federated_round(plan, engine, server, store, work.cohorts[server.round])
            store.put(report.states, server.round)
            turns.stop()
        engine.close()
    private = plan.theta0[len(server.theta) :]
    plan.layout.write(model, torch.cat([server.theta, private]).cpu(), server.buffers.cpu())
    turns.finish([parameter.detach().numpy() for parameter in model.parameters()])


if __name__ == "__main__":
    main()
