"""Steps on whole rows of parameters, taken once all of a client's gradients are known.

Clipping needs their norm, and the rates of clients may differ. Recorded steps gain as well: the learning rate, the
factor of weight decay and Adam's corrections are numbers in memory here, which may change from step to step without a
new recording.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.compute.cohort.parameters import StepRule, new_rows
from fedloom.core.local import clip_factor
from fedloom.core.step import adam
from fedloom.core.tree import Float


def has_fused_steps(theta: Tensor) -> bool:
    """Whether a client's step is one pass over memory; steps that are recorded need their numbers in memory."""
    return theta.is_cpu


class RowSteps:
    """Takes the steps of a rule on the rows of a cohort.

    Args:
        theta: the clients' parameters.
        grad: memory of their gradients.

    Example:
        >>> theta, grad = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> steps = RowSteps(theta, grad)
        >>> steps.begin(StepRule(lr=1.0, clip=1.0))
        >>> steps(2)
        >>> theta
        tensor([[-0.6000, -0.8000],
                [-0.3000, -0.4000]])
    """

    def __init__(self, theta: Float[Tensor, "C P"], grad: Float[Tensor, "C P"]) -> None:
        self.theta, self.grad = theta, grad
        self.rule, self.number = StepRule(0.0), 0
        self.back, self.decay = theta.new_zeros(2).unbind()  # -η and 1 - ηd
        self.velocity: Tensor | None = None
        self.second: Tensor | None = None  # Adam's second moments; ``velocity`` are the first ones

    def begin(self, rule: StepRule) -> None:
        """Begin a round with a rule, and with zero momentum."""
        self.rule, self.number = rule, 0
        self.back.fill_(-rule.lr)
        self.decay.fill_(rule.decay_factor)
        if rule.momentum or rule.betas:
            self.velocity = self._zeros(self.velocity)
        if rule.betas:
            self.second = self._zeros(self.second)

    def _zeros(self, held: Tensor | None) -> Tensor:
        return new_rows(len(self.theta), self.theta.shape[1], self.theta) if held is None else held.zero_()

    def __call__(self, count: int, numbers: Float[Tensor, "c 3"] | None = None) -> None:
        """Take the step of the first c clients; their gradients are overwritten by h, see ``StepRule``.

        ``numbers`` are those of the step, if any change.
        """
        rule, theta, grad = self.rule, self.theta[:count], self.grad[:count]
        back, decay = self.back, self.decay
        if numbers is not None:
            back = self.back * numbers[:, :1]
            decay = (rule.weight_decay * back).add_(1)
        if rule.slope != 1:
            grad.mul_(rule.slope)
        if rule.pull:
            grad.add_(theta, alpha=rule.pull)
        if rule.constant is not None:
            grad.add_(rule.constant[:count])
        scale = None
        if rule.clip is not None:
            scale = clip_factor(torch.linalg.vector_norm(grad, dim=1, keepdim=True), rule.clip)
        if rule.betas or rule.nesterov:
            if scale is not None:
                grad.mul_(scale)
            if rule.betas and has_fused_steps(theta):
                self._adam(count, back.expand(count, 1))
                return
            if rule.decoupled and rule.weight_decay:
                theta.mul_(decay)
            elif rule.weight_decay:
                grad.add_(theta, alpha=rule.weight_decay)
            self._direct(grad, numbers)
            theta.addcmul_(grad, back)
            return
        if not rule.momentum:
            if rule.weight_decay:
                theta.mul_(decay)
            theta.addcmul_(grad, back if scale is None else back * scale)
            return
        assert self.velocity is not None
        velocity = self.velocity[:count].mul_(rule.momentum)
        if scale is None:
            velocity.add_(grad)
        else:
            velocity.addcmul_(grad, scale)
        if rule.weight_decay:
            velocity.add_(theta, alpha=rule.weight_decay)
        theta.addcmul_(velocity, back)

    def _adam(self, count: int, back: Float[Tensor, "c 1"]) -> None:
        """A step of Adam for one client after the other."""
        rule = self.rule
        assert rule.betas is not None
        assert self.velocity is not None
        assert self.second is not None
        self.number += 1
        for row, rate in enumerate((-back[:, 0]).tolist()):
            moments = self.velocity[row], self.second[row]
            settings = rule.betas, rule.weight_decay, rule.decoupled
            adam(self.theta[row], self.grad[row], moments, self.number, rate, *settings)

    def _direct(self, grad: Float[Tensor, "c P"], numbers: Float[Tensor, "c 3"] | None) -> None:
        """Turn gradients into the direction of Nesterov momentum, g + m·v, or of Adam, m̂ / (√ŝ + 10⁻⁸)."""
        rule, count = self.rule, len(grad)
        assert self.velocity is not None
        if rule.betas is None:
            grad.add_(self.velocity[:count].mul_(rule.momentum).add_(grad), alpha=rule.momentum)
            return
        assert self.second is not None
        assert numbers is not None
        (one, two), first, second = rule.betas, self.velocity[:count], self.second[:count]
        first.mul_(one).add_(grad, alpha=1 - one)
        second.mul_(two).addcmul_(grad, grad, value=1 - two)
        torch.sqrt(second, out=grad)
        grad.mul_(numbers[:, 2:]).add_(1e-8)
        torch.div(first, grad, out=grad)
        grad.mul_(numbers[:, 1:2])
