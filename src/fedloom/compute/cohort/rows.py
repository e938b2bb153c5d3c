"""Steps on whole rows of parameters, taken once all of a client's gradients are known.

Clipping needs their norm. Recorded steps gain as well: the learning rate and the factor of weight decay are numbers in
memory here, which may change from round to round without a new recording.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.compute.cohort.parameters import SGDRule, new_rows
from fedloom.core.local import clip_factor
from fedloom.core.tree import Float


class RowSteps:
    """Takes the steps of a rule on the rows of a cohort.

    Args:
        theta: the clients' parameters.
        grad: memory of their gradients.

    Example:
        >>> theta, grad = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> steps = RowSteps(theta, grad)
        >>> steps.begin(SGDRule(lr=1.0, clip=1.0))
        >>> steps(2)
        >>> theta
        tensor([[-0.6000, -0.8000],
                [-0.3000, -0.4000]])
    """

    def __init__(self, theta: Float[Tensor, "C P"], grad: Float[Tensor, "C P"]) -> None:
        self.theta, self.grad = theta, grad
        self.rule = SGDRule(0.0)
        self.back, self.decay = theta.new_zeros(2).unbind()  # -η and 1 - ηd
        self.velocity: Tensor | None = None

    def begin(self, rule: SGDRule) -> None:
        """Begin a round with a rule, and with zero momentum."""
        self.rule = rule
        self.back.fill_(-rule.lr)
        self.decay.fill_(rule.decay_factor)
        if rule.momentum:
            held = (
                new_rows(len(self.theta), self.theta.shape[1], self.theta) if self.velocity is None else self.velocity
            )
            self.velocity = held.zero_()

    def __call__(self, count: int) -> None:
        """Take the step of the first c clients; their gradients are overwritten by h, see ``SGDRule``."""
        rule, theta, grad = self.rule, self.theta[:count], self.grad[:count]
        if rule.slope != 1:
            grad.mul_(rule.slope)
        if rule.pull:
            grad.add_(theta, alpha=rule.pull)
        if rule.constant is not None:
            grad.add_(rule.constant[:count])
        scale = None
        if rule.clip is not None:
            scale = clip_factor(torch.linalg.vector_norm(grad, dim=1, keepdim=True), rule.clip)
        if not rule.momentum:
            if rule.weight_decay:
                theta.mul_(self.decay)
            theta.addcmul_(grad, self.back if scale is None else self.back * scale)
            return
        assert self.velocity is not None
        velocity = self.velocity[:count].mul_(rule.momentum)
        if scale is None:
            velocity.add_(grad)
        else:
            velocity.addcmul_(grad, scale)
        if rule.weight_decay:
            velocity.add_(theta, alpha=rule.weight_decay)
        theta.addcmul_(velocity, self.back)
