"""The methods of flgo: its server and client classes, without its simulated clock."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from federation import LR, Federation, Models, Net, loss, serve, vector
from flgo.utils import fmodule
from torch import nn

MODULES = {
    "q_ffl": "qfedavg", "coordinate_median": "fedavg", "hierfavg": "hierarchical", "dfedavgm": "decentralized",
}  # fmt: skip
WORDS: dict[str, tuple[str, ...]] = {  # the settings of each method, in flgo's order
    "feddyn": ("alpha",), "scaffold": ("eta",), "fedprox": ("mu",), "fedavgm": ("beta",), "q_ffl": ("q",),
    "afl": ("learning_rate_lambda",), "fedmgda": ("eta", "epsilon"), "moon": ("mu", "tau"), "ditto": ("mu",),
    "fedspeed": ("lmbd", "alpha", "rho"), "mifa": ("c",),
}  # fmt: skip


class Module(fmodule.FModule):
    """The net with flgo's arithmetic, which makes modules without arguments."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.body, self.head = net.body, net.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Calculator:
    """Losses and optimisers."""

    def compute_loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}

    def get_optimizer(self, model: nn.Module, lr: float, weight_decay: float, momentum: float) -> Any:
        return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=abs(weight_decay), momentum=momentum)

    def to_device(self, batch: Any) -> Any:
        return batch


def play(federation: Federation, method: str, settings: Mapping[str, Any], changed: bool) -> Models:
    """A method's last models."""
    module = import_module(f"flgo.algorithm.{MODULES.get(method, method)}")

    def hosting(kind: Any, clients: list[Any]) -> Any:
        """A server of clients, or of edge servers."""
        return type("Hosting", (Hosting, kind), {})(clients)

    class Hosting:
        gv = types.SimpleNamespace(logger=types.SimpleNamespace(info=print))

        def __init__(self, clients: list[Any]) -> None:
            self.model = Module()
            self.model.load_state_dict(federation.model().state_dict())
            self.clients, self.num_clients, self.device = clients, len(clients), torch.device("cpu")
            self.proportion, self.sample_option, self.current_round = 1.0, "full", 1
            self.aggregation_option = settings.get("aggregate", "uniform")
            values = [settings[word] for word in WORDS.get(method, ())]
            self.option = {"learning_rate": LR, "algo_para": values}
            self.learning_rate, self._object_map = LR, dict(enumerate(clients))
            self.lr_scheduler_type, self.num_edge_rounds = "constant", every
            self._data_names, self._cache_vars = [], []
            for client in clients:
                client.server = self
            self.initialize()
            self.aggregation_option = settings.get("aggregate", "uniform")  # which some overwrite

        def iterate(self) -> Any:
            federation.round = self.current_round - 1  # edges have theirs one after the other
            return super().iterate()

        def sample(self) -> list[int]:
            cohort = federation.cohorts[federation.round].tolist()
            return [at for at, client in enumerate(self.clients) if getattr(client, "number", cohort[0]) in cohort]

        def communicate(self, selected: list[int], *_: Any) -> Any:
            self.received_clients = selected
            return self.unpack([self.clients[i].reply(self.pack(i)) for i in selected])

    class Client(module.Client):
        def __init__(self, number: int) -> None:
            self.number, self.id, self.calculator, self.device = number, number, Calculator(), torch.device("cpu")
            self.learning_rate, self.momentum, self.weight_decay, self.clip_grad = LR, 0.0, 0.0, 0.0
            self.datavol = len(federation.rows(number))
            self.train_data, self.model, self._cache_vars, self._object_map = range(self.datavol), None, [], {}
            self.queue: Any = collections.deque()

        @property
        def num_steps(self) -> int:
            return len(federation.batches(self.number))

        def get_batch_data(self) -> Any:
            if not self.queue:
                self.queue.extend(federation.batches(self.number))
            return self.queue.popleft()

        def test(self, model: Any, flag: str = "val") -> dict[str, float]:
            value = loss(model, federation.samples(self.number))
            return {"loss": value - 1e-8 if changed and method == "q_ffl" else value}  # which it adds again

    if method == "fedmgda":
        exact(module, changed)
    every, clients = settings.get("num_edge_rounds", 1), [Client(i) for i in range(int(federation.owner.max()) + 1)]
    if method == "dfedavgm":
        return on_ring(module, clients, federation, changed)
    hosted = clients
    if method == "hierfavg":
        hosted = [hosting(module.EdgeServer, part) for part in (clients[:3], clients[3:])]
    server = hosting(module.Server, hosted)
    for client in clients:
        client.initialize()
        if changed and method == "fedspeed":  # whose weight decay stays as it is
            client.lmbd = -client.lmbd
    if changed and method == "mifa":
        server.update_table = [server.model.zeros_like() for _ in clients]
    for number, _ in enumerate(federation.rounds()):
        if number % every == 0:
            server.iterate()
            server.current_round += 1
    private = {f"client {c.id}": vector(c.model) for c in clients if method == "ditto" and c.model is not None}
    return {"theta": vector(copy.deepcopy(server.model)), **private}


def on_ring(module: Any, clients: list[Any], federation: Federation, changed: bool) -> Models:
    """Models of clients on a ring, without a server; changed, the last ones are mixed, too."""
    ring = object.__new__(module.BiRingProtocol)
    ring.clients, ring.num_clients = clients, len(clients)
    ring.init_topology()
    for client in clients:
        client.model = Module()
        client.model.load_state_dict(federation.model().state_dict())
        client.init_state()
        client.sample = lambda: [0, 1]
        client.communicate = lambda at, me=client: me.unpack([me.clients[i].send_state() for i in at])
    for _ in federation.rounds():
        ring.iterate()

    def last(client: Any) -> Any:
        return client.aggregate([client.model, *(other.state["model"] for other in client.clients)])

    models = {f"client {c.id}": vector(last(c) if changed else c.model) for c in clients}
    return {"theta": sum(models.values()) / len(clients), **models}


def exact(module: Any, changed: bool) -> None:
    """FedMGDA+: directions have length 1, and the quadratic programme is solved as well as float64 can."""
    options = module.cvxopt.solvers.options
    options |= {"show_progress": False}
    module.torch = torch
    if changed:
        options |= {"abstol": 1e-16, "reltol": 1e-16, "feastol": 1e-16}
        module.torch = types.SimpleNamespace(**{**vars(torch), "sqrt": lambda x: torch.sqrt(x) - 1e-8})


if __name__ == "__main__":
    serve(play)
