"""FedNova's normalised averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedloom.core import tree
from fedloom.core.parts import ClientEnd, Context, Drift, Needs, Reduce
from fedloom.core.slots import drifts
from fedloom.core.tree import Tree


@drifts.register(name="normalized")
@dataclass(frozen=True)
class FedNovaDrift(Drift):
    """Clients upload Δ_i/τ_i, their update per local step τ_i, and the server moves by τ_eff = Σ p_i τ_i such steps.

    Δ = (Σ p_i τ_i) Σ p_i Δ_i/τ_i. It removes the inconsistency by which clients with more local steps pull the solution
    towards themselves; with equal τ_i it is FedAvg. Wang et al., NeurIPS 2020, eq. (6) for plain SGD: ‖a_i‖₁ = τ_i;
    with clipping or a proximal term that is an approximation. With a constant learning rate η it stops within O(η) of
    the minimiser, where FedAvg's distance stays.
    """

    needs = Needs(shared=True, plain_sgd=True)
    uploads = {"steps": Reduce.MIX}  # noqa: RUF012
    citation = """@inproceedings{wang2020fednova,
  title={Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
  author={Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
  booktitle={Advances in Neural Information Processing Systems}, year={2020}}"""

    def end(self, ctx: Context, update: Tree) -> ClientEnd:
        """Δ_i/τ_i and τ_i."""
        steps = torch.as_tensor(ctx.steps, dtype=update["shared"].dtype)
        return ClientEnd({}, {"steps": steps}, tree.scale(update, 1 / steps))

    def server(self, state: Tree, update: Tree, reduced: Mapping[str, Tree]) -> tuple[Tree, Tree]:
        """τ_eff times the mixed update."""
        return state, tree.scale(update, reduced["steps"][""])
