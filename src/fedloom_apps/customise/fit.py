"""Mixing weights for a target, fitted through the merged network to the probable classes of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fedloom.core.aggregate import mixture
from fedloom.core.ranges import Count, NonNegativeInt, Positive, within
from fedloom.core.server_data import ServerData


@dataclass(frozen=True)
class TargetFit:
    """The minimum over (a, τ, b) of the mean of CE(r(x), softmax(τ f(x; Σ_k p_k θ_k) + b)), p = softmax(a).

    f(x; θ) are the logits of the network with the parameters θ: the weights are chosen for the merged network, whose
    predictions are not the mixture of its parents'. τ and b compensate for the effect of merging on the scale of the
    logits and on the bias of the head; they become part of the head.

    Args:
        steps: steps of Adam in (a, log τ, b), from given weights, τ = 1 and b = 0. With 0 the weights are unchanged.
        lr: learning rate of Adam.
        batch_size: inputs per step; the inputs are passed through in a new order each time.
    """

    steps: NonNegativeInt = 60
    lr: Positive = 0.2
    batch_size: Count = 256

    def __post_init__(self) -> None:
        within(self, "target_fit: ")

    def __call__(self, data: ServerData, models: Tensor, buffers: Tensor, r: Tensor, p: Tensor) -> Fitted:
        """Fit to the target's inputs.

        Args:
            data: the inputs [M, ...], and the network.
            models: θ_k, the clients' parameters [K, P].
            buffers: their buffers [K, B], which are merged with the same weights.
            r: probabilities of the classes of each input, [M, C].
            p: weights to start from, [K], on the simplex; a weight of 0 stays 0.
        """
        a = p.double().log().requires_grad_()
        log_tau = torch.zeros((), dtype=torch.float64, requires_grad=True)
        b = torch.zeros(r.shape[1], dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([a, log_tau, b], lr=self.lr)
        with torch.enable_grad():
            for _, some in islice(data.batches(0, self.batch_size), self.steps):
                weights = torch.softmax(a, 0).to(models)
                logits = data.logits(weights @ models, mixture(weights, buffers), data.inputs[some])
                log_q = torch.log_softmax(log_tau.exp() * logits.cpu().double() + b, -1)
                optimiser.zero_grad()
                (-(r[some] * log_q).sum(-1).mean()).backward()
                optimiser.step()
        return Fitted(torch.softmax(a.detach(), 0), float(log_tau.detach().exp()), b.detach())


@dataclass(frozen=True)
class Fitted:
    """Weights p [K], scale τ and biases b [C], float64: logits are τ f(x; Σ_k p_k θ_k) + b."""

    p: Tensor
    tau: float
    b: Tensor
