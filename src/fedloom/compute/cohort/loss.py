"""The cross entropy of a cohort and its gradient in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.tree import Float, Int


def cross_entropy(
    logits: Float[Tensor, "c B ... K"], labels: Int[Tensor, "c B ..."], weights: Float[Tensor, "c B"]
) -> tuple[Float[Tensor, "c"], Float[Tensor, "c B ... K"]]:
    """Each client's weighted cross entropy and its gradient with respect to the logits, w (softmax(z) - e_y).

    For sequences, with labels [c, B, T], the loss is the mean over positions.

    Args:
        logits: z.
        labels: y.
        weights: w, the inverse of a client's number of rows, and 0 for padding.
    """
    positions = labels[0, 0].numel()
    weights = (weights / positions).reshape(*weights.shape, *(1 for _ in labels.shape[2:])).expand_as(labels)
    logp = torch.log_softmax(logits, -1)
    at = labels[..., None]
    losses = -(logp.gather(-1, at)[..., 0] * weights).flatten(1).sum(1)
    grad = logp.exp_()
    if grad.device.type == "cpu":
        grad.scatter_add_(-1, at, grad.new_full((), -1.0).expand_as(at))
    else:  # to scatter would sort there, for sums in a fixed order
        grad.sub_((torch.arange(grad.shape[-1], device=grad.device) == at).to(grad.dtype))
    return losses, grad.mul_(weights[..., None])
