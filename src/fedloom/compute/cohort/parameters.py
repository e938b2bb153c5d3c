"""The parameters of a cohort: views of one tensor with one row of P values per client."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedloom.base.tree import Float
from fedloom.core.layout import Layout, Leaf

ALIGNED = 16  # elements: rows start at multiples of a cache line


@dataclass(frozen=True)
class StepRule:
    """The update rule for all parameters of all clients.

    The step is v ← m·v + g + d·w + k, w ← w - η·v, for the gradient g, weight decay d and momentum m (0: no v is kept).
    k is constant during a round and may differ between clients: every correction that is affine in w is a weight decay
    plus a constant, like SCAFFOLD's c - c_i, or FedProx's μ(w - θ) with d = μ and k = -μθ.

    If a client's corrected gradient is clipped, weight decay stays outside: v ← m·v + min(1, c / ‖h‖) h + d·w with
    h = a·g + b·w + k. Such steps need the whole gradient before any weight moves; ``RowSteps`` takes them, and those
    of Adam and of Nesterov momentum, from the same h.

    Args:
        lr: the learning rate η.
        weight_decay: d.
        momentum: m.
        constant: k.
        clip: c, the largest norm of h; None does not clip.
        slope: a, if there is a clip, or Adam.
        pull: b, likewise.
        nesterov: whether momentum is Nesterov's.
        betas: the decay of Adam's first and second moments, which start at zero; None for SGD.
        decoupled: whether Adam's weight decay is w ← (1 - η·d)·w, as in AdamW.
        speeds: s_k, the factor on η in each step of each client; None if all are 1.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    constant: Float[Tensor, "C P"] | None = None
    clip: float | None = None
    slope: float = 1.0
    pull: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] | None = None
    decoupled: bool = False
    speeds: Float[Tensor, "steps C"] | None = None

    @property
    def steps_by_rows(self) -> bool:
        """Whether a step needs the whole gradient, or rates differ between clients."""
        differs = self.speeds is not None and bool((self.speeds != self.speeds[:, :1]).any())
        return self.clip is not None or self.nesterov or self.betas is not None or differs

    def at(self, step: int) -> StepRule:
        """The rule of one step, whose rate is the same for all clients."""
        return self if self.speeds is None else replace(self, lr=self.lr * float(self.speeds[step, 0]), speeds=None)

    def numbers(self, steps: int, clients: int) -> Float[Tensor, "steps C 3"] | None:
        """What changes from step to step: s_k, and 1/(1 - β₁ⁿ) and 1/√(1 - β₂ⁿ) of Adam's step n = k + 1."""
        if self.speeds is None and self.betas is None:
            return None
        result = torch.ones(steps, clients, 3, dtype=torch.float64)
        if self.speeds is not None:
            result[:, :, 0] = self.speeds
        if self.betas is not None:
            n = torch.arange(1, steps + 1, dtype=torch.float64)
            for column, (beta, power) in enumerate(zip(self.betas, (-1, -0.5), strict=True), 1):
                result[:, :, column] = (1 - beta**n).pow(power)[:, None]
        return result

    @property
    def decay_factor(self) -> float:
        """1 - ηd, the factor on a weight in a step without momentum."""
        return 1 - self.lr * self.weight_decay

    @property
    def moves_all(self) -> bool:
        """Whether parameters without a gradient move, too."""
        return self.weight_decay != 0 or self.constant is not None


def new_rows(clients: int, size: int, like: Tensor) -> Float[Tensor, "clients size"]:
    """A zero tensor whose rows are aligned in memory."""
    return like.new_zeros(clients, -(-size // ALIGNED) * ALIGNED)[:, :size]


class Parameter:
    """One parameter of C clients.

    With a ``rule``, gradients are not stored: the product δᵀx is added to the weights directly, so that a step reads
    and writes the weights once. Without one, the gradient is written to ``grad``.

    Attributes:
        value: [C, ...] in the module's shape.
        matrix: the same memory as [C, out, in]; for a convolution, in = height · width · channels.
        grad: where gradients are written, [C, ...]; None if the parameter is not trained.
        rule: the update rule, if gradients are applied directly.
        frozen: whether gradients are ignored, so that the parameter stays as it is.
        operand_dtype: the dtype in which layers multiply by it; values, gradients and steps have the dtype of θ.
    """

    def __init__(
        self, leaf: Leaf, theta: Tensor, grads: Tensor | None, operand_dtype: torch.dtype | None = None
    ) -> None:
        self.leaf, self.operand_dtype = leaf, operand_dtype or theta.dtype
        self.value, self.matrix = _views(leaf, theta)
        self.grad = self._grad_matrix = None
        if grads is not None:
            self.grad, self._grad_matrix = _views(leaf, grads)
        self.rule: StepRule | None = None
        self.frozen = False
        self._velocity = self._velocity_matrix = self._constant = None

    def descend(self, rule: StepRule | None, velocity: Tensor | None = None, constant: Tensor | None = None) -> None:
        """Apply gradients directly by ``rule``; None stores them."""
        self.rule = rule
        if velocity is not None:
            self._velocity, self._velocity_matrix = _views(self.leaf, velocity)
        self._constant = None if constant is None else _views(self.leaf, constant)[0]

    @property
    def is_rounded(self) -> bool:
        """Whether layers multiply by rounded values."""
        return self.operand_dtype != self.value.dtype

    def operand(self, count: int) -> tuple[Float[Tensor, "c ..."], Float[Tensor, "c out in"]]:
        """The first c clients' values as factors of products: in the module's shape, and as matrices."""
        if not self.is_rounded:
            return self.value[:count], self.matrix[:count]
        return _views(self.leaf, self.matrix[:count].to(self.operand_dtype).flatten(1))

    def take_product(self, left: Float[Tensor, "c n out"], right: Float[Tensor, "c n in"]) -> None:
        """Receive the gradient leftᵀ · right of a matrix; summed in the dtype of θ."""
        if self.grad is None or self.frozen:
            return
        count, rule = len(left), self.rule
        if left.dtype != self.value.dtype and not left.is_cpu:
            self.take_matrix(product(left, right, self.value.dtype))
            return
        left, right = left.to(self.value.dtype), right.to(self.value.dtype)
        if rule is None:
            assert self._grad_matrix is not None
            torch.bmm(left.mT, right, out=self._grad_matrix[:count])
        elif rule.momentum:
            assert self._velocity_matrix is not None
            self._velocity_matrix[:count].baddbmm_(left.mT, right, beta=rule.momentum)
            self._move(count, rule)
        else:
            self.matrix[:count].baddbmm_(left.mT, right, beta=rule.decay_factor, alpha=-rule.lr)
            self._shift(count, rule)

    def take_matrix(self, grad: Float[Tensor, "c out in"]) -> None:
        """Receive a gradient as matrices."""
        self.take(_views(self.leaf, grad.flatten(1))[0])

    def take(self, grad: Float[Tensor, "c ..."]) -> None:
        """Receive a gradient."""
        if self.grad is None or self.frozen:
            return
        count, rule = len(grad), self.rule
        if rule is None:
            self.grad[:count].copy_(grad)
        elif rule.momentum:
            assert self._velocity is not None
            self._velocity[:count].mul_(rule.momentum).add_(grad)
            self._move(count, rule)
        else:
            value = self.value[:count]
            if rule.weight_decay:
                value.mul_(rule.decay_factor)
            value.add_(grad, alpha=-rule.lr)
            self._shift(count, rule)

    def _shift(self, count: int, rule: StepRule) -> None:
        if self._constant is not None:
            self.value[:count].add_(self._constant[:count], alpha=-rule.lr)

    def _move(self, count: int, rule: StepRule) -> None:
        """Step along v, which already contains the gradient."""
        assert self._velocity is not None
        value, velocity = self.value[:count], self._velocity[:count]
        if rule.weight_decay:
            velocity.add_(value, alpha=rule.weight_decay)
        if self._constant is not None:
            velocity.add_(self._constant[:count])
        value.add_(velocity, alpha=-rule.lr)


def product(
    left: Float[Tensor, "c n out"], right: Float[Tensor, "c n in"], dtype: torch.dtype
) -> Float[Tensor, "c out in"]:
    """leftᵀ · right, summed in this dtype.

    The matrix units of a GPU multiply rounded factors and sum in float32; a CPU's would round the sums, too.
    """
    if left.dtype == torch.bfloat16 and dtype == torch.float32 and left.is_cuda:
        return torch.bmm(left.mT, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype).mT, right.to(dtype))


def _views(leaf: Leaf, flat: Float[Tensor, "C size"]) -> tuple[Float[Tensor, "C ..."], Float[Tensor, "C out in"]]:
    """A leaf's segment in the module's shape, and as matrices."""
    count, out = len(flat), leaf.shape[0] if leaf.shape else 1
    matrix = flat.unflatten(1, (out, -1))
    if not leaf.channels_last:
        return flat.view(count, *leaf.shape), matrix
    _, into, height, width = leaf.shape
    return matrix.view(count, out, height, width, into).permute(0, 1, 4, 2, 3), matrix


def parameters(
    model: nn.Module, layout: Layout, theta: Tensor, grads: Tensor, operand_dtype: torch.dtype | None = None
) -> dict[str, Parameter]:
    """Every parameter of a model by name: trained ones are views of the rows, others constants of the module."""
    sizes = [leaf.size for leaf in layout.parameters]
    pieces = zip(layout.parameters, theta.split(sizes, 1), grads.split(sizes, 1), strict=True)
    by_name = {leaf.name: Parameter(leaf, value, grad, operand_dtype) for leaf, value, grad in pieces}
    for name, constant in model.named_parameters():
        if name not in by_name:
            leaf, value = Leaf.of(name, constant), constant.detach()
            stored = value.permute(0, 2, 3, 1) if leaf.channels_last else value
            flat = stored.reshape(1, -1).to(theta).expand(len(theta), -1)
            by_name[name] = Parameter(leaf, flat, None, operand_dtype)
    return by_name
