"""The algorithms of pfl-research, in its simulation on one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

import torch
from federation import LR, Federation, Models, serve, vector
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import nn


class Turned(MappedVectorStatistics):
    """A displacement θ_i - θ that counts as θ - θ_i where it is divided to estimate a gradient."""

    def apply_elementwise(self, f: Any) -> Any:
        return super().apply_elementwise(lambda value: f(-value))


class Doubles(PyTorchModel):
    """Differences of models are in the model's own precision."""

    def get_model_difference(self, other_parameters: Any, clone: bool = False) -> MappedVectorStatistics:
        pairs = self.variable_map.items()
        return MappedVectorStatistics({name: value.detach() - other_parameters[name] for name, value in pairs})


class Signed(Doubles):
    """And they estimate gradients with their own sign."""

    def get_model_difference(self, other_parameters: Any, clone: bool = False) -> Turned:
        return Turned(dict(super().get_model_difference(other_parameters, clone).items()))


def play(federation: Federation, method: str, settings: Mapping[str, Any], changed: bool) -> Models:
    """A method's last models."""
    module = federation.model()
    module.loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # pyright: ignore[reportAttributeAccessIssue]
    module.metrics = lambda x, y: {}  # pyright: ignore[reportAttributeAccessIssue]
    kind = (Signed if method == "scaffold" else Doubles) if changed else PyTorchModel
    model = kind(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    rounds, size = federation.cohorts.shape
    visits = iter([(t, i) for t, cohort in enumerate(federation.cohorts.tolist()) for i in cohort])

    def user(visit: tuple[int, int]) -> Dataset:
        federation.round, client = visit
        batches = federation.batches(client)[: None if int(federation.batch_size) else 1]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return Dataset([x, y], user_id=str(client))

    data = FederatedDataset(user, lambda: next(visits))
    common = {
        "central_num_iterations": rounds, "evaluation_frequency": 10**9, "train_cohort_size": size,
        "val_cohort_size": 0,
    }  # fmt: skip
    if method == "scaffold":
        params: Any = SCAFFOLDParams(
            **common, population=int(federation.owner.max()) + 1, use_gradient_as_control_variate=False,
            user_state_storage=InMemoryUserStateStorage(),
        )  # fmt: skip
        algorithm: Any = SCAFFOLD()
    elif method == "fedprox":
        params, algorithm = FedProxParams(**common, mu=settings["mu"]), FedProx()
    else:
        params, algorithm = NNAlgorithmParams(**common), FederatedAveraging()
    steps = NNTrainHyperParams(
        local_num_epochs=int(federation.epochs),
        local_learning_rate=LR,
        local_batch_size=int(federation.batch_size) or None,
    )
    algorithm.run(params, SimulatedBackend(data, data), model, steps, send_metrics_to_platform=False)
    return {"theta": vector(module)}


if __name__ == "__main__":
    serve(play)
