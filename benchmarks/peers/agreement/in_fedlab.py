"""The methods of FedLab: its server handlers and client trainers, round by round."""

from __future__ import annotations

import types
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from federation import LR, Federation, Models, loss, put, serve, vector
from torch import Tensor

PARTS = {
    "fedavg": ("fedavg", "FedAvgServerHandler", "FedAvgSerialClientTrainer"),
    "fedprox": ("fedprox", "FedProxServerHandler", "FedProxSerialClientTrainer"),
    "scaffold": ("scaffold", "ScaffoldServerHandler", "ScaffoldSerialClientTrainer"),
    "fednova": ("fednova", "FedNovaServerHandler", "FedNovaSerialClientTrainer"),
    "feddyn": ("feddyn", "FedDynServerHandler", "FedDynSerialClientTrainer"),
    "q_ffl": ("qfedavg", "qFedAvgServerHandler", "qFedAvgClientTrainer"),
    "ditto": ("ditto", "DittoServerHandler", "DittoSerialClientTrainer"),
    "ifca": ("ifca", "IFCAServerHander", "IFCASerialClientTrainer"),
}


class Quiet:
    """A log that nobody reads."""

    def info(self, *words: Any) -> None:
        pass


def play(federation: Federation, method: str, settings: Mapping[str, Any], changed: bool) -> Models:
    """A method's last models."""
    name, handles, trains = PARTS[method]
    module = import_module(f"fedlab.contrib.algorithm.{name}")
    clients, model = int(federation.owner.max()) + 1, federation.model()
    server_kind, client_kind = getattr(module, handles), getattr(module, trains)
    if changed and method == "feddyn":
        server_kind, client_kind = every_model(server_kind), differentiable(client_kind)
    size = federation.cohorts.shape[1]
    handler = server_kind(model, len(federation.cohorts), size / clients, logger=Quiet())
    handler.num_clients = clients
    single = method == "q_ffl"
    trainer = client_kind(model, logger=Quiet()) if single else client_kind(model, clients, logger=Quiet())
    trainer.setup_dataset(types.SimpleNamespace(get_dataloader=lambda i, *batch: federation.batches(i)))
    if "server" in settings:
        handler.setup_optim(**settings["server"])
    trainer.setup_optim(1, 1, LR, **settings.get("client", {}))
    if changed and single:
        trainer.lr = LR
    for cohort in federation.rounds():
        down = handler.downlink_package
        if single:
            for i in cohort:
                if changed:
                    of_received(module, loss(put(federation.model(), down[0].numpy()), federation.samples(i)))
                trainer.local_process(down, i)
                handler.load(trainer.uplink_package)
        else:
            trainer.local_process(down, cohort)
            for package in trainer.uplink_package:
                handler.load(package)
    return {"theta": vector(handler.model)}


def of_received(module: Any, value: float) -> None:
    """q-FedAvg: the loss in the powers is that of the received model, not the sum over mini-batches while it moves."""
    module.np = types.SimpleNamespace(float_power=lambda _, power: np.float_power(value, power))


def differentiable(kind: type) -> type:
    """FedDyn: the parameters in the linear and in the quadratic term are those that are trained."""

    class Changed(kind):
        @property
        def model_parameters(self) -> Tensor:
            return torch.cat([parameter.reshape(-1) for parameter in self._model.parameters()])

        def train(self, client: int, *arguments: Any) -> list[Tensor]:
            trained = super().train(client, *arguments)
            self.L[client] = self.L[client].detach()
            return [vector.detach().clone() for vector in trained]

    return Changed


def every_model(kind: type) -> type:
    """FedDyn: h moves by the sum of θ_i - θ, not by the sum of θ_i less one θ."""

    class Changed(kind):
        def global_update(self, buffer: list[Any]) -> None:
            self.h = self.h + self.alpha / self.num_clients * (len(buffer) - 1) * self.model_parameters
            super().global_update(buffer)

    return Changed


if __name__ == "__main__":
    serve(play)
