"""pFedGraph: every client has a model at the server, mixed by a graph that is inferred from the round's updates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedloom.base.ranges import Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, Meeting
from fedloom.core.links import Links
from fedloom.core.simplex import project
from fedloom.parts.topology.attention import products
from fedloom.parts.topology.graphs import OwnModel


@dataclass(frozen=True)
class Collaboration(OwnModel):
    """Client i receives Σ_j B_ij w_j, with weights near the shares of samples that prefer similar models w_j.

    ::

        B_i = argmin_{b∈Δ} Σ_j [α (b_j - p_j)² - b_j s_ij]          s_ij = cos(w_i - θ⁰, w_j - θ⁰),  p_j = n_j / Σ n

    among the clients of the round: the projection of p + s_i/(2α) onto the simplex. With a mixing that is uniform
    n_j = 1. α → ∞ is federated averaging, and α → 0 local training, since no other model is as similar as one's own. In
    pFedGraph the term ``cosine`` beside the loss keeps local models in the direction of what they received. The
    topology's state is θ⁰.

    Ye, Ni, Wu, Chen & Wang, ICML 2023, algorithm 1. The cosines are those of displacements from θ⁰ and α multiplies the
    squares, as in the authors' code, which takes cosines above 0.9 for 1.

    Args:
        alpha: α > 0; the authors use 0.8.
    """

    alpha: Positive = 0.8

    home = "server"
    mean = "unused"
    citation = "ye2023pfedgraph"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"first": theta.clone()}

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
        first, active = state["first"], meeting.active
        gram = products(lambda n, at: meeting.theta(n)[at].double() - first[at].double(), active, len(first))
        norms = np.sqrt(gram.diagonal())
        with np.errstate(all="ignore"):  # what has diverged beyond all numbers is similar to nobody
            similar = np.nan_to_num(gram / np.maximum(np.outer(norms, norms), 1e-300), nan=0.0)
        shares = meeting.shares(active)
        return state, Links.dense(active, np.array([project(shares + s / (2 * self.alpha)) for s in similar]))
