"""pfl-research's methods, on ``PROCESSES`` processes as ``torchrun`` would start them; on a GPU they share it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

os.environ["PFL_PYTORCH_DEVICE"] = os.environ["DEVICE"]
if os.environ["PROCESSES"] != "1" and "RANK" not in os.environ:  # before PyTorch is there
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "peers", "WORLD_SIZE": os.environ["PROCESSES"], "MASTER_PORT": port,
        "LOCAL_WORLD_SIZE": os.environ["PROCESSES"], "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    for rank in reversed(range(int(os.environ["PROCESSES"]))):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank) if os.environ["DEVICE"] == "cpu" else "0"}
        if rank:
            subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.DEVNULL, stdout=2)

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from turns import Turns
from workload import MU, read

FIRST, DEVICE = os.environ.get("RANK", "0") == "0", os.environ["DEVICE"]


METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "fedavg": (FederatedAveraging, NNAlgorithmParams, {}),
    "fedprox": (FedProx, FedProxParams, {"mu": MU}),
    "scaffold": (
        SCAFFOLD,
        SCAFFOLDParams,
        {"use_gradient_as_control_variate": False, "user_state_storage": InMemoryUserStateStorage()},
    ),
}


class TakeTurns(TrainingProcessCallback):
    """Waits between rounds; the second process waits for the first one."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def wait(self) -> bool:
        """Whether there is another turn, for both processes."""
        go = torch.tensor(int(self.turns.wait()) if FIRST else 0)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(go, 0)
        self.turns.start()
        return bool(go)

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if FIRST:
            self.turns.stop()
        return not self.wait(), Metrics()


def main() -> None:
    """Do rounds until there are no more turns."""
    torch.set_num_threads(1)
    if DEVICE != "cpu":  # NCCL takes no two processes on one GPU
        start = torch.distributed.init_process_group
        torch.distributed.init_process_group = lambda backend: start(backend="gloo")
    turns, work = Turns(), read(sys.argv[1])
    x, y = torch.from_numpy(work.x).to(DEVICE), torch.from_numpy(work.y).to(DEVICE)
    module = work.module()
    module.loss = lambda inputs, labels: F.cross_entropy(module.train()(inputs), labels)
    module.metrics = lambda inputs, labels: {}
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    rounds, cohort = work.cohorts.shape
    users = iter((r, c) for r in range(rounds) for c in range(cohort))

    def samples(user: tuple[int, int]) -> Dataset:
        at = torch.from_numpy(work.order[user])
        return Dataset([x[at], y[at]], user_id=str(work.cohorts[user]))

    data = FederatedDataset(samples, lambda: next(users))
    kind, params, more = METHODS[work.method]
    more = more | ({"population": len(work.rows)} if work.method == "scaffold" else {})
    kind().run(
        params(
            central_num_iterations=rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
            **more,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        callbacks=[TakeTurns(turns)],
        send_metrics_to_platform=False,
    )
    if FIRST:
        turns.finish([parameter.detach().cpu().numpy() for parameter in module.parameters()])


if __name__ == "__main__":
    main()
