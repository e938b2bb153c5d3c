"""FedDBE's bias memory: the vector by which a client's features differ from common ones stays at the client."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.core.parts import Personal


class Shift(nn.Module):
    """x + b for x [..., d], with a trained vector b [d] that is 0 at first."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros_like(like))

    def forward(self, x: Tensor) -> Tensor:
        """x + b."""
        return x + self.bias


@dataclass(frozen=True)
class BiasMemory(Personal):
    """The head sees r(x) + b_i: features r(x) [B, d] of the shared body, and a trained vector b_i [d] of the client.

    Body and head are shared and averaged. b_i is 0 at first, takes the same local steps as they do, is never sent, and
    is deployed with them. It stores what sets a client's features apart, so that the body need not: in FedDBE the term
    ``feature_mean`` keeps their mean near that of all clients. Zhang et al., NeurIPS 2023, §4.1 (personalised
    representation bias memory).

    The model has ``features`` and a linear ``head``, which is called ``head.linear`` here and b_i ``head.memory.bias``.

    Raises:
        ConfigError: for a model without such a head.
    """

    citation = "zhang2023feddbe"

    def server_network(self, model: nn.Module) -> nn.Module:
        """A copy of the model with b before its head."""
        head = getattr(model, "head", None)
        linear = next((m for m in head.modules() if isinstance(m, nn.Linear)), None) if head is not None else None
        if linear is None:
            raise ConfigError(
                "personal 'bias_memory' adds a vector to the inputs of a linear head, but "
                f"{type(model).__name__} has none; wrap the module, like fedloom.wrap(module, head='fc')."
            )
        network = copy.deepcopy(model)
        shift = Shift(linear.weight[0])
        network.head = nn.Sequential(OrderedDict(memory=shift, linear=network.head))  # type: ignore[arg-type]
        return network

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter is b."""
        return isinstance(owner, Shift)
