"""The first linear layer of pairs of models in coordinates.

Everything that a paired method does to its models is linear, and all gradients of a linear layer that reads the samples
X [n, in] are sums of δ_j x_jᵀ. While only these samples are seen, its matrices [out, in] therefore stay in the span

    a θ + b w₀ + c v₀ - Dᵀ X

of the received θ, the w₀ and v₀ before the first step on them, and D [n, out]: the coordinates a, b, c and D represent
them. Outputs on X, inner products and everything else follow from X θᵀ, X w₀ᵀ, X v₀ᵀ and the Gram matrix X Xᵀ. The
samples are a client's own, if they are few, or those of one mini-batch, if a method takes several steps on it; then w
and v are computed after each. Momenta start at zero and stay in the span of a client's own samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedloom.base.tree import Float
from fedloom.compute.cohort.dense import Linear
from fedloom.compute.cohort.factored import input_layer
from fedloom.compute.cohort.layers import CohortLayer
from fedloom.compute.cohort.net import CohortNet
from fedloom.core.layout import Layout, Leaf

MIXED, GRAD, SHARED, PRIVATE, RECEIVED = range(5)  # the vectors of a client, before the momenta of w and v
GAIN = 4  # coordinates pay on this many times fewer samples than inputs
SEVERAL = 3  # steps on a mini-batch from which it has coordinates of its own


class FirstLayer(CohortLayer):
    """A linear layer on known samples in coordinates: from their positions, int64 [c, B], to its outputs [c, B, out].

    Its outputs Y = X Mᵀ on all samples are kept as coordinates of a matrix M, too: they change linearly with it.

    Args:
        linear: the layer that it replaces.
        rows: the coordinates of the V vectors of ``PairedNet``, [C, V, 2 n · out + 3].
        samples: n, the largest number of samples.
    """

    def __init__(self, linear: Linear, rows: Tensor, samples: int) -> None:
        self.linear, self.samples = linear, samples
        self.shape = linear.weight.matrix.shape[1:]
        size = samples * self.shape[0]
        self.outputs = rows[:, :, :size].unflatten(2, (samples, -1))  # Y [C, V, n, out]
        self.moved = rows[:, :, size : 2 * size].unflatten(2, (samples, -1))  # D [C, V, n, out]
        self.numbers = rows[:, :, 2 * size :]  # a, b and c, [C, V, 3]
        self.base = rows.new_empty(len(rows), 3, samples, self.shape[0])  # X θᵀ, X w₀ᵀ and X v₀ᵀ
        self.pair, self.next = (rows.new_empty(len(rows), 2, *self.shape) for _ in range(2))  # w₀ and v₀

    def begin(self, theta: Float[Tensor, "out in"], private: Sequence[Float[Tensor, "out in"]]) -> None:
        """Start a round from θ and the first v."""
        self.theta, self.at_theta, self.count = theta, True, len(private)
        self.pair[: self.count, 0] = theta
        for row, start in zip(self.pair[:, 1], private, strict=False):
            row.copy_(start)

    def open(self, x: Float[Tensor, "c n in"]) -> None:
        """Go on with the samples of the first c clients."""
        count, samples = x.shape[:2]
        self.x, self.gram = x, torch.bmm(x, x.mT)
        base, out = self.base[:count], self.shape[0]
        base[:, :, samples:] = 0
        base[:, 0, :samples] = x @ self.theta.mT
        first = 1 if self.at_theta else 0  # w₀ = θ
        products = torch.bmm(x, self.pair[:count, first:].flatten(1, 2).mT).unflatten(2, (-1, out))
        base[:, 1 + first :, :samples] = products.transpose(1, 2)
        if self.at_theta:
            base[:, 1] = base[:, 0]
        for row, number in ((SHARED, 1), (PRIVATE, 2), (RECEIVED, 0)):
            self.outputs[:count, row] = base[:, number]
        self.outputs[:count, GRAD] = 0
        self.outputs[:count, RECEIVED + 1 :] = 0
        self.moved[:count] = 0
        self.numbers[:count] = 0
        for row, number in ((SHARED, 1), (PRIVATE, 2), (RECEIVED, 0)):
            self.numbers[:count, row, number] = 1
        self._starts: Tensor | None = None

    def forward(self, places: Tensor) -> Tensor:
        self.places, self.clients = places, torch.arange(len(places), device=places.device)[:, None]
        y = self.outputs[: len(places), MIXED][self.clients, places]
        return y if self.linear.bias is None else y.add_(self.linear.bias.value[: len(places), None])

    def backward(self, grad: Tensor) -> tuple[None]:
        count = len(grad)
        self.moved[:count, GRAD].zero_().scatter_add_(1, self.places[..., None].expand_as(grad), grad.neg())
        self.outputs[:count, GRAD, : self.gram.shape[1]] = torch.bmm(self.gram[self.clients, self.places].mT, grad)
        if self.linear.bias is not None:
            self.linear.bias.take(grad.sum(1))
        return (None,)

    def products(self, count: int, vectors: slice) -> Float[Tensor, "c n n"]:
        """The inner products of n of g, w and v.

        They are ⟨M, M'⟩ = a ⟨θ, M'⟩ + b ⟨w₀, M'⟩ + c ⟨v₀, M'⟩ - ⟨D, Y'⟩.
        """
        numbers, moved = self.numbers[:count, vectors], self.moved[:count, vectors].flatten(2)
        starts = torch.bmm(self._products_of_starts()[:count], numbers.mT)  # with θ, w₀ and v₀, [c, 3, n]
        starts.sub_(torch.bmm(self.base[:count].flatten(2), moved.mT))
        return torch.bmm(numbers, starts).sub_(torch.bmm(moved, self.outputs[:count, vectors].flatten(2).mT))

    def close(self) -> None:
        """Compute w and v of the clients whose samples were seen."""
        count, samples = self.x.shape[:2]
        numbers = self.numbers[:count, SHARED:RECEIVED]
        models = self.next[:count]
        torch.bmm(numbers[:, :, 1:], self.pair[:count].flatten(2), out=models.flatten(2))
        if numbers[:, :, 0].any():
            models.addcmul_(self.theta, numbers[:, :, 0, None, None])
        moved = self.moved[:count, SHARED:RECEIVED, :samples].transpose(1, 2).flatten(2)  # [c, n, 2 out]
        models.flatten(1, 2).baddbmm_(moved.mT, self.x, alpha=-1)
        if count < self.count:  # the others have no more steps
            self.next[count : self.count] = self.pair[count : self.count]
        self.pair, self.next, self.at_theta = self.next, self.pair, False

    def _products_of_starts(self) -> Float[Tensor, "c 3 3"]:
        """The inner products of θ, w₀ and v₀."""
        if self._starts is None:
            pair, theta = self.pair[: len(self.x)].flatten(2), self.theta.flatten()
            self._starts = pair.new_empty(len(pair), 3, 3)
            self._starts[:, 0, 0] = theta @ theta
            self._starts[:, 0, 1:] = self._starts[:, 1:, 0] = pair @ theta
            self._starts[:, 1:, 1:] = torch.bmm(pair, pair.mT)
        return self._starts


def coordinates(model: nn.Module, layout: Layout, samples: int, batch: int, passes: int) -> int:
    """The number of samples on which the first layer is represented by its coordinates; 0 if its weights are explicit.

    Args:
        model: the module of one client.
        layout: the order of its parameters.
        samples: the largest number of samples of a client.
        batch: the size of its mini-batches.
        passes: the number of gradients on each; 1 if there is momentum, which outlives a mini-batch.
    """
    leaf = first_weight(model, layout)
    if leaf is None:
        return 0
    into = leaf.size // leaf.shape[0]
    return next((n for n, few in ((samples, True), (batch, passes >= SEVERAL)) if few and GAIN * n < into), 0)


def first_weight(model: nn.Module, layout: Layout) -> Leaf | None:
    """The weight of a trained linear layer that alone reads the samples; None if there is none."""
    program = CohortNet(model, layout, 1).program
    place = input_layer(program)
    if place is None:
        return None
    layer = program.steps[place].layer
    assert isinstance(layer, Linear)
    return None if layer.weight.grad is None else next(leaf for leaf in layout.parameters if leaf is layer.weight.leaf)
