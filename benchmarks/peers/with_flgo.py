"""flgo's methods: its server and client classes in one process, without its simulated clock."""

from __future__ import annotations

import sys
from collections import deque
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from flgo.utils import fmodule
from torch import nn
from turns import Turns
from workload import MU, read

SETTINGS: dict[str, list[float]] = {"fedavg": [], "fedprox": [MU], "scaffold": [1.0], "ditto": [MU]}


class Module(fmodule.FModule):
    """The workload's model with flgo's arithmetic, which makes modules without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = work.module()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Calculator:
    """Losses and optimisers."""

    def compute_loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

    def get_optimizer(self, model: nn.Module, lr: float, weight_decay: float, momentum: float) -> Any:
        return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay, momentum=momentum)

    def to_device(self, batch: Any) -> Any:
        return batch


torch.set_num_threads(1)
turns, work = Turns(), read(sys.argv[1])
x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
algorithm = import_module(f"flgo.algorithm.{work.method}")


class Server(algorithm.Server):
    """Takes the workload's cohorts, and asks clients without the clock's detours."""

    def __init__(self, clients: list[Any]) -> None:
        self.model, self.clients, self.num_clients = Module(), clients, len(clients)
        self.proportion, self.sample_option, self.current_round = 1.0, "full", 1
        self.option = {"learning_rate": work.lr, "algo_para": SETTINGS[work.method]}
        self.learning_rate, self.device, self._object_map = work.lr, torch.device("cpu"), dict(enumerate(clients))
        self._data_names, self._cache_vars = [], []
        for client in clients:
            client.server = self
        self.initialize()
        self.aggregation_option = "uniform"  # clients are of equal size

    def sample(self) -> list[int]:
        return work.cohorts[self.current_round - 1].tolist()

    def communicate(self, selected: list[int], *_: Any) -> Any:
        self.received_clients = selected
        return self.unpack([self.clients[i].reply(self.pack(i)) for i in selected])


class Client(algorithm.Client):
    """Takes the workload's mini-batches."""

    def __init__(self, number: int) -> None:
        self.number, self.id, self.calculator, self.device = number, number, Calculator(), torch.device("cpu")
        self.learning_rate, self.momentum, self.weight_decay, self.clip_grad = work.lr, 0.0, 0.0, 0.0
        self.datavol, self.num_steps = work.rows.shape[1], work.order.shape[2] // work.batch
        self.train_data, self.model, self._cache_vars = range(self.datavol), None, []
        self.queue: deque[torch.Tensor] = deque()

    def get_batch_data(self) -> Any:
        if not self.queue:
            self.queue.extend(work.mini_batches(server.current_round - 1, self.number))
        at = self.queue.popleft()
        return x[at], y[at]


clients = [Client(i) for i in range(len(work.rows))]
server = Server(clients)
for client in clients:
    client.initialize()
while turns.wait():
    server.iterate()
    turns.stop()
    server.current_round += 1
turns.finish([parameter.detach().numpy() for parameter in server.model.parameters()])
