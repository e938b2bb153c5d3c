"""FedAvg in FedLab's standalone simulation, which runs in one process."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

sys.modules |= {name: MagicMock() for name in ("torchvision", "torchvision.transforms", "torchvision.datasets")}
# only its data sets need torchvision, whose build has to match that of torch

import torch  # noqa: E402
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from turns import Turns  # noqa: E402
from workload import LR, read  # noqa: E402


class TakeTurns(StandalonePipeline):
    """Waits between rounds, which end with an evaluation of nothing."""

    def evaluate(self) -> None:
        turns.done()
        self.handler.round = self.handler.global_round * (not turns.wait())


class Given(FedAvgServerHandler):
    """Takes the cohorts of the workload."""

    number = -1

    def sample_clients(self) -> list[int]:
        Given.number += 1
        return list(range(self.num_clients_per_round))


def loader(member: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The mini-batches of a member of the round's cohort."""
    parts = torch.from_numpy(work.order[Given.number, member]).split(batch)
    return [(x[at], y[at]) for at in parts]


torch.set_num_threads(1)
turns, work = Turns(), read(sys.argv[1])
x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
cohort = work.cohorts.shape[1]
quiet = logging.getLogger("quiet")
trainer = FedAvgSerialClientTrainer(work.module(), cohort, logger=quiet)
trainer.setup_dataset(SimpleNamespace(get_dataloader=loader))
trainer.setup_optim(1, work.batch, LR)
handler = Given(work.module(), 10**9, 1.0, logger=quiet)
pipeline = TakeTurns(handler, trainer)
if turns.wait():
    pipeline.main()
turns.finish([parameter.detach().numpy() for parameter in handler.model.parameters()])
