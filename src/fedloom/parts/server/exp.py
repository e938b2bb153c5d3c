"""FedExP's adaptive server step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.core import tree
from fedloom.core.errors import ConfigError
from fedloom.core.parts import ClientEnd, Context, Needs, Reduce, ServerOptimizer
from fedloom.core.slots import servers
from fedloom.core.tree import Tree


@servers.register(name="exp")
@dataclass(frozen=True)
class Extrapolated(ServerOptimizer):
    """θ ← θ - ηΔ with η = max{1, (1/|S|) Σ‖Δ_i‖² / (2(‖Δ‖² + ε))}: a longer step the more the updates disagree.

    Each client uploads one number, ‖Δ_i‖². Jhunjhunwala, Wang & Joshi, ICLR 2023, eq. (10).

    Args:
        eps: ε ≥ 0, against division by a vanishing mean.
    """

    eps: float = 1e-3

    needs = Needs(shared=True)
    uploads = {"squares": Reduce.MEAN}  # noqa: RUF012
    citation = """@inproceedings{jhunjhunwala2023fedexp,
  title={{FedExP}: Speeding Up Federated Averaging via Extrapolation},
  author={Jhunjhunwala, Divyansh and Wang, Shiqiang and Joshi, Gauri},
  booktitle={International Conference on Learning Representations}, year={2023}}"""

    def __post_init__(self) -> None:
        if not 0 <= self.eps < float("inf"):
            raise ConfigError(f"the extrapolated step needs a finite eps of at least 0, not {self.eps:g}.")

    def end(self, ctx: Context, update: Tree) -> ClientEnd:
        """‖Δ_i‖²."""
        return ClientEnd({}, {"squares": tree.squared_norm(update)}, update)

    def server(self, state: Tree, update: Tree, reduced: Mapping[str, Tree]) -> tuple[Tree, Tree]:
        """The extrapolated step."""
        ratio = reduced["squares"][""] / (2 * (tree.squared_norm(update) + self.eps))
        return state, tree.scale(update, ratio.clamp(min=1.0))
