"""The interface of a cohort layer: the same layer of C clients with separate weights and its own backward pass.

Values have a leading client axis, [c, B, ...]: B rows (samples) of each of the first c ≤ C clients. Images have logical
shape [c, B, channels, height, width] and are stored channels-last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.base.tree import Float, Int
from fedloom.compute.cohort.parameters import Parameter
from fedloom.core.dropout import keys


class Unsupported(Exception):
    """Raised for a model or layer without a cohort form; the message says which and why."""


Draws = Iterator[Int[Tensor, "c"]]
"""The clients' keys for one layer of dropout after the other, see ``core.dropout``."""


def dropout_draws(generators: Sequence[torch.Generator], sizes: Sequence[int], device: torch.device | str) -> Draws:
    """Keys of one dropout layer after the other, from the clients' own generators; clients without rows draw none."""
    none = torch.zeros(1, dtype=torch.int64)
    while True:
        yield torch.cat(
            [keys(1, generator) if size else none for generator, size in zip(generators, sizes, strict=False)]
        ).to(device)


class CohortLayer(ABC):
    """One layer of C clients; ``forward`` stores what ``backward`` needs.

    Attributes:
        forward: the layer's output [c, B, ...] as a function of its inputs.
        keeps_output: whether backward reads the output, or the output shares memory with the input; it must then not be
            overwritten.
        in_place: whether forward may overwrite its input; set when the network is compiled.
        input_gradient: whether backward must return the gradient of the input; False if no trained parameter comes
            before.
        selects: whether each value of the output is one of the input's or zero, and each gradient likewise: rounding
            before such a layer is rounding after it, to the bit.
        draws: the keys of random layers; None outside training.
    """

    forward: Callable[..., Tensor]
    keeps_output = False
    in_place = False
    input_gradient = True
    selects = False
    draws: Draws | None = None

    @abstractmethod
    def backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs from the output's gradient; parameter gradients are applied or stored on the way."""


class Product(CohortLayer):
    """A layer that multiplies its input by a weight, with both factors rounded to the dtype of the weight's operands.

    Attributes:
        weight: the weight.
        stays_rounded: whether the output keeps that dtype, because all that reads it rounds to it anyway; set when the
            network is compiled.
    """

    weight: Parameter
    stays_rounded = False

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.weight.operand_dtype if self.stays_rounded else self.weight.value.dtype


Lookup = Callable[[str], Parameter | None]
"""Maps a name within the layer's module to the cohort's parameter, or None if the module has none."""


def required(lookup: Lookup, name: str) -> Parameter:
    """A parameter that a layer requires."""
    parameter = lookup(name)
    if parameter is None:
        raise Unsupported(f"it has no {name} of its own")
    return parameter


Factory = Callable[[Any, Lookup], CohortLayer]

_factories: dict[type[nn.Module], Factory] = {}


def cohort_layer(*kinds: type[nn.Module]) -> Callable[[Factory], Factory]:
    """Decorator: register a factory of cohort layers for exactly these types of modules.

    The factory receives the module and a lookup of its parameters by name, and raises ``Unsupported`` for settings that
    it cannot handle.
    """

    def add(factory: Factory) -> Factory:
        for kind in kinds:
            _factories[kind] = factory
        return factory

    return add


def factory_of(module: nn.Module) -> Factory | None:
    """The factory for this type of module, or None."""
    return _factories.get(type(module))


def images(x: Float[Tensor, "c B ..."]) -> Float[Tensor, "rows ..."]:
    """All clients' images as one batch: [c, B, channels, height, width] to [c * B, channels, height, width].

    Channels-last memory order is preserved.
    """
    if x.stride(2) == 1 and x.ndim == 5:
        return x.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2)
    return x.flatten(0, 1)


def clients(x: Float[Tensor, "rows ..."], count: int) -> Float[Tensor, "c B ..."]:
    """The inverse of ``images``: [c * B, ...] to [c, B, ...] for c = ``count`` clients."""
    return x.unflatten(0, (count, -1))
