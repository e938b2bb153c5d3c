"""FedDF: the averaged model is distilled from the ensemble of client models."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from fedloom.base.ranges import Count, NonNegativeInt, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Halves, Needs, ServerOptimizer
from fedloom.core.server_data import logits_of, usable
from fedloom.core.targets import CLASSES


@dataclass(frozen=True)
class Ensemble(ServerOptimizer):
    """θ ← θ - Δ, then Adam steps on T² KL(softmax(z̄/T) ‖ softmax(z_θ/T)), z̄ = (1/|S|) Σ_k logits_k, on target inputs.

    The learning rate follows a cosine, η(1 + cos(πj/J))/2 in step j of J. The teacher's logits z̄ [M, C] are computed
    once; client models and mixed buffers are fixed, and all models run in evaluation mode. Clients with non-finite
    logits are excluded from the teacher; if fewer than two are left, θ is not distilled.

    Lin, Kong, Stich & Jaggi, NeurIPS 2020, algorithm 1 and section 4.1. The paper stops when the accuracy on the
    server's labelled validation data stagnates, after at most 10⁴ steps; here there are no labels, and J is a setting.

    Args:
        steps: J ≥ 0; 0 gives FedAvg.
        lr: η, learning rate of Adam.
        batch_size: inputs per step.
        temperature: T, 1 in the paper.
    """

    steps: NonNegativeInt = 100
    lr: Positive = 1e-3
    batch_size: Count = 128
    temperature: Positive = 1.0

    needs = Needs(target="inputs", updates=True, common_classes=True)
    targets = CLASSES
    citation = "lin2020feddf"

    def refine(self, state: Tree, theta: Tensor, buffers: Tensor, info: RoundInfo) -> Halves:
        data = info.server_data
        assert data is not None
        logits = logits_of(data, info.models(), info.buffers, data.inputs)
        finite = usable(logits)
        if finite.sum() < 2 or not self.steps:
            return state, theta
        teacher = torch.softmax(logits[:, finite].mean(1) / self.temperature, -1)
        theta = theta.clone().requires_grad_()
        optimiser = torch.optim.Adam([theta], self.lr)
        with torch.enable_grad():
            for step, (_, rows) in zip(range(self.steps), data.batches(info.t, self.batch_size), strict=False):
                optimiser.param_groups[0]["lr"] = self.lr * (1 + cos(pi * step / self.steps)) / 2
                optimiser.zero_grad()
                log_q = torch.log_softmax(data.logits(theta, buffers, data.inputs[rows]) / self.temperature, -1)
                (self.temperature**2 * kl_div(log_q, teacher[rows], reduction="batchmean")).backward()
                optimiser.step()
        return state, theta.detach()
