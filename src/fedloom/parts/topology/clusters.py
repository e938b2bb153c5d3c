"""Clustered federated learning: several models at the server; every client uses the one that fits its data best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.ranges import Count
from fedloom.core.parts import Topology


@dataclass(frozen=True)
class Clusters(Topology):
    """The server keeps k models; a client trains and deploys the one with the smallest loss on its training samples.

    ::

        r(i) = argmin_r F_i(θ_r)                θ_r ← θ_r - Σ_{i∈S: r(i)=r} p_i Δ_i        B = I

    Clients choose anew in every round and whenever they deploy a model, so that a client that never participated has
    one, too. A model that no client of the cohort chooses is unchanged. A round costs k downloads and one upload. The
    first model starts from the experiment's initial values, the others from a permutation of them within every trained
    tensor; for independently drawn values this is another draw. Constant tensors give equal models, of which the first
    is chosen. Much depends on the initialisation: if one model is best for all clients at first, all train it, and the
    others never catch up. Server optimisers and robust mixings have a state for each model. Ghosh, Chung, Yin &
    Ramchandran, NeurIPS 2020 (IFCA), algorithm 1 with model averaging.

    Args:
        clusters: k ≥ 1; with 1 it is federated averaging.
    """

    clusters: Count = 2

    mean = "unused"
    citation = "ghosh2020ifca"

    @property
    def chooses(self) -> bool:
        """Clients choose by their losses."""
        return self.clusters > 1

    def count(self, clients: int) -> int:
        return self.clusters

    def first(self, theta: Tensor, number: int, leaves: tuple[int, ...]) -> Tensor:
        """θ⁰, permuted within every tensor for all models but the first."""
        if not number:
            return theta
        draw = rng.stream(0, "cluster", number)
        return torch.cat([part[torch.from_numpy(draw.permutation(len(part)))] for part in theta.split(leaves)])
