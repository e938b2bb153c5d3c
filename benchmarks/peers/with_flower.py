"""FedAvg in Flower's simulation, on two Ray actors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import MessageType
from flwr.server import Grid
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from turns import Turns
from workload import read

FOLDER = sys.argv[1]
client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train the client that the message names; its worker reads the data once."""
    import workload

    cache = workload.__dict__.setdefault("held", {})
    if not cache:
        torch.set_num_threads(1)
        cache["work"] = work = workload.read(str(message.content["config"]["folder"]))
        cache |= {"x": torch.from_numpy(work.x), "y": torch.from_numpy(work.y), "model": work.module()}
    config, model = message.content["config"], cache["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=cache["work"].lr)
    order = torch.from_numpy(cache["work"].order[config["round"], config["member"]])
    for at in order.split(cache["work"].batch):
        optimizer.zero_grad()
        F.cross_entropy(model(cache["x"][at]), cache["y"][at]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(order)})}
    return Message(content=RecordDict(content), reply_to=message)


class Stopped(Exception):
    """Raised when there are no more turns."""


class TakeTurns(FedAvg):
    """Flower's FedAvg with given cohorts; waits before each round."""

    def __init__(self, turns: Turns, cohort: int) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.turns, self.cohort, self.last = turns, cohort, None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        nodes = sorted(grid.get_node_ids())
        if not self.turns.wait():
            raise Stopped
        for member in range(self.cohort):
            record = ConfigRecord({"folder": FOLDER, "round": server_round - 1, "member": member})
            content = RecordDict({"arrays": arrays, "config": record})
            yield Message(content=content, message_type=MessageType.TRAIN, dst_node_id=nodes[member])

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        result = super().aggregate_train(server_round, replies)
        self.last = result[0]
        self.turns.stop()
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Do rounds until there are no more turns."""
    turns, work = Turns(), read(FOLDER)
    strategy = TakeTurns(turns, work.cohorts.shape[1])
    try:
        strategy.start(grid, ArrayRecord(work.module().state_dict()), num_rounds=len(work.cohorts) + 1)
    except Stopped:
        assert strategy.last is not None
        turns.finish([value.numpy() for value in strategy.last.to_torch_state_dict().values()])


if __name__ == "__main__":
    resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=100, backend_config=resources)
