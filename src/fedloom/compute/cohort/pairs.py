"""Two models per client for a block of clients at once: the local training of paired methods.

Everything that a paired method does to its models w and v is linear. With the gradient g at W = (1 - λ)w + λv and the
received model θ, a view is

    w ← c_g g + c_w w + c_v v + c_θ θ    and    v ← c'_g g + c'_w w + c'_v v + c'_θ θ,

with four numbers per client and model. The vectors of a client are rows of one matrix, so that mixing, the step and all
inner products are small matrix products, each of which reads the vectors once.

Only coordinates are needed. A first linear layer that reads the samples X [n, in] keeps all vectors in the span

    a θ + b v₀ - Dᵀ X,

where v₀ is the first v, and the coordinates a, b and D [n, out] represent the matrix [out, in]. Its outputs on X, inner
products and everything else follow from X θᵀ, X v₀ᵀ and the Gram matrix X Xᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.compute.cohort.dense import Linear
from fedloom.compute.cohort.factored import entrance
from fedloom.compute.cohort.layers import CohortLayer
from fedloom.compute.cohort.net import CohortNet
from fedloom.compute.cohort.parameters import ALIGNED
from fedloom.compute.cohort.trace import LayerCall, Program
from fedloom.core.layout import Layout, Leaf

MIXED, GRAD, SHARED, PRIVATE, RECEIVED = range(5)  # the rows of a client
GAIN = 4  # the first layer has coordinates if a client has this many times fewer samples than inputs
LARGEST = 150_000  # parameters: without coordinates, larger vectors are stepped faster one client after the other


class PairedNet:
    """The vectors W, g, w, v and θ of C clients, and the network at W.

    Args:
        model: the module of one client.
        layout: the order of its parameters.
        clients: C.
        samples: the largest number of samples of a client; 0 for explicit weights in every layer.
        device: the device of the rows.
        operand_dtype: as in ``CohortNet``.

    Attributes:
        rows: [C, 5, Q], in the order of ``MIXED``, ...; Q = P if no layer has coordinates.
        net: the network at W, whose gradients are written to g.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, clients: int, samples: int, device: torch.device | str = "cpu",
        operand_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.first = layout, None
        explicit, extra = layout, 0
        leaf = first_weight(model, layout, samples) if samples and operand_dtype is None else None
        if leaf is not None:
            kept = tuple(each for each in layout.parameters if each is not leaf)
            explicit, extra = replace(layout, parameters=kept), 2 * samples * leaf.shape[0] + 2
        self.explicit = explicit.size
        self.start = _aligned(explicit.size) if leaf else explicit.size  # of the coordinates; zeros lie between
        held = torch.zeros(clients, 5, _aligned(self.start + extra), dtype=layout.dtype, device=device)
        self.rows = held[:, :, : self.start + extra]
        mine = self.rows[:, MIXED, : self.explicit], self.rows[:, GRAD, : self.explicit]
        self.net = CohortNet(model, explicit, clients, device=device, operand_dtype=operand_dtype, rows=mine)
        self.program = self.net.program
        if leaf is not None:
            place = entrance(self.program)
            assert place is not None
            step = self.program.steps[place]
            assert isinstance(step.layer, Linear)
            self.first = FirstLayer(step.layer, self.rows[:, :, self.start :], samples)
            rest = self.program.steps[place + 1 :]
            for later in rest:  # the first layer, whose weight is none of the network's, is trained, too
                later.layer.input_gradient = True
            steps = (LayerCall(self.first, (0,), step.output, step.name), *rest)
            self.program = Program(steps, self.program.values, self.program.outputs)
        start = sum(each.size for each in layout.parameters[: layout.parameters.index(leaf)]) if leaf else layout.size
        self.place = slice(start, start + (leaf.size if leaf else 0))  # of the first layer's weight in a vector [P]

    def begin(self, theta: Tensor, private: Sequence[Tensor], x: Tensor) -> None:
        """Start a round from θ [P] and the clients' first v [P] with their samples [C, n, ...]."""
        count = len(private)
        for row, vector in ((RECEIVED, theta), (SHARED, theta)):
            self._explicit(row, count).copy_(self._rest(vector))
        for row, vector in zip(self._explicit(PRIVATE, count), private, strict=True):
            row.copy_(self._rest(vector))
        self.rows[:count, GRAD] = 0
        if self.first is not None:
            shape = self.first.shape
            starts = [vector[self.place].view(shape) for vector in private]
            self.first.begin(theta[self.place].view(shape), starts, x.flatten(2))

    def mix(self, at: Tensor) -> None:
        """W = (1 - λ)w + λv of the first c clients for λ [c, 1], or [c, L], one per layer."""
        count = len(at)
        stop = self.start + (self.first.outputs[0, 0].numel() if self.first else 0)  # of W's rest nothing is read
        for number, places in self._pieces(at.shape[1], stop):
            rows = self.rows[:count, :, places]
            torch.lerp(rows[:, SHARED], rows[:, PRIVATE], at[:, number, None], out=rows[:, MIXED])

    def step(self, factors: Tensor, moved: slice) -> None:
        """Replace w, v or both (``moved``) by combinations of (g, w, v, θ) with factors [c, 1 or L, moved, 4]."""
        count = len(factors)
        for number, places in self._pieces(factors.shape[1], self.rows.shape[2]):
            rows = self.rows[:count, :, places]
            rows[:, moved] = torch.bmm(factors[:, number], rows[:, GRAD:])

    def products(self, count: int) -> Tensor:
        """The inner products of g, w and v of the first c clients, [c, 3, 3]."""
        rows = self.rows[:count, GRAD:RECEIVED, : self.explicit]
        found = torch.bmm(rows, rows.mT)
        return found if self.first is None else found.add_(self.first.products(count))

    def finish(self, row: int, w: Tensor, v: Tensor) -> None:
        """Convert a client's coordinates to w and v [P], in place; these hold θ and the first v beforehand."""
        for vector, at in ((w, SHARED), (v, PRIVATE)):
            source = self.rows[row, at, : self.explicit]
            vector[: self.place.start] = source[: self.place.start]
            vector[self.place.stop :] = source[self.place.start :]
        if self.first is not None:
            shape = self.first.shape
            self.first.finish(row, w[self.place].view(shape), v[self.place].view(shape))

    def _explicit(self, row: int, count: int) -> Tensor:
        return self.rows[:count, row, : self.explicit]

    def _rest(self, vector: Tensor) -> Tensor:
        """A vector [P] without the first layer's weight."""
        if self.first is None:
            return vector
        return torch.cat([vector[: self.place.start], vector[self.place.stop :]])

    def _pieces(self, numbers: int, stop: int) -> list[tuple[int, slice]]:
        """The places of each layer in a row up to ``stop``, with its number; all if there is one number for all."""
        if numbers == 1:
            return [(0, slice(stop))]
        cuts, start, inside, left = [], 0, self.place, self.place.stop - self.place.start
        for number, size in enumerate(self.layout.layers):
            end = start + size
            if left and start <= inside.start < end:
                end, left = end - left, 0
                cuts += [(number, slice(start, inside.start)), (number, slice(self.start, stop))]
                cuts.append((number, slice(inside.start, end)))
            else:
                cuts.append((number, slice(start, end)))
            start = end
        return [(number, places) for number, places in cuts if places.stop != places.start]


class FirstLayer(CohortLayer):
    """A linear layer on known samples in coordinates: from their positions, int64 [c, B], to its outputs [c, B, out].

    Its outputs Y = X Mᵀ on all samples are kept as coordinates of a matrix M, too: they change linearly with it.

    Args:
        linear: the layer that it replaces.
        rows: the coordinates of the five vectors, [C, 5, 2 n · out + 2].
        samples: n, the largest number of samples.
    """

    def __init__(self, linear: Linear, rows: Tensor, samples: int) -> None:
        self.linear, self.samples = linear, samples
        self.shape = linear.weight.matrix.shape[1:]
        size = samples * self.shape[0]
        self.outputs = rows[:, :, :size].unflatten(2, (samples, -1))  # Y [C, 5, n, out]
        self.moved = rows[:, :, size : 2 * size].unflatten(2, (samples, -1))  # D [C, 5, n, out]
        self.numbers = rows[:, :, 2 * size :]  # a and b, [C, 5, 2]

    def begin(self, theta: Tensor, private: Sequence[Tensor], x: Tensor) -> None:
        """Start a round from θ and first weights v₀ [out, in] with the samples [C, n, in]."""
        count, samples = x.shape[:2]
        self.x, self.theta, self.private = x, theta, private
        self.gram = torch.bmm(x, x.mT)
        self.base = x.new_zeros(count, 2, self.samples, len(theta))  # X θᵀ and X v₀ᵀ
        self.base[:, 0, :samples] = x @ theta.mT
        for row, (start, own) in enumerate(zip(private, x, strict=True)):
            torch.mm(own, start.mT, out=self.base[row, 1, :samples])
        for row, number in ((SHARED, 0), (PRIVATE, 1), (RECEIVED, 0)):
            self.outputs[:count, row] = self.base[:, number]
        self.outputs[:count, GRAD] = 0
        self.moved[:count] = 0
        self.numbers[:count] = self.numbers.new_tensor([[0, 0], [0, 0], [1, 0], [0, 1], [1, 0]])
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

    def products(self, count: int) -> Tensor:
        """The inner products of g, w and v, [c, 3, 3]: ⟨M, M'⟩ = a ⟨θ, M'⟩ + b ⟨v₀, M'⟩ - ⟨D, Y'⟩."""
        three = slice(GRAD, RECEIVED)
        numbers, moved = self.numbers[:count, three], self.moved[:count, three].flatten(2)
        starts = torch.bmm(self._products_of_starts()[:count], numbers.mT)  # ⟨θ, M'⟩ and ⟨v₀, M'⟩, [c, 2, 3]
        starts.sub_(torch.bmm(self.base[:count].flatten(2), moved.mT))
        return torch.bmm(numbers, starts).sub_(torch.bmm(moved, self.outputs[:count, three].flatten(2).mT))

    def finish(self, row: int, w: Tensor, v: Tensor) -> None:
        """Write w and v [out, in], which hold θ and v₀ beforehand."""
        x = self.x[row]
        (a, b), (c, d) = self.numbers[row, SHARED:RECEIVED].tolist()
        w.addmm_(self.moved[row, SHARED, : len(x)].mT, x, beta=a, alpha=-1)
        if b:
            w.add_(v, alpha=b)
        v.addmm_(self.moved[row, PRIVATE, : len(x)].mT, x, beta=d, alpha=-1)
        if c:
            v.add_(self.theta, alpha=c)

    def _products_of_starts(self) -> Tensor:
        """The inner products of θ and v₀, [C, 2, 2]."""
        if self._starts is None:
            theta = self.theta.flatten()
            own = torch.dot(theta, theta)
            made = [
                torch.stack([own, across := torch.dot(theta, v), across, torch.dot(v, v)])
                for v in (start.flatten() for start in self.private)
            ]
            self._starts = torch.stack(made).view(-1, 2, 2)
        return self._starts


def pays(model: nn.Module, layout: Layout, samples: int, operand_dtype: torch.dtype | None) -> bool:
    """Whether pairs of a block are faster than lockstep: they are small, or the first layer has coordinates."""
    if layout.size <= LARGEST:
        return True
    return operand_dtype is None and first_weight(model, layout, samples) is not None


def first_weight(model: nn.Module, layout: Layout, samples: int) -> Leaf | None:
    """The weight of a trained linear layer that alone reads the samples, if it has coordinates; otherwise None."""
    program = CohortNet(model, layout, 1).program
    place = entrance(program)
    if place is None:
        return None
    layer = program.steps[place].layer
    assert isinstance(layer, Linear)
    if layer.weight.grad is None or GAIN * samples >= layer.weight.matrix.shape[2]:
        return None
    return next(leaf for leaf in layout.parameters if leaf is layer.weight.leaf)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
