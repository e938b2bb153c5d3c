"""The cross entropy of a cohort and its gradient in closed form."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's weighted cross entropy [c] and its gradient by the logits: w (softmax(z) - e_y).

    Args:
        logits: z, [c, B, ..., K].
        labels: y, int64 [c, B, ...].
        weights: w, [c, B] or the shape of the labels: one over a client's number of rows, and zero for rows that fill
            up.
    """
    weights = weights.reshape(*weights.shape, *(1 for _ in range(labels.ndim - weights.ndim))).expand_as(labels)
    logp = torch.log_softmax(logits, -1)
    at = labels[..., None]
    losses = -(logp.gather(-1, at)[..., 0] * weights).flatten(1).sum(1)
    grad = logp.exp_()
    grad.scatter_add_(-1, at, grad.new_full((), -1.0).expand_as(at))
    return losses, grad.mul_(weights[..., None])
