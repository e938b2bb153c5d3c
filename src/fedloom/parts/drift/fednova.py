"""FedNova's normalised averaging."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.core.context import Context, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves, Needs


@dataclass(frozen=True)
class FedNovaDrift(Drift):
    """Clients upload updates rescaled to τ̄ local steps, τ̄Δ_i/‖a_i‖₁; the server rescales to τ_eff = Σ p_i ‖a_i‖₁.

    Δ = (τ_eff/τ̄) Σ p_i τ̄Δ_i/‖a_i‖₁, where ‖a_i‖₁ is the number of local steps τ_i, or with local momentum β
    [τ_i - β(1 - β^τ_i)/(1 - β)]/(1 - β). τ̄, that of a client with the mean number of samples, cancels; it keeps
    uploads at the scale of updates, for parts that read, clip or compress individual ones. This removes the objective
    inconsistency by which clients with more local steps pull the solution towards their own; with equal τ_i it changes
    no method. Wang et al., NeurIPS 2020, eq. (6); with clipping or a proximal term it is an approximation. With a
    constant learning rate η it converges to within O(η) of the minimiser, whereas FedAvg's bias does not vanish with η.
    """

    needs = Needs(sgd=True)
    update_kind = "normalised"
    citation = "wang2020fednova"

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """The update rescaled to τ̄ local steps, τ̄Δ_i/‖a_i‖₁."""
        return ClientEnd({}, {}, update * (ctx.usual_steps / ctx.effective_steps))

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Σ p_i ‖a_i‖₁/τ̄ times the mixed update; the server knows every ‖a_i‖₁."""
        return state, info.rescaling * update
