"""FedLab's methods in its standalone simulation, which runs in one process."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.modules |= {name: MagicMock() for name in ("torchvision", "torchvision.transforms", "torchvision.datasets")}
# only its data sets need torchvision, whose build has to match that of torch

import torch  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from turns import Turns  # noqa: E402
from workload import MU, read  # noqa: E402

PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # names of classes, settings of server and clients
    "fedavg": ("FedAvg", {}, {}),
    "fedprox": ("FedProx", {}, {"mu": MU}),
    "scaffold": ("Scaffold", {"lr": 1.0}, {}),
    "ditto": ("Ditto", {}, {}),
}


class TakeTurns(StandalonePipeline):
    """Waits between rounds, which end with an evaluation of nothing."""

    def evaluate(self) -> None:
        turns.stop()
        self.handler.round = self.handler.global_round * (not turns.wait())


def loader(client: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The mini-batches of a client of the round's cohort."""
    return [(x[at], y[at]) for at in work.mini_batches(rounds - 1, client)]


def sample() -> list[int]:
    """The workload's cohort of the next round."""
    global rounds
    rounds += 1
    return work.cohorts[rounds - 1].tolist()


torch.set_num_threads(1)
turns, work, rounds = Turns(), read(sys.argv[1]), 0
x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
name, of_server, of_clients = PARTS[work.method]
module = import_module(f"fedlab.contrib.algorithm.{work.method}")
clients, quiet = len(work.rows), logging.getLogger("quiet")
trainer = getattr(module, f"{name}SerialClientTrainer")(work.module(), clients, logger=quiet)
trainer.setup_dataset(SimpleNamespace(get_dataloader=loader))
trainer.setup_optim(1, work.batch, work.lr, **of_clients)
share = (work.cohorts.shape[1] + 0.5) / clients if work.cohorts.shape[1] < clients else 1.0
handler = getattr(module, f"{name}ServerHandler")(work.module(), 10**9, share, logger=quiet)
handler.sample_clients = sample
if of_server:
    handler.setup_optim(**of_server)
pipeline = TakeTurns(handler, trainer)
if turns.wait():
    pipeline.main()
turns.finish([parameter.detach().numpy() for parameter in handler.model.parameters()])
