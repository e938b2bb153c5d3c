"""Clustered federated learning: several models at the server; every client uses the one that fits its data best."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.core import rng
from fedloom.core.parts import Personal, Use
from fedloom.core.ranges import Count
from fedloom.core.tree import Tree


class Several(nn.Module):
    """Models of one architecture, without common parameters; the output is that of the first."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of the first model."""
        return self.models[0](x)


@dataclass(frozen=True)
class Clustered(Personal):
    """The server keeps k models; a client trains and deploys the one with the smallest loss on its training samples.

    ::

        j_i = argmin_j F_i(θ_j)                θ_j ← θ_j - Σ_{i∈S: j_i = j} p_i Δ_i / Σ_{i∈S: j_i = j} p_i

    Clients choose anew in every round and whenever they deploy a model, so that a client that never participated has
    one, too. A model that no client of the cohort chooses is unchanged. A round costs k downloads and one upload. The
    first model starts from the experiment's initial values, the others from a permutation of them within every trained
    tensor; for independently drawn values this is another draw. Constant tensors give equal models, of which the first
    is chosen. Much depends on the initialisation: if one model is best for all clients at first, all train it, and the
    others never catch up. Ghosh, Chung, Yin & Ramchandran, NeurIPS 2020 (IFCA), algorithm 1 with model averaging.

    Args:
        clusters: k ≥ 1; with 1 it is federated averaging.
    """

    clusters: Count = 2

    citation = "ghosh2020ifca"

    @property
    def levels(self) -> tuple[str, ...]:
        """One level per cluster."""
        return tuple(f"cluster_{number}" for number in range(self.clusters))

    def uses(self, client: int, own: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """All k models."""
        return tuple(Use(number) for number in range(self.clusters))

    def whole(self, model: nn.Module) -> nn.Module:
        """All k models as one module."""
        return Several([model, *(reordered(model, number) for number in range(1, self.clusters))])

    def network(self, whole: nn.Module, level: int) -> nn.Module:
        """The model of a cluster."""
        return whole.get_submodule(f"models.{level}")


def reordered(model: nn.Module, number: int) -> nn.Module:
    """A copy with permuted values within every trained tensor; permutations depend on ``number`` and sizes alone."""
    model, draw = copy.deepcopy(model), rng.stream(0, "cluster", number)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            order = torch.from_numpy(draw.permutation(parameter.numel()))
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return model
