"""The first linear layer of a cohort in factored form: clients' own weights are not computed within a round.

All gradients of the first layer are sums of δ_j x_jᵀ over a client's samples x_j, whichever batches these are in.
Starting from the received weight W, with a constant k and the samples X [n, in], SGD therefore stays within

    W_t = a_t W + s_t k - D_tᵀ X,    and its momentum within    V_t = a'_t W + s'_t k + C_tᵀ X,

with scalars a, s and arrays D, C [n, out] in place of matrices [out, in]. The layer's output on a batch's samples is
the corresponding rows of a (X Wᵀ) + s (X kᵀ) - (X Xᵀ) D: one large product with the weight shared by all clients,
before the first step, and one with the Gram matrix X Xᵀ [n, n] per step. A round with many samples is cut into windows
of steps; after each window the clients' weights are computed, and the next one starts from them.

Where gradients are clipped, clients' factors differ, and a step waits for the norm of the whole gradient: ``Clipped``.
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
        self.scaled: dict[float, Tensor] = {}  # a_t W for the last a_t that was asked for
        if shared is None:
            self.base = torch.bmm(x, self.linear.weight.matrix[: len(x)].mT)  # [C, n, out]
        else:
            self.base = x @ shared.mT
        self.shift = None if constant is None else x @ constant.mT
        self.gram = torch.bmm(x, x.mT)
        self.moved = torch.zeros_like(self.base)  # D
        self.start()

    def start(self) -> None:
        """Start what follows from step to step."""
        self.velocity = torch.zeros_like(self.base) if self.rule.momentum else None  # C
        self.scale, self.pull = [1.0], [0.0]  # a_t and s_t, t = 0, 1, ...
        self.velocity_scale, self.velocity_pull = 0.0, 0.0  # a' and s'

    def forward(self, places: Tensor) -> Tensor:
        count, samples = len(places), self.base.shape[1]
        self.places = places
        self.at = (places + samples * torch.arange(count, device=places.device)[:, None]).flatten()
        y = self.product(self._rows(self.base), self._rows(self.gram), self.moved[:count])
        return y if self.linear.bias is None else y.add_(self.linear.bias.value[:count, None])

    def product(self, y: Tensor, gram: Tensor, moved: Tensor) -> Tensor:
        """W_t x for the samples of the batch, from Wx, which is overwritten, their rows of X Xᵀ, and D."""
        y.baddbmm_(gram, moved, beta=self.scale[-1], alpha=-1)
        return y if self.shift is None else y.add_(self._rows(self.shift), alpha=self.pull[-1])

    def _rows(self, values: Float[Tensor, "C n k"]) -> Float[Tensor, "c B k"]:
        """The rows of the batch's samples."""
        return values.flatten(0, 1).index_select(0, self.at).view(*self.places.shape, -1)

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
            self.velocity_scale = rule.momentum * self.velocity_scale + rule.weight_decay * scale
            self.velocity_pull = rule.momentum * self.velocity_pull + rule.weight_decay * pull + 1
            self.scale.append(scale - rule.lr * self.velocity_scale)
            self.pull.append(pull - rule.lr * self.velocity_pull)
        if self.linear.bias is not None:
            self.linear.bias.take(grad.sum(1))
        return (None,)

    def factors(self, row: int, steps: int) -> tuple[float, float]:
        """A client's a_t and s_t after so many steps."""
        return self.scale[steps], self.pull[steps]

    def close(self, row: int, steps: int) -> None:
        """End a client's window: compute its weight after so many steps, once."""
        weight = start = self.linear.weight.matrix[row]
        scale, pull = self.factors(row, steps)
        if self.shared is not None:
            if scale not in self.scaled:
                self.scaled = {scale: self.shared * scale}
            start = self.scaled[scale]
        elif scale != 1:
            weight.mul_(scale)
        if self.constant is not None:
            constant = self.constant[min(row, len(self.constant) - 1)]
            start = torch.add(start, constant, alpha=pull, out=weight)
        torch.addmm(start, self.moved[row].mT, self.x[row], alpha=-1, out=weight)

    def displacement(self, row: int, steps: int) -> tuple[float, float, Callable[[Tensor, float], Tensor]]:
        """W - W_i = κW + ςk/a + DᵀX as κ, ς and a function that adds αDᵀX to the flat vector of a weight."""
        shape = self.linear.weight.matrix.shape[1:]

        def add(out: Tensor, alpha: float) -> Tensor:
            return out.view(shape).addmm_(self.moved[row].mT, self.x[row], alpha=alpha)

        scale, pull = self.factors(row, steps)
        return 1 - scale, -pull * self.rule.slope, add

    def mixed_update(self, steps: list[int], p: Float[Tensor, "C"]) -> Float[Tensor, "out in"]:
        """Σ_i p_i (W - W_i) after the given numbers of steps, without computing any W_i."""
        assert self.shared is not None
        left = (self.moved * p[:, None, None]).flatten(0, 1)
        total = left.mT @ self.x.flatten(0, 1)
        scale, pull = self.moved.new_tensor([self.factors(row, count) for row, count in enumerate(steps)]).unbind(1)
        if self.rule.weight_decay or self.rule.pull:
            total.add_(self.shared, alpha=float((p * (1 - scale)).sum()))
        if self.constant is not None:
            factors = p * pull
            factors = factors.sum(0)[None] if len(self.constant) == 1 else factors
            total.sub_((factors[None] @ self.constant.flatten(1)).view_as(total))
        return total


class Clipped(FactoredLinear):
    """A factored layer whose step waits for the norm of the whole gradient, of which it knows its own part.

    For h = aG + bW_t + k with the gradient G = Σ_j δ_j x_jᵀ of a batch, see ``StepRule``,

        ‖h‖² = a²‖G‖² + 2a(b⟨G, W_t⟩ + ⟨G, k⟩) + b²‖W_t‖² + 2b⟨W_t, k⟩ + ‖k‖²

        ‖G‖² = Σ_jl (δ_j·δ_l)(x_j·x_l)        ⟨G, W_t⟩ = Σ_j δ_j·W_t x_j        ⟨G, k⟩ = Σ_j δ_j·k x_j

    and the products without G follow from step to step, so that no vector of the size of W is read.
    """

    def start(self) -> None:
        weight = self.linear.weight.matrix[: len(self.x)] if self.shared is None else self.shared[None]
        self.scales = self.x.new_ones(len(self.x), dtype=torch.float64)  # a_t of each client
        self.pulls = torch.zeros_like(self.scales)  # s_t
        pairs = (weight, weight), (weight, self.constant), (self.constant, self.constant)
        self.ww, self.wk, self.kk = (_products(*pair) + torch.zeros_like(self.scales) for pair in pairs)

    def product(self, y: Tensor, gram: Tensor, moved: Tensor) -> Tensor:
        count = len(y)
        y.mul_(self.scales[:count, None, None].to(y)).baddbmm_(gram, moved, alpha=-1)
        self.kx = None if self.shift is None else self._rows(self.shift)
        if self.kx is not None:
            y.addcmul_(self.kx, self.pulls[:count, None, None].to(y))
        self.wx = y.clone() if self.rule.pull else None
        self.squares = gram.gather(2, self.places[:, None].expand(-1, y.shape[1], -1))
        return y

    def backward(self, grad: Tensor) -> tuple[None]:
        self.delta = grad
        if self.linear.bias is not None:
            self.linear.bias.take(grad.sum(1))
        return (None,)

    def squared_norm(self) -> Float[Tensor, "c"]:
        """‖h‖² of the batch, float64."""
        a, b, grad = self.rule.slope, self.rule.pull, self.delta
        ww, wk, kk = (products[: len(grad)] for products in (self.ww, self.wk, self.kk))
        self.gw, self.gk = _products(self.wx, grad), _products(self.kx, grad)
        gg = _products(self.squares, grad @ grad.mT)
        self.hh = a * a * gg + 2 * a * (b * self.gw + self.gk) + b * b * ww + 2 * b * wk + kk
        return self.hh.clamp(min=0)

    def step(self, factor: Float[Tensor, "c"]) -> None:
        """Take the step along h times the clients' factors."""
        a, b, keep, rate = self.rule.slope, self.rule.pull, self.rule.decay_factor, self.rule.lr * factor.double()
        moved, scales, pulls, ww, wk, kk = (
            values[: len(factor)] for values in (self.moved, self.scales, self.pulls, self.ww, self.wk, self.kk)
        )
        wh, hk = a * self.gw + b * ww + wk, a * self.gk + b * wk + kk
        ww.mul_(keep * keep).sub_(2 * keep * rate * wh).add_(rate * rate * self.hh)
        wk.mul_(keep).sub_(rate * hk)
        scales.mul_(keep - b * rate)
        pulls.mul_(keep - b * rate).sub_(rate)
        if keep != 1 or b:
            moved.mul_((keep - b * rate)[:, None, None].to(moved))
        step = self.delta * (a * rate)[:, None, None].to(moved)
        moved.flatten(0, 1).index_add_(0, self.at, step.flatten(0, 1))

    def factors(self, row: int, steps: int) -> tuple[float, float]:
        return float(self.scales[row]), float(self.pulls[row])


def _products(left: Tensor | None, right: Tensor | None) -> Tensor | float:
    """The inner products of clients' matrices, [c] in float64; 0 where there are none."""
    return 0.0 if left is None or right is None else (left * right).sum((1, 2)).double()


def input_layer(program: Program) -> int | None:
    """The index of a linear layer that is the only reader of the (flattened) inputs; None if there is none."""
    value = 0
    for place, step in enumerate(program.steps):
        readers = sum(value in reader.inputs for reader in program.steps)
        if readers != 1 or value in program.outputs or step.inputs != (value,):
            return None
        if isinstance(step.layer, Linear):
            return place
        if not isinstance(step.layer, Flatten | Identity):
            return None
        value = step.output
    return None


def factored(program: Program, rule: StepRule) -> tuple[Program, FactoredLinear]:
    """The network whose inputs are positions of known samples, and its factored first layer."""
    place = input_layer(program)
    assert place is not None
    step = program.steps[place]
    assert isinstance(step.layer, Linear)
    first = (FactoredLinear if rule.clip is None else Clipped)(step.layer, rule)
    rest = program.steps[place + 1 :]
    return Program((LayerCall(first, (0,), step.output, step.name), *rest), program.values, program.outputs), first
