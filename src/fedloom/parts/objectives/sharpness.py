"""Sharpness-aware minimisation: gradients at points where the loss is larger."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.linalg import vector_norm

from fedloom.base.ranges import NonNegative, Probability
from fedloom.core.context import Context
from fedloom.core.parts import Probe, Term


@dataclass(frozen=True)
class Sharpness(Term):
    """Local steps go along the gradient at the end of a step uphill, on the same mini-batch.

    With g = ∇F_i(w) [M] on the mini-batch, of the whole objective without its corrections, in all parameters of the
    model::

        g ← (1 - α) g + α ∇F_i(w + ρ g/‖g‖)

    For α = 1 this is the gradient of max_{‖ε‖ ≤ ρ} F_i(w + ε) to first order (SAM), so that clients look for flat
    minima, which differ less between them. It costs two passes a step, and nothing is communicated. Everything that
    composes with an objective composes with it: with FedAvg it is FedSAM, with FedCM MoFedSAM (Qu et al., ICML 2022,
    algorithms 1 and 2), and with FedDC's drift, α < 1 and ``unit=False`` FedSpeed (Sun et al., ICLR 2023, algorithm 1).
    ρ = 0 and α = 0 are the objective itself.

    Args:
        rho: ρ ≥ 0, the length of the step uphill.
        blend: α in [0, 1], the share of the gradient at its end.
        unit: go along g/‖g‖; False for ρg.
    """

    rho: NonNegative = 0.05
    blend: Probability = 1.0
    unit: bool = True

    citation = "qu2022fedsam"

    def probe(self, grad: Tensor, w: Tensor, ctx: Context) -> Probe:
        """(1 - α) g + α ∇F_i(w + ρ g/‖g‖)."""
        length = vector_norm(grad).clamp(min=1e-12) if self.unit else 1.0  # where g is 0, it is the point itself
        uphill = yield w + grad * (self.rho / length)
        return grad.lerp(uphill, self.blend) if self.blend < 1 else uphill
