"""Low rank: the update of every weight matrix is sent as two thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Range
from fedloom.base.tree import Float
from fedloom.core.context import Context
from fedloom.core.message import Message, SendResult, Slice
from fedloom.core.parts import UPDATE
from fedloom.parts.uplink.feedback import Compression, compressed


@dataclass(frozen=True)
class LowRank(Compression):
    """The update X [m, n] of every weight matrix is sent as its best approximation of rank K, U_K Σ_K V_Kᵀ.

    ::

        K = the smallest with Σ_{k≤K} σ_k² ≥ T Σ_k σ_k²,        σ_1 ≥ σ_2 ≥ ... the singular values of X

    A contraction: ‖x - C(x)‖² ≤ (1 - T) ‖x‖². The factors U_K Σ_K and V_K are K(m + n) numbers; a matrix that has fewer
    itself is sent as it is, and so are vectors, such as biases. A kernel is the matrix [out, in·height·width].

    Wu, Wu, Lyu, Huang & Xie, Nature Communications 2022 (FedKD), where T grows over the rounds, from .95 to .98, and
    the server compresses in the same way what it sends; here T is constant, and what the server sends is not
    compressed.

    Args:
        energy: T in (0, 1].

    >>> import torch
    >>> from fedloom.core.context import NO_ROUND
    >>> ctx = NO_ROUND._replace(facts=NO_ROUND.facts._replace(shapes=((3, 4), (3,))))
    >>> x = torch.cat([torch.outer(torch.ones(3), torch.arange(4.0)).flatten(), torch.ones(3)])
    >>> sent = LowRank().send(ctx, {"update": Slice.of(x)}, None).message["update"]
    >>> torch.allclose(sent.value, x, atol=1e-5), sent.numbers
    (True, 10)
    """

    energy: Annotated[float, Range(0, 1, above=True)] = 0.95

    # other slices are no matrices of the model, so this is no setting here
    slices: ClassVar[tuple[str, ...]] = (UPDATE,)  # pyright: ignore[reportIncompatibleVariableOverride]
    citation = "wu2022fedkd"

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        """The update with matrices of low rank."""
        return SendResult({}, compressed(message, self.slices, lambda x: self._compress(x, ctx.facts.shapes)), {})

    def _compress(self, x: Slice, shapes: tuple[tuple[int, ...], ...]) -> Slice:
        """C(x) of the update of parameters with these shapes; the update ends before those that are private."""
        pieces, numbers, start = [], 0, 0
        for shape in shapes:
            if start == len(x.value):
                break
            piece = x.value[start : start + prod(shape)]
            start += len(piece)
            value, count = self._approximate(piece.view(shape[0], -1)) if len(shape) > 1 else (piece, len(piece))
            pieces.append(value.flatten())
            numbers += count
        return x._replace(value=torch.cat(pieces), numbers=numbers)

    def _approximate(self, matrix: Float[Tensor, "m n"]) -> tuple[Float[Tensor, "m n"], int]:
        """The approximation, and how many numbers it takes."""
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        sums = values.square().cumsum(0)
        rank = int((sums < self.energy * sums[-1]).sum()) + 1
        numbers = rank * sum(matrix.shape)
        if numbers >= matrix.numel():
            return matrix, matrix.numel()
        return (left[:, :rank] * values[:rank]) @ right[:rank], numbers
