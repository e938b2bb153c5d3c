"""FedAvg in FedLoom, with the engine and compute that it chooses by default."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from turns import Turns
from workload import LR, read

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.local import Local
from fedloom.core.plan import ClientPlan
from fedloom.core.round import federated_round
from fedloom.core.server import Server
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.store import StateStore


def main() -> None:
    """Do rounds until there are no more turns."""
    turns, work = Turns(), read(sys.argv[1])
    arrays = Arrays(torch.from_numpy(work.x), torch.from_numpy(work.y), 10)
    local = Local(epochs=work.epochs, batch_size=work.batch, lr=LR)
    model = work.module()
    split = Split(arrays, Index.of(list(work.rows)))
    plan = ClientPlan.of(model, methods.fedavg(), split, local)
    plan = replace(plan, rounds=1000, cohort=work.cohorts.shape[1])  # what "auto" looks at
    compute = "auto" if "auto" in computes.names() else "batched"
    with reproducible():
        engine = engines.make("auto")(plan, computes.make(compute))
        print(f"{type(engine).__name__}, {compute}")
        server, store = Server.initial(plan, plan.theta0, plan.buffers0), StateStore()
        while turns.wait():
            server, _ = federated_round(plan, engine, server, store, work.cohorts[server.round])
            turns.done()
        engine.close()
    plan.layout.write(model, server.theta, server.buffers)
    turns.finish([parameter.detach().numpy() for parameter in model.parameters()])


if __name__ == "__main__":
    main()
