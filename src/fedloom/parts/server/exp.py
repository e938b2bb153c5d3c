"""FedExP's adaptive server step size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Halves, Reduce, ServerOptimizer


@dataclass(frozen=True)
class Extrapolated(ServerOptimizer):
    """θ ← θ - ηΔ with η = max{1, Σ p_i‖Δ_i‖² / (2(‖Δ‖² + ε))}: the more updates disagree, the longer the step.

    Each client uploads one scalar, ‖Δ_i‖² of the update as sent, after any compression. Jhunjhunwala, Wang &
    Joshi, ICLR 2023, eq. (10), where p_i = 1/|S|; the squares are mixed like the updates, as in the authors' code,
    since only then is the ratio at least 1/2 for ε = 0. Where the server rescales the mixed update, as FedNova, q-FFL,
    norm bounding and FedMGDA+ do, the squares are rescaled with it: the ratio measures disagreement, not length.
    A robust mixing does not bound the square that a hostile client declares.

    Args:
        eps: ε ≥ 0, guards against division by a vanishing mean update.
    """

    eps: NonNegative = 1e-3

    uploads = {"squares": Reduce.MIX}  # noqa: RUF012
    update_statistics = {"squares": lambda update: update.square().sum()}  # noqa: RUF012
    citation = "jhunjhunwala2023fedexp"

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        square = update.square().sum() + self.eps
        squares = uploads["squares"] * info.rescaling**2
        if info.combined is not info.mixed:
            assert info.combined is not None
            assert info.mixed is not None
            mixed_square = info.mixed.square().sum()
            squares = torch.where(mixed_square > 0, squares * info.combined.square().sum() / mixed_square, 0.0)
        ratio = torch.where(square > 0, squares / (2 * square), 1.0)  # a mean update of 0 is not a step
        return state, ratio.clamp(min=1.0) * update
