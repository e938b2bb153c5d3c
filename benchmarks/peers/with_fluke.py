"""fluke's methods: its server and client classes, which run in one process."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from fluke import FlukeENV
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.nets import EncoderHeadNet
from turns import Turns
from workload import MU, read

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {  # classes, and settings of clients
    "fedavg": ("FedAVG", {}),
    "fedprox": ("FedProx", {"mu": MU}),
    "scaffold": ("SCAFFOLD", {}),
    "ditto": ("Ditto", {"tau": 1, "lam": MU}),
    "fedper": ("FedPer", {}),
}


class Ordered(FastDataLoader):
    """A client's mini-batches of the current round, all epochs as one."""

    def __init__(self, client: int) -> None:
        rows = torch.from_numpy(work.rows[client])
        super().__init__(x[rows], y[rows], num_labels=work.settings["classes"], batch_size=work.batch)
        self.client = client

    def __iter__(self) -> Iterator[Any]:
        batches = work.mini_batches(current, self.client)
        self.n_batches = len(batches)
        return iter([(x[at], y[at]) for at in batches])


torch.set_num_threads(1)
turns, work, current = Turns(), read(sys.argv[1]), 0
x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
FlukeENV().set_inmemory(True)
FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
name, settings = ALGORITHMS[work.method]
algorithm = getattr(import_module(f"fluke.algorithms.{work.method}"), name)
algorithm = algorithm.__new__(algorithm)  # whose constructor deals a data set of fluke's to clients
layers = work.module()
first = EncoderHeadNet(layers[:-1], layers[-1])
step = {"name": torch.optim.SGD, "lr": work.lr}
clients = [
    algorithm.get_client_class()(
        index=i, model=copy.deepcopy(first), train_set=Ordered(i), test_set=None, loss_fn=torch.nn.CrossEntropyLoss(),
        optimizer_cfg=OptimizerConfigurator(dict(step)), local_epochs=1, **settings,
    )
    for i in range(len(work.rows))
]  # fmt: skip
shared = first.encoder if work.method == "fedper" else first
server = algorithm.get_server_class()(model=copy.deepcopy(shared), test_set=None, clients=clients)
for client in clients:
    client.set_channel(server.channel)
algorithm._round_zero(types.SimpleNamespace(server=server, clients=clients))
while turns.wait():
    cohort = [clients[i] for i in work.cohorts[current].tolist()]
    server.broadcast_model(cohort)
    for client in cohort:
        client.local_update(current + 1)
    server.aggregate(cohort, server.receive_client_models(cohort, state_dict=False))
    turns.stop()
    current += 1
turns.finish([parameter.detach().numpy() for parameter in server.model.parameters()])
