"""Two models per client for a block of clients at once: the local training of paired methods.

Everything that a paired method does to its models w and v is linear. With the gradient g at W = (1 - λ)w + λv and the
received model θ, a view is

    w ← c_g g + c_w w + c_v v + c_θ θ    and    v ← c'_g g + c'_w w + c'_v v + c'_θ θ,

with four numbers per client and model; with momentum s, w ← w - η s where s ← m s + d_g g + d_w w + d_v v + d_θ θ. The
vectors of a client are rows of one matrix, so that mixing, the step and all inner products are small matrix products,
each of which reads the vectors once.

A first linear layer may have coordinates in place of its weights; see ``coordinates``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.base.tree import Float
from fedloom.compute.cohort.coordinates import GRAD, MIXED, PRIVATE, RECEIVED, SHARED, FirstLayer, first_weight
from fedloom.compute.cohort.dense import Linear
from fedloom.compute.cohort.factored import input_layer
from fedloom.compute.cohort.net import CohortNet
from fedloom.compute.cohort.parameters import ALIGNED
from fedloom.compute.cohort.trace import LayerCall, Program
from fedloom.core.layout import Layout

LARGEST = 150_000  # parameters: without coordinates, larger vectors are stepped faster one client after the other


def is_faster(layout: Layout, samples: int) -> bool:
    """Whether pairs of a block are faster than lockstep: they are small, or the first layer has coordinates."""
    return layout.size <= LARGEST or samples > 0


class PairedNet:
    """The vectors W, g, w, v and θ of C clients, and the network at W.

    Args:
        model: the module of one client.
        layout: the order of its parameters.
        clients: C.
        samples: the number of samples on which the first layer has coordinates; 0 for explicit weights in every layer.
        momentum: m; 0 for plain steps.
        device: the device of the rows.
        operand_dtype: as in ``CohortNet``.

    Attributes:
        rows: [C, V, Q], in the order of ``MIXED``, ...; Q = P if no layer has coordinates. V = 5, or 7 with momentum.
        net: the network at W, whose gradients are written to g.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, clients: int, samples: int, momentum: float = 0.0,
        device: torch.device | str = "cpu", operand_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.samples, self.momentum, self.first = layout, samples, momentum, None
        explicit, extra = layout, 0
        leaf = first_weight(model, layout) if samples else None
        if leaf is not None:
            other_leaves = tuple(entry for entry in layout.parameters if entry is not leaf)
            explicit, extra = replace(layout, parameters=other_leaves), 2 * samples * leaf.shape[0] + 3
        self.explicit = explicit.size
        self.start = _aligned(explicit.size) if leaf else explicit.size  # of the coordinates; zeros lie between
        vectors = 7 if momentum else 5
        memory = torch.zeros(clients, vectors, _aligned(self.start + extra), dtype=layout.dtype, device=device)
        self.rows = memory[:, :, : self.start + extra]
        network_rows = self.rows[:, MIXED, : self.explicit], self.rows[:, GRAD, : self.explicit]
        self.net = CohortNet(model, explicit, clients, device=device, operand_dtype=operand_dtype, rows=network_rows)
        self.program = self.net.program
        if leaf is not None:
            place = input_layer(self.program)
            assert place is not None
            step = self.program.steps[place]
            assert isinstance(step.layer, Linear)
            self.first = FirstLayer(step.layer, self.rows[:, :, self.start :], samples)
            rest = self.program.steps[place + 1 :]
            for later in rest:  # the first layer, whose weight is none of the network's, is trained, too
                later.layer.input_gradient = True
            steps = (LayerCall(self.first, (0,), step.output, step.name), *rest)
            self.program = Program(steps, self.program.values, self.program.outputs)
        start = sum(entry.size for entry in layout.parameters[: layout.parameters.index(leaf)]) if leaf else layout.size
        self.place = slice(start, start + (leaf.size if leaf else 0))  # of the first layer's weight in a vector [P]

    def begin(self, theta: Float[Tensor, "P"], private: Sequence[Float[Tensor, "P"]]) -> None:
        """Start a round from θ and the clients' first v."""
        count = len(private)
        for row in (RECEIVED, SHARED):
            self._fill(self._explicit(row, count), theta)
        for row, vector in zip(self._explicit(PRIVATE, count), private, strict=True):
            self._fill(row, vector)
        self.rows[:count, GRAD] = 0
        self.rows[:count, RECEIVED + 1 :] = 0
        if self.first is not None:
            shape = self.first.shape
            self.first.begin(theta[self.place].view(shape), [vector[self.place].view(shape) for vector in private])

    def mix(self, at: Float[Tensor, "c layers"]) -> None:
        """W = (1 - λ)w + λv of the first c clients for λ, one for all layers or one per layer."""
        count = len(at)
        stop = self.start + (self.first.outputs[0, 0].numel() if self.first else 0)  # of W's rest nothing is read
        for number, places in self._pieces(at.shape[1], stop):
            rows = self.rows[:count, :, places]
            torch.lerp(rows[:, SHARED], rows[:, PRIVATE], at[:, number, None], out=rows[:, MIXED])

    def step(self, gradients: Sequence[Sequence[Sequence[Sequence[float]]]], rates: tuple[float, float]) -> None:
        """Move w and v along combinations of (g, w, v, θ) with the given coefficients [c, 1 or L, moved, 4].

        Args:
            gradients: the coefficients of w's step, of v's, or of both.
            rates: the step sizes of w and v; one with 0 does not move.
        """
        count, moved = len(gradients), slice(0 if rates[0] else 1, 2 if rates[1] else 1)
        factors = torch.tensor(gradients, dtype=torch.float64, device=self.rows.device)
        sizes = factors.new_tensor(rates)[moved, None]
        if not self.momentum:
            factors = torch.eye(4, device=factors.device)[1:3][moved] - sizes * factors
        factors, rows = factors.to(self.rows), self.rows[:count]
        models, momenta = rows[:, SHARED:RECEIVED], rows[:, RECEIVED + 1 :]
        for number, places in self._pieces(factors.shape[1], rows.shape[2]):
            vectors = rows[:, GRAD : RECEIVED + 1, places]
            if self.momentum:
                momenta[:, moved, places].baddbmm_(factors[:, number], vectors, beta=self.momentum)
            else:
                models[:, moved, places] = torch.bmm(factors[:, number], vectors)
        if self.momentum:
            models[:, moved].addcmul_(momenta[:, moved], sizes.to(rows), value=-1)

    def products(self, count: int, vectors: slice) -> Float[Tensor, "c n n"]:
        """The inner products of some of g, w and v of the first c clients."""
        rows = self.rows[:count, vectors, : self.explicit]
        products = torch.bmm(rows, rows.mT)
        return products if self.first is None else products.add_(self.first.products(count, vectors))

    def finish(self, row: int, w: Float[Tensor, "P"], v: Float[Tensor, "P"]) -> None:
        """Write a client's w and v."""
        for number, (vector, at) in enumerate(((w, SHARED), (v, PRIVATE))):
            source = self.rows[row, at, : self.explicit]
            vector[: self.place.start] = source[: self.place.start]
            vector[self.place.stop :] = source[self.place.start :]
            if self.first is not None:
                vector[self.place] = self.first.pair[row, number].flatten()

    def _explicit(self, row: int, count: int) -> Tensor:
        return self.rows[:count, row, : self.explicit]

    def _fill(self, rows: Float[Tensor, "... Q"], vector: Float[Tensor, "P"]) -> None:
        """Copy a vector, without the first layer's weight, to rows."""
        rows[..., : self.place.start] = vector[: self.place.start]
        rows[..., self.place.start :] = vector[self.place.stop :]

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


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
