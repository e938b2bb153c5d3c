"""What a layer of a cohort is: the same layer of C clients, each with weights of its own, and its own backward pass.

Values have a leading client axis, [c, B, ...]: B rows (samples) of each of the first c ≤ C clients. Images are
logically [c, B, channels, height, width], and lie channels-last in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.compute.cohort.parameters import Parameter


class Unsupported(Exception):
    """A model, or a layer of it, has no form for a cohort; the message says which and why."""


@dataclass
class Draws:
    """Where random layers get their numbers: a generator for each client, and how many rows of each are real."""

    generators: list[torch.Generator]
    rows: list[int]


class CohortLayer:
    """One layer of C clients; ``forward`` keeps what ``backward`` reads.

    Attributes:
        forward: the layer's value [c, B, ...] from its inputs.
        keeps_output: whether backward reads the output, or the output shares memory with the input: then nobody may
            overwrite it.
        in_place: whether forward may overwrite its input; set where the network is put together.
        input_gradient: whether backward must return the gradient of the input; no parameter lies before the first
            layer.
        draws: where random numbers come from; None means that the layer is used and not trained.
    """

    forward: Callable[..., Tensor]
    keeps_output = False
    in_place = False
    input_gradient = True
    draws: Draws | None = None

    def backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, from that of the output; the parameters take theirs on the way."""
        raise NotImplementedError


Lookup = Callable[[str], Parameter | None]
"""The cohort's parameter of a name that is relative to the layer's module; None where the module has none."""

Factory = Callable[[Any, Lookup], CohortLayer]

_factories: dict[type[nn.Module], Factory] = {}


def cohort_layer(*kinds: type[nn.Module]) -> Callable[[Factory], Factory]:
    """Decorator: register how modules of exactly these types become layers of a cohort.

    The factory gets the module and a lookup of its parameters by name; it raises ``Unsupported`` for settings that it
    does not know.
    """

    def add(factory: Factory) -> Factory:
        for kind in kinds:
            _factories[kind] = factory
        return factory

    return add


def factory_of(module: nn.Module) -> Factory | None:
    """How a module becomes a layer of a cohort, if that is known."""
    return _factories.get(type(module))


def images(x: Tensor) -> Tensor:
    """All clients' images as one batch: [c, B, channels, height, width] to [c * B, channels, height, width].

    Images that lie channels-last stay so.
    """
    if x.stride(2) == 1 and x.ndim == 5:
        return x.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2)
    return x.flatten(0, 1)


def clients(x: Tensor, count: int) -> Tensor:
    """The reverse of ``images``: [c * B, ...] to [c, B, ...] for c = ``count`` clients."""
    return x.unflatten(0, (count, -1))
