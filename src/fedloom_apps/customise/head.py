"""The linear head of a finished run's server model, the features before it, and another head in its place."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.core.targets import CLASSES
from fedloom.experiment.deployed import DeployedModel
from fedloom.experiment.trained import TrainedRun


def linear_head(trained: TrainedRun, what: str) -> nn.Linear:
    """The head of the server's model; ``what`` needs it."""
    module = trained.server.module
    head = getattr(module, "head", None)
    if trained.is_deployment:
        raise ConfigError("this run has no class statistics, since its clients did not share them.")
    if not trained.federation.classes_alike:
        raise ConfigError(f"{what} needs classes with the same numbers at all clients, but each of these has its own.")
    fits = isinstance(head, nn.Linear) and head.bias is not None and hasattr(module, "features")
    if trained.plan.targets not in (None, CLASSES) or trained.federation.train.arrays.y.ndim != 1 or not fits:
        raise ConfigError(f"{what} needs one class per sample and a model with features and a linear head with a bias.")
    assert isinstance(head, nn.Linear)
    return head


def features_of(server: DeployedModel, x: Tensor) -> Tensor:
    """φ(x), [N, d], of inputs as the run's data hold them."""
    pieces = x.split(server.measurement.settings.batch_size)
    with torch.no_grad(), server.refusing_unknown(x):
        return torch.cat([server.module.features(x.to(server.device)).flatten(1) for x in pieces]).cpu()  # type: ignore[operator]


def with_head(server: DeployedModel, module: nn.Module, weight: Tensor, bias: Tensor) -> DeployedModel:
    """A copy of the module with this head, [C, d] and [C], deployed like the server's model."""
    module = copy.deepcopy(module)
    head: nn.Linear = module.head  # type: ignore[assignment]
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return replace(server, module=module.eval())
