"""The first linear layer of a cohort in factored form: clients' own weights are not computed within a round.

All gradients of the first layer are sums of δ_j x_jᵀ over a client's samples x_j, whichever batches these are in.
Starting from the received weight W, with a constant k and the samples X [n, in], SGD therefore stays within

    W_t = a_t W + s_t k - D_tᵀ X,    and its momentum within    V_t = a'_t W + s'_t k + C_tᵀ X,

with scalars a, s and arrays D, C [n, out] in place of matrices [out, in]. The layer's output on a batch's samples is
the corresponding rows of a (X Wᵀ) + s (X kᵀ) - (X Xᵀ) D: one large product with the weight shared by all clients,
before the first step, and one with the Gram matrix X Xᵀ [n, n] per step. A round with many samples is cut into windows
of steps; after each window the clients' weights are computed, and the next one starts from them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.base.tree import Float
from fedloom.compute.cohort.dense import Linear
from fedloom.compute.cohort.layers import CohortLayer
from fedloom.compute.cohort.parameters import StepRule
from fedloom.compute.cohort.pointwise import Flatten, Identity
from fedloom.compute.cohort.trace import LayerCall, Program


class FactoredLinear(CohortLayer):
    """A linear layer on known samples: from their positions, int64 [c, B], to its outputs [c, B, out]."""

    def __init__(self, linear: Linear, rule: StepRule) -> None:
        self.linear, self.rule = linear, rule

    def open(
        self,
        x: Float[Tensor, "C n in"],
        shared: Float[Tensor, "out in"] | None,
        constant: Float[Tensor, "clients out in"] | None,
    ) -> None:
        """Start a window.

        Args:
            x: the clients' samples.
            shared: the common starting weight; None if each client starts from its current one.
            constant: k; of one row if it is common to all clients.
        """
        self.x, self.shared, self.constant = x, shared, constant
        self.scaled: dict[int, Tensor] = {}  # a_t W for the last t that was asked for
        if shared is None:
            self.base = torch.bmm(x, self.linear.weight.matrix[: len(x)].mT)  # [C, n, out]
        else:
            self.base = x @ shared.mT
        self.shift = None if constant is None else x @ constant.mT
        self.gram = torch.bmm(x, x.mT)
        self.moved = torch.zeros_like(self.base)  # D
        self.velocity = torch.zeros_like(self.base) if self.rule.momentum else None  # C
        self.scale, self.pull = [1.0], [0.0]  # a_t and s_t, t = 0, 1, ...
        self.faster, self.pushed = 0.0, 0.0  # a' and s'

    def forward(self, places: Tensor) -> Tensor:
        count, width = places.shape
        samples = self.base.shape[1]
        self.at = (places + samples * torch.arange(count, device=places.device)[:, None]).flatten()
        taken = self.gram.flatten(0, 1).index_select(0, self.at).view(count, width, -1)
        y = self.base.flatten(0, 1).index_select(0, self.at).view(count, width, -1)
        y.baddbmm_(taken, self.moved[:count], beta=self.scale[-1], alpha=-1)
        if self.shift is not None:
            y.add_(self.shift.flatten(0, 1).index_select(0, self.at).view_as(y), alpha=self.pull[-1])
        return y if self.linear.bias is None else y.add_(self.linear.bias.value[:count, None])

    def backward(self, grad: Tensor) -> tuple[None]:
        rule, count = self.rule, len(grad)
        scale, pull = self.scale[-1], self.pull[-1]
        moved = self.moved[:count]
        if self.velocity is None:
            if rule.weight_decay:
                moved.mul_(rule.decay_factor)
            moved.flatten(0, 1).index_add_(0, self.at, grad.flatten(0, 1), alpha=rule.lr)
            self.scale.append(rule.decay_factor * scale)
            self.pull.append(rule.decay_factor * pull - rule.lr)
        else:
            velocity = self.velocity[:count].mul_(rule.momentum)
            if rule.weight_decay:
                velocity.add_(moved, alpha=-rule.weight_decay)
            velocity.flatten(0, 1).index_add_(0, self.at, grad.flatten(0, 1))
            moved.add_(velocity, alpha=rule.lr)
            self.faster = rule.momentum * self.faster + rule.weight_decay * scale
            self.pushed = rule.momentum * self.pushed + rule.weight_decay * pull + 1
            self.scale.append(scale - rule.lr * self.faster)
            self.pull.append(pull - rule.lr * self.pushed)
        if self.linear.bias is not None:
            self.linear.bias.take(grad.sum(1))
        return (None,)

    def _numbers(self, history: list[float], steps: list[int]) -> Tensor:
        return self.moved.new_tensor([history[each] for each in steps])[:, None, None]

    def close(self, row: int, steps: int) -> None:
        """End a client's window: compute its weight after so many steps, once."""
        weight = start = self.linear.weight.matrix[row]
        if self.shared is not None:
            if steps not in self.scaled:
                self.scaled = {steps: self.shared * self.scale[steps]}
            start = self.scaled[steps]
        elif self.rule.weight_decay:
            weight.mul_(self.scale[steps])
        if self.constant is not None:
            constant = self.constant[min(row, len(self.constant) - 1)]
            start = torch.add(start, constant, alpha=self.pull[steps], out=weight)
        torch.addmm(start, self.moved[row].mT, self.x[row], alpha=-1, out=weight)

    def displaced(self, row: int, steps: int) -> tuple[float, float, Callable[[Tensor, float], Tensor]]:
        """W - W_i = κW + ςk + DᵀX as κ, ς and a function that adds αDᵀX to the flat vector of a weight."""
        shape = self.linear.weight.matrix.shape[1:]

        def add(out: Tensor, alpha: float) -> Tensor:
            return out.view(shape).addmm_(self.moved[row].mT, self.x[row], alpha=alpha)

        return 1 - self.scale[steps], -self.pull[steps], add

    def mixed(self, steps: list[int], p: Float[Tensor, "C"]) -> Float[Tensor, "out in"]:
        """Σ_i p_i (W - W_i) after the given numbers of steps, without computing any W_i."""
        assert self.shared is not None
        p = p[:, None, None]
        left = (self.moved * p).flatten(0, 1)
        total = left.mT @ self.x.flatten(0, 1)
        if self.rule.weight_decay:
            total.add_(self.shared, alpha=float((p * (1 - self._numbers(self.scale, steps))).sum()))
        if self.constant is not None:
            factors = p * self._numbers(self.pull, steps)
            factors = factors.sum(0)[None] if len(self.constant) == 1 else factors
            total.sub_((factors.flatten()[None] @ self.constant.flatten(1)).view_as(total))
        return total


def input_layer(program: Program) -> int | None:
    """The index of a linear layer that is the only reader of the (flattened) inputs; None if there is none."""
    at = 0
    for place, step in enumerate(program.steps):
        if sum(at in each.inputs for each in program.steps) != 1 or at in program.outputs or step.inputs != (at,):
            return None
        if isinstance(step.layer, Linear):
            return place
        if not isinstance(step.layer, Flatten | Identity):
            return None
        at = step.output
    return None


def factored(program: Program, rule: StepRule) -> tuple[Program, FactoredLinear]:
    """The network whose inputs are positions of known samples, and its factored first layer."""
    place = input_layer(program)
    assert place is not None
    step = program.steps[place]
    assert isinstance(step.layer, Linear)
    first = FactoredLinear(step.layer, rule)
    rest = program.steps[place + 1 :]
    return Program((LayerCall(first, (0,), step.output, step.name), *rest), program.values, program.outputs), first
