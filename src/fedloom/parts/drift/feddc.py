"""FedDC's local drift decoupling and correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedloom.core import tree
from fedloom.core.errors import ConfigError
from fedloom.core.parts import ClientEnd, Context, Drift, Needs, Reduce
from fedloom.core.slots import drifts
from fedloom.core.tree import Tree


@drifts.register(name="dc")
@dataclass(frozen=True)
class FedDCDrift(Drift):
    """Client i learns how far it drifts, h_i, and the server mixes models with that drift added.

    Client i minimises F_i(θ) + (α/2)‖h_i + θ - θ^t‖² + (1/(ηk))⟨θ, g_i - g⟩ in k local steps, and then::

        h_i ← h_i + (θ_i - θ^t)          g_i ← θ_i - θ^t          θ ← Σ p_i (θ_i + h_i)          g ← Σ p_i g_i

    with the new h_i. The updates g_i and g are displacements *towards* the new model, the negative of the library's
    Δ_i = θ^t - θ_i: about -ηk times a gradient, so that the last term adds ∇F - ∇F_i to the client's gradient, as
    SCAFFOLD does. η is the decayed rate really applied. All of h_i, g_i, g start at zero: the first round's local work
    is FedProx's with μ = α. Gao et al., CVPR 2022, algorithm 1.

    g travels down, and g_i up beside θ_i + h_i: a round costs twice FedAvg's, without the gradient term as much.
    Where nothing changes any more, θ_i = θ^t, h_i = -∇F_i/α and so Σ p_i ∇F_i = 0: with all clients in every round
    that is the minimiser for any number of local steps. With some of them Σ_S p_i h_i does not vanish there, and θ is
    thrown about by the spread of ∇F_i/α; ``average_over_all=True`` adds the mean of all K clients' h_i instead, as
    published experiments do (then g_i need not be sent), and comes to rest. Without the gradient term that is FedDyn
    with equal weights, whose linear terms are -αh_i.

    α = 0 alone is not FedAvg, since drifts are still added to the models: the first step is twice as long.
    ``decouple=False`` holds every h_i at zero; without the gradient term too it is FedProx, and with α = 0 FedAvg.

    Args:
        alpha: α ≥ 0, the weight of the drift's penalty.
        gradient: whether the objective has the term with g_i - g.
        decouple: whether h_i is learned.
        average_over_all: whether the server adds the mean drift of all K clients rather than the cohort's mixed drift.

    Raises:
        ConfigError: if α is negative or not finite.
    """

    alpha: float = 0.01
    gradient: bool = True
    decouple: bool = True
    average_over_all: bool = False

    citation = """@inproceedings{gao2022feddc,
  title={{FedDC}: Federated Learning with Non-{IID} Data via Local Drift Decoupling and Correction},
  author={Gao, Liang and Fu, Huazhu and Li, Li and Chen, Yingwen and Xu, Ming and Xu, Cheng-Zhong},
  booktitle={Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition}, year={2022}}"""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < float("inf"):
            raise ConfigError(f"drift 'dc' needs a finite alpha of at least 0, not {self.alpha:g}.")

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Plain SGD where displacements are read as gradients."""
        return Needs(shared=True, plain_sgd=self.gradient, update_share=self.decouple and self.average_over_all)

    @property
    def uploads(self) -> Mapping[str, Reduce]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """g_i, unless the update that is sent is g_i itself."""
        return {"g": Reduce.MIX} if self.gradient and self.decouple and not self.average_over_all else {}

    def init_server(self, shared: Tree) -> Tree:
        """g = 0, and the mean drift h = 0 where it is of all clients."""
        names = ["g"] * self.gradient + ["h"] * (self.decouple and self.average_over_all)
        return {name: torch.zeros_like(shared["shared"]) for name in names}

    def broadcast(self, state: Tree) -> Tree:
        """Send g."""
        return {"g": state["g"]} if self.gradient else {}

    def init_client(self, shared: Tree) -> Tree:
        """g_i = h_i = 0."""
        names = ["g"] * self.gradient + ["h"] * self.decouple
        return {name: torch.zeros_like(shared["shared"]) for name in names}

    def begin(self, ctx: Context) -> Tree:
        """α(h_i - θ^t) + (g_i - g)/(ηk), constant over the local steps."""
        centre = ctx.state["h"] - ctx.received["shared"] if self.decouple else -ctx.received["shared"]
        constant = self.alpha * centre
        if self.gradient:
            constant = constant + (ctx.state["g"] - ctx.down["g"]) / (ctx.steps * ctx.lr)
        return {"shared": constant}

    def grad(self, grads: Tree, w: Tree, ctx: Context) -> Tree:
        """∇F_i + α(h_i + θ - θ^t) + (g_i - g)/(ηk)."""
        return tree.add_(tree.add_(grads, w, self.alpha), ctx.local)

    def end(self, ctx: Context, update: Tree) -> ClientEnd:
        """New h_i and g_i; uploads θ^t - (θ_i + h_i) and g_i, or Δ_i alone if the server averages over all."""
        moved = -update["shared"]
        state = {"g": moved} if self.gradient else {}
        if not self.decouple:
            return ClientEnd(state, {}, update)
        state["h"] = ctx.state["h"] + moved
        if self.average_over_all:
            return ClientEnd(state, {}, update)
        return ClientEnd(state, dict.fromkeys(self.uploads, moved), {"shared": update["shared"] - state["h"]})

    def server(self, state: Tree, update: Tree, reduced: Mapping[str, Tree]) -> tuple[Tree, Tree]:
        """New g; averaged over all, h ← h - (1/K) Σ Δ_i then Δ - h."""
        new: Tree = {}
        if self.gradient:
            new["g"] = reduced["g"][""] if "g" in reduced else -update["shared"]
        if self.decouple and self.average_over_all:
            new["h"] = state["h"] - reduced["update/share"]["shared"]
            update = {"shared": update["shared"] - new["h"]}
        return new, update
