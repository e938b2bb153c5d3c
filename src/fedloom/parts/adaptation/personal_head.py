"""FedRoD: a personal head beside the head of the global model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, NonNegativeInt
from fedloom.base.tree import Float
from fedloom.core.context import Batch, Forward, Output
from fedloom.core.parts import Adaptation, Needs
from fedloom.core.targets import ONE_CLASS, require_one_class


@dataclass(frozen=True)
class PersonalHead(Adaptation):
    """A client deploys z(x) + φ(r(x), 1): the model's logits plus a linear head φ [C, d + 1] on its features r [B, d].

    φ starts at zero and is fitted by gradient steps on the cross entropy over all of the client's training samples; the
    model is not changed. The learning rate is capped at 2 / mean ‖(r, 1)‖²: the curvature of the loss is at most half
    that mean, so that no step increases it, however large the features are. Chen & Chao, ICLR 2022 (FedRoD), with the
    linear head, not the hypernetwork. Deviation: in the paper φ is trained during the rounds. Since its
    gradient is stopped before the features, it never influences the shared parameters, and here it is fitted to the
    deployed features instead, also for clients that never participated.

    Args:
        lr: the largest learning rate of the steps.
        steps: number of steps; with 0 the model is deployed unchanged.
    """

    lr: NonNegative = 0.1
    steps: NonNegativeInt = 50

    needs = Needs(features=True)
    targets = ONE_CLASS
    citation = "chen2022fedrod"

    def adapt(
        self, forward: Forward, theta: Tensor, support: Batch, loss: Callable[[Output, Batch], Tensor]
    ) -> tuple[Callable[[Tensor], Output], Tensor | None]:
        require_one_class("adaptation 'personal_head'", support.y)
        out = forward(theta, support.x)
        z, logits = _augmented(out), out.logits
        one_hot = (support.y[:, None] == torch.arange(logits.shape[1], device=z.device)).to(z.dtype)  # [B, C]
        weights = torch.ones_like(z[:, 0]) if support.mask is None else support.mask.to(z.dtype)
        share = (weights / weights.sum())[:, None]
        rate = (2 / (share * z.square()).sum()).clamp(max=self.lr)
        phi = z.new_zeros(logits.shape[1], z.shape[1])
        for _ in range(self.steps):
            phi = phi - rate * (share * ((logits + z @ phi.T).softmax(1) - one_hot)).T @ z

        def predict(x: Tensor) -> Output:
            out = forward(theta, x)
            return out._replace(logits=out.logits + _augmented(out) @ phi.T)

        return predict, None


def _augmented(out: Output) -> Float[Tensor, "B d"]:
    """(r, 1)."""
    return torch.cat([out.vectors, torch.ones_like(out.vectors[:, :1])], 1)
