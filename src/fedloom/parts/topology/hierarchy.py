"""Two levels: clients train the model of their edge server; a cloud averages the edges' models from time to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedloom.base.ranges import Count
from fedloom.base.tree import Tree
from fedloom.core.context import Meeting
from fedloom.core.links import Links
from fedloom.core.parts import Topology


@dataclass(frozen=True)
class Hierarchy(Topology):
    """Edge servers with a model each, which all become their mean in every κ-th round.

    ::

        θ_e ← θ_e - step_e(Σ_{i∈e} p_i Δ_i)             every round, with any mixing and server optimiser
        θ_e ← Σ_f q_f θ_f                               if κ divides t + 1

    q_f is the edge's share of all samples, or with a mixing that is uniform its share of all clients. With κ = 1, plain
    steps and all clients in a round this is one level. Server states stay at their edges. A message between an edge and
    the cloud is counted like one between a client and its edge. Liu et al., ICC 2020 (HierFAVG), algorithm 1, where κ₂
    is ``cloud_every`` and κ₁ the local steps.

    Args:
        edges: number of edge servers.
        cloud_every: κ, rounds from one averaging in the cloud to the next.
        members: which clients belong to an edge: ``blocks`` of consecutive numbers, which partitions by label or source
            make alike, or ``strided``, every ``edges``-th one.
    """

    edges: Count = 2
    cloud_every: Count = 1
    members: Literal["blocks", "strided"] = "blocks"

    home, mean = "edges", "kept"
    citation = "liu2020hierfavg"

    def count(self, clients: int) -> int:
        return min(self.edges, clients)

    def receives(self, sizes: np.ndarray) -> np.ndarray:
        number, edges = np.arange(len(sizes)), self.count(len(sizes))
        return number * edges // len(sizes) if self.members == "blocks" else number % edges

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links | None]:
        if (meeting.t + 1) % self.cloud_every:
            return state, None
        models = np.arange(len(meeting.sizes))
        return state, Links.dense(models, np.tile(meeting.shares(models), (len(models), 1)))
