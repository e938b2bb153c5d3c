"""The strategies of Flower, which aggregate; its clients are the user's own, here plain SGD."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0"}

import numpy as np
from federation import Federation, Models, loss, put, serve, sgd, vector
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # which messages carry
logging.getLogger("flwr").setLevel(logging.ERROR)
STRATEGIES = {
    "fedavg": "FedAvg", "fedavgm": "FedAvgM", "fedadam": "FedAdam", "fedyogi": "FedYogi", "fedadagrad": "FedAdagrad",
    "coordinate_median": "FedMedian", "trimmed_mean": "FedTrimmedAvg", "krum": "Krum", "multi_krum": "MultiKrum",
    "q_ffl": "QFedAvg",
}  # fmt: skip


class Grid:
    """As many nodes as a round has clients."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.nodes + 1))


def play(federation: Federation, method: str, settings: Mapping[str, Any], changed: bool) -> Models:
    """A method's last models."""
    aggregator = getattr(strategy, STRATEGIES[method])(fraction_evaluate=0.0, **settings)
    arrays = ArrayRecord({"theta": Array(federation.theta)})
    if changed and hasattr(aggregator, "tau"):
        aggregator.v_t = {"theta": np.full_like(federation.theta, aggregator.tau**2)}
    late = 10**9 if changed and method == "fedadam" else 0  # the bias correction has faded by then
    for cohort in federation.rounds():
        theta, replies = arrays["theta"].numpy(), []
        sent = list(aggregator.configure_train(federation.round + 1, arrays, ConfigRecord(), Grid(len(cohort))))
        for client, message in zip(cohort, sent, strict=True):
            net = put(federation.model(), theta)
            before = loss(net, federation.samples(client)) - (1e-10 if changed else 0)  # which q-FedAvg adds again
            sgd(net, federation.batches(client))
            samples = 1 if changed and method == "multi_krum" else len(federation.rows(client))
            metrics = MetricRecord({"num-examples": samples, "train_loss": before})
            content = RecordDict({"arrays": ArrayRecord({"theta": Array(vector(net))}), "metrics": metrics})
            replies.append(Message(content=content, reply_to=message))
        result, _ = aggregator.aggregate_train(federation.round + 1 + late, replies)
        assert result is not None
        arrays = ArrayRecord({"theta": Array(result["theta"].numpy())})
    return {"theta": arrays["theta"].numpy()}


if __name__ == "__main__":
    serve(play)
