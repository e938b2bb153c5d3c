"""FedSSA: mixing coefficients learnt at the server by self-supervision on unlabelled target inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedloom.core.context import RoundInfo
from fedloom.core.errors import ConfigError
from fedloom.core.parts import Mixing, Needs
from fedloom.core.server_data import usable, view_logits
from fedloom.core.slots import mixings
from fedloom.core.tree import Tree

CITATION = """@misc{fedssa, title={Customizing Global Model for Arbitrary Target Distributions in Federated Learning},
  author={Anonymous}, note={FedSSA}}"""


def combined(p: Tensor, logits: Tensor) -> Tensor:
    """ŷ = softmax(Σ_k p_k ŷ_k) [..., N, C] from logits ŷ_k [..., N, K, C]; p is [K], or [N, K] (eq. 4).

    >>> combined(torch.tensor([0.5, 0.5]), torch.tensor([[[2.0, 0.0], [0.0, 2.0]]]))
    tensor([[0.5000, 0.5000]])
    """
    return torch.softmax((p[..., None, :] @ logits).squeeze(-2), -1)


def ssa_loss(a: Tensor, first: Tensor, second: Tensor, variance: float = 1.0, entropy: float = 1e-3) -> Tensor:
    """-cos(ŷ¹, ŷ²) - λ_var (var ŷ¹ + var ŷ²)/2 + λ_we Σ_k p_k log p_k per sample [..., N], p = softmax(a).

    The variance is over the C probabilities of a prediction, (1/C) Σ_c (ŷ_c - 1/C)²; eqs. (4)-(8).

    Args:
        a: [K] for all samples, or [N, K].
        first: the K models' logits on the first view, [..., N, K, C].
        second: logits on the second view, likewise.
        variance: λ_var.
        entropy: λ_we.

    >>> same = torch.zeros(1, 2, 4)  # two uninformative models: cos = 1, var = 0, Σ p log p = -log 2
    >>> ssa_loss(torch.zeros(2), same, same, entropy=1.0)
    tensor([-1.6931])
    """
    log_p = torch.log_softmax(a, -1)
    p = log_p.exp()
    one, other = combined(p, first), combined(p, second)
    confident = (one.var(-1, correction=0) + other.var(-1, correction=0)) / 2
    return -cosine_similarity(one, other, dim=-1) - variance * confident + entropy * (p * log_p).sum(-1)


@mixings.register(name="ssa")
@dataclass(frozen=True)
class SelfSupervised(Mixing):
    """p = softmax(a), a = argmin of -cos(ŷ¹, ŷ²) - λ_var var ŷ + λ_we Σ p log p, with ŷ = softmax(Σ p_k logits_k).

    ŷ¹ and ŷ² are the mixed predictions on two random views of an unlabelled target input; they should agree, be
    confident, and use more than one client. The client models are frozen; a [|S|] is optimised from zero (uniform p) in
    every round by Adam, so there is no state and rounds are independent. The networks are evaluated on 2 · ``draws``
    views, whatever the number of epochs. A model with non-finite logits gets weight 0.

    FedSSA, sections 4.1-4.2 and algorithm 1. Choices that the paper leaves open: softmax keeps p on the simplex; Adam,
    whose steps do not depend on the scale of the loss; the variance has divisor C.

    Args:
        variance: λ_var ≥ 0, weight of confidence; 10 is often better than 1.
        entropy: λ_we ≥ 0, weight of collaboration.
        lr: learning rate of Adam.
        epochs: passes over the unlabelled inputs.
        batch_size: inputs per step.
        draws: number of times that views are drawn per round, at most ``epochs``; with 1, all epochs use the same
            views.

    Raises:
        ConfigError: if a setting is out of range.
    """

    variance: float = 1.0
    entropy: float = 1e-3
    lr: float = 0.01
    epochs: int = 10
    batch_size: int = 64
    draws: int = 1

    needs = Needs(target=True, views=True, updates=True, shared=True)
    citation = CITATION

    def __post_init__(self) -> None:
        if not (0 <= self.variance < float("inf") and 0 <= self.entropy < float("inf")):
            raise ConfigError(
                f"mixing 'ssa' needs finite variance and entropy of at least 0, not {self.variance:g} and "
                f"{self.entropy:g}."
            )
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"mixing 'ssa' needs a positive, finite lr, not {self.lr:g}.")
        if self.epochs < 1 or self.batch_size < 1:
            raise ConfigError(
                f"mixing 'ssa' needs epochs and a batch_size of at least 1, not {self.epochs} and {self.batch_size}."
            )
        if not 1 <= self.draws <= self.epochs:
            raise ConfigError(f"mixing 'ssa': draws must lie between 1 and epochs ({self.epochs}), not {self.draws}.")

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        assert info.server_data is not None
        data, models = info.server_data, info.models()
        views = [view_logits(data, models, info.buffers, info.t, draw) for draw in range(self.draws)]
        able = usable(*(z for pair in views for z in pair))
        if not able.any():
            return state, info.samples / info.samples.sum()
        if not able.all():
            views = [(first[:, able], second[:, able]) for first, second in views]
        batches = (
            (z[rows].double() for z in views[epoch * self.draws // self.epochs])
            for epoch in range(self.epochs)
            for rows in data.order(info.t, epoch).to(able.device).split(self.batch_size)
        )
        a = torch.zeros(views[0][0].shape[1], dtype=torch.float64, device=able.device)
        p = np.zeros(len(models))
        p[able.cpu().numpy()] = self.learnt(a, batches).cpu().numpy()
        return state, p

    def learnt(self, a: Tensor, batches: Iterable[Iterable[Tensor]]) -> Tensor:
        """p = softmax(a), float64, after one Adam step per pair of logits [..., N, K, C] on the two views.

        Args:
            a: the starting point: [K], or [N, K] for per-sample coefficients.
            batches: the pairs, in order.
        """
        a = a.clone().requires_grad_()
        optimizer = torch.optim.Adam([a], self.lr)
        with torch.enable_grad():
            for first, second in batches:
                optimizer.zero_grad()
                loss = ssa_loss(a, first, second, self.variance, self.entropy)
                (loss.mean() if a.ndim == 1 else loss.mean(tuple(range(loss.ndim - 1))).sum()).backward()
                optimizer.step()
        return torch.softmax(a.detach(), -1)
