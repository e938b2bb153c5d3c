"""Clustered federated learning by division: a cluster whose clients pull apart at a stationary point is divided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, Meeting
from fedloom.core.links import Links
from fedloom.core.parts import Needs
from fedloom.parts.topology.attention import products
from fedloom.parts.topology.graphs import OwnModel


@dataclass(frozen=True)
class Bipartition(OwnModel):
    """The clients of a cluster have one model; where their mean update vanishes and single ones do not, it is divided.

    ::

        θ_i ← Σ_{j∈c} n_j θ_j / Σ_{j∈c} n_j                                  for all clients i of a cluster c

        c is divided if ‖Σ_{j∈c} n_j Δ_j / n_c‖ < ε₁, max_{i∈c} ‖Δ_i‖ > ε₂ and γ < √((1 - α_cross)/2)

    into the two parts between which the largest cosine of updates, α_cross = max_{i∈c₁, k∈c₂} cos(Δ_i, Δ_k), is
    smallest: the components that single linkage merges last. At first all clients are one cluster. The parts start from
    the model of the cluster. A round in which a client of the cluster fails divides nothing. Sattler, Müller & Samek,
    IEEE Transactions on Neural Networks and Learning Systems 2021, algorithms 1 and 3; in the authors' code models of
    the round in which a cluster is divided are means of its parts, and clusters of two are not divided. With a mixing
    that is uniform n_j = 1.

    Args:
        mean_below: ε₁ ≥ 0.
        some_above: ε₂ ≥ 0.
        gamma: γ, how far gradients within one distribution may be from their mean; 0 divides whenever updates allow.
    """

    mean_below: NonNegative = 0.4
    some_above: NonNegative = 1.6
    gamma: Probability = 0.0

    needs = Needs(full_participation=True)
    home = "server"
    mean = "unused"
    citation = "sattler2021cfl"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"cluster": torch.zeros(facts.clients, dtype=torch.int64)}

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
        clients, active = meeting.facts.clients, meeting.active
        cluster = state["cluster"].cpu().numpy().copy()
        weights = np.zeros((clients, clients))
        for number in np.unique(cluster).tolist():
            members = np.flatnonzero(cluster == number)
            present = np.intersect1d(members, active)
            sources = present if len(present) else members
            weights[np.ix_(members, sources)] = meeting.shares(sources)
            if len(present) == len(members) > 1:
                cluster[self._leavers(members, meeting)] = cluster.max() + 1
        return {"cluster": torch.from_numpy(cluster)}, Links.dense(np.arange(clients), weights)

    def _leavers(self, members: np.ndarray, meeting: Meeting) -> np.ndarray:
        """The members that leave the cluster, if it is divided."""
        from scipy.cluster.hierarchy import cut_tree, linkage  # slow to import
        from scipy.spatial.distance import squareform

        size = len(meeting.theta(int(members[0])))
        gram = products(lambda n, at: meeting.received(n)[at].double() - meeting.theta(n)[at].double(), members, size)
        share = meeting.shares(members)
        norms = np.sqrt(gram.diagonal())
        mean = np.sqrt(max(share @ gram @ share, 0.0))
        if not (mean < self.mean_below and norms.max() > self.some_above):
            return members[:0]
        cosine = gram / np.maximum(np.outer(norms, norms), 1e-300)
        tree = linkage(squareform(1 - cosine, checks=False), "single")
        leaves = cut_tree(tree, 2).ravel() == 1
        cross = float(cosine[np.ix_(leaves, ~leaves)].max())
        return members[leaves] if self.gamma < np.sqrt(max(1 - cross, 0.0) / 2) else members[:0]
