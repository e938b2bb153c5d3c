"""Krum and multi-Krum: the updates that are closest to most others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from fedloom.base.ranges import Count, Range
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs


@dataclass(frozen=True)
class Krum(Mixing):
    """The mean of the m updates with the smallest scores s_i = Σ ‖Δ_i - Δ_j‖² over the n - f - 2 nearest j ≠ i.

    m = 1 is Krum, m > 1 multi-Krum. f = ⌊ρn⌋ of the n clients are assumed hostile.

    Breakdown point: if at most f are hostile and n ≥ 2f + 3, an update that is farther from every honest one than
    honest ones are from each other, by a factor that depends only on n, is not among the m ≤ n - f selected: its p_i is
    0. In smaller cohorts (n < 2f + 3, after drop-outs) scores use the single nearest update, without a guarantee. All
    clients have equal weight. All updates of the cohort are held in memory. Blanchard, El Mhamdi, Guerraoui & Stainer,
    NeurIPS 2017, sections 4 and 6; ties are broken by client number.

    Args:
        hostile: ρ in [0, 1/2), the largest fraction of hostile clients to tolerate.
        selected: m; None means n - f.
    """

    hostile: Annotated[float, Range(0, 0.5, below=True)] = 0.2
    selected: Count | None = 1

    needs = Needs(updates=True)
    citation = "blanchard2017krum"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """Equal weights of the m selected clients, 0 for all others."""
        flat = torch.stack(list(info.updates)).double()
        n = len(flat)
        f = int(self.hostile * n + 1e-9)
        products = flat @ flat.T
        lengths = products.diagonal()
        squares = lengths[:, None] + lengths - (products + products.T)  # symmetric to the bit, so that ties are ties
        squares.fill_diagonal_(-1)  # a client's distance to itself is the least
        nearest = squares.sort(dim=1).values[:, 1 : 1 + max(n - f - 2, 1)]  # the first is the client itself
        selected = nearest.sum(1).sort(stable=True).indices[: min(self.selected or n - f, n)].cpu().numpy()
        p = np.zeros(n)
        p[selected] = 1 / len(selected)
        return state, p
