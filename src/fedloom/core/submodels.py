"""Clients of different architecture: each trains the part of the server's network that its level holds.

The server keeps one vector θ [P]. A level is a smaller network together with the positions I of its parameters in θ:
its clients receive θ[I], train it like any network and send an update [|I|]. The server averages every parameter over
the clients that hold it::

    θ_j ← θ_j - Σ p_i Δ_ij / Σ p_i        over the clients i of the round whose level holds j

A parameter that no client of the round holds is unchanged. Buffers are averaged likewise, their values instead of
updates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base.tree import Float
from fedloom.core.layout import Layout
from fedloom.core.method import Method


@dataclass(frozen=True)
class Submodel:
    """The network of a level.

    Attributes:
        name: the level's name in records; empty for the largest level, whose model is the server's.
        network: the module that its clients train.
        layout: that module's layout.
        param_index: I, the positions of its parameters in θ, int64 [|I|], and after them those of private ones in the
            initial model.
        buffer_index: likewise of its buffers.
        exit_weights: weights of the losses at the network's exits; () for its output alone.
    """

    name: str
    network: nn.Module
    layout: Layout
    param_index: Tensor
    buffer_index: Tensor
    exit_weights: tuple[float, ...]

    @property
    def shared_index(self) -> Tensor:
        """The positions of the parameters that its clients share."""
        return self.param_index[: self.layout.shared_size]

    @property
    def shared_buffers(self) -> Tensor:
        """The positions of the buffers that its clients share."""
        return self.buffer_index[: self.layout.shared_buffers]


def submodels(method: Method, model: nn.Module, layout: Layout) -> Iterator[Submodel]:
    """The networks of all levels, the largest first.

    Positions are found by building each network once more from a model whose parameters and buffers are their own
    indices.
    """
    personal, numbered = method.personal, copy.deepcopy(model).double()
    layout.write(numbered, *(torch.arange(size, dtype=torch.float64) for size in (layout.size, layout.buffer_size)))
    for number, name in enumerate(personal.levels):
        network = personal.network(model, number)
        submodel_layout = Layout.of(network, method.private_in(network))
        places = submodel_layout.places(personal.network(numbered, number))
        yield Submodel(name if number else "", network, submodel_layout, *places, personal.exit_weights(number))


def mean_over_holders(
    levels: Sequence[Tensor], sums: Sequence[Tensor | None], mass: Sequence[float], fallback: Float[Tensor, "P"]
) -> Float[Tensor, "P"]:
    """The mixed update (or the mixed buffers) of clients of several levels: each entry's mean over those that hold it.

    Args:
        levels: I of each level, int64 [|I|].
        sums: Σ p_i Δ_i over the clients of each level, [|I|]; None for a level without updates.
        mass: Σ p_i over the clients of each level.
        fallback: the result for entries that no client holds.
    """
    mixed = torch.zeros_like(fallback)
    region = torch.zeros(fallback.shape, dtype=torch.int64, device=fallback.device)
    for number, (index, total) in enumerate(zip(levels, sums, strict=True)):
        region[index] += 1 << number  # the levels that hold a parameter, as bits
        if total is not None:
            mixed[index] += total
    present, where = region.unique(return_inverse=True)
    holds = (present.cpu().numpy()[:, None] >> np.arange(len(levels))) & 1
    masses = holds @ np.asarray(mass)
    factor = torch.from_numpy(np.divide(1.0, masses, out=np.zeros_like(masses), where=masses > 0)).to(mixed)[where]
    return torch.where(factor > 0, mixed * factor, fallback)
