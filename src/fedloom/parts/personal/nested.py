"""Networks of different sizes in one federation: cut by depth at an early exit (FedHeN), or by width (HeteroFL)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from typing import Annotated

import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import NonNegative, Probability, Range
from fedloom.base.tree import Tree
from fedloom.core.parts import Personal, Use


class Simple(nn.Module):
    """The sub-network M of a network with an early exit: its first stages and the exit, under the same names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(OrderedDict(near=model.get_submodule("body.near")))
        self.exit = model.get_submodule("exit")

    @property
    def head(self) -> nn.Module:
        """The exit's linear layer."""
        return self.exit.get_submodule("head")

    def features(self, x: Tensor) -> Tensor:
        """Features [B, d] of samples [B, ...]."""
        return self.exit.get_submodule("pool")(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of samples [B, ...]."""
        return self.exit(self.body(x))


class Both(nn.Module):
    """A simple and a complex network without common parameters; the output is the complex one's."""

    def __init__(self, simple: nn.Module, complex: nn.Module) -> None:
        super().__init__()
        self.simple, self.complex = simple, complex

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of the complex network."""
        return self.complex(x)


def is_simple(client: int, share: float) -> bool:
    """Whether a client trains the simple network: a fraction ``share`` of clients, evenly spread over their numbers.

    >>> [is_simple(client, 0.5) for client in range(4)], [is_simple(client, 0.25) for client in range(4)]
    ([False, True, False, True], [False, False, False, True])
    """
    return floor((client + 1) * share + 1e-9) > floor(client * share + 1e-9)


def _require_exit(name: str, model: nn.Module) -> nn.Module:
    """Return the model if it has an early exit."""
    parts = dict(model.named_modules())
    if not hasattr(model, "ends") or "body.near" not in parts or "exit" not in parts:
        raise ConfigError(
            f"personal {name!r} needs a network with an early exit (ends(x), with submodules body.near and exit); "
            "choose model=exit_cnn, or model=preact_resnet18 with model.exit=true."
        )
    return model


@dataclass(frozen=True)
class TwoLevels(Personal):
    """Base class of methods with simple clients and complex ones.

    Args:
        simple_fraction: fraction of clients that train the simple network, in [0, 1].
    """

    simple_fraction: Probability = 0.5

    citation = "acar2022fedhen"

    @property
    def levels(self) -> tuple[str, ...]:
        """Complex and simple."""
        return ("complex", "simple")

    def uses(self, client: int, load_state: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """The simple network at simple clients."""
        return (Use(int(is_simple(client, self.simple_fraction))),)


@dataclass(frozen=True)
class EarlyExitSlice(TwoLevels):
    """The simple network is the complex one up to its early exit: a sub-network M whose parameters all clients share.

    ::

        simple clients   minimise f_i(w_s)                          and hold w_s
        complex clients  minimise f_j(w_c) + σ f_j([w_c]_M)         and hold w_c, including the exit
        server           w_s = [w_c]_M: the mean over all active clients; the rest of w_c: over the complex ones

    With σ = 1 this is FedHeN; with σ = 0 the complex clients have no side objective (NoSide): weight decay alone
    changes the exit's parameters that they return, which enter the mean. Acar & Saligrama 2022; Acar, thesis,
    algorithms 4, 5 and 9. There the first half of the clients is simple; here simple and complex clients alternate, so
    that a partition ordered by client number does not split the data along with the networks.

    Args:
        side_weight: σ ≥ 0, weight of the exit's loss at complex clients.
    """

    side_weight: NonNegative = 1.0

    def server_network(self, model: nn.Module) -> nn.Module:
        """The complex network, with its exit."""
        return _require_exit("early_exit", model)

    def network(self, server_network: nn.Module, level: int) -> nn.Module:
        """The complex network, or its part up to the exit."""
        return Simple(server_network) if level else server_network

    def exit_weights(self, level: int) -> tuple[float, ...]:
        """Both exits of the complex network, if there is a side objective."""
        return (self.side_weight, 1.0) if self.side_weight and not level else ()


@dataclass(frozen=True)
class Decoupled(TwoLevels):
    """Two independent federations: simple and complex clients each average their own network.

    The baseline Decouple of Acar, thesis, algorithm 8. The networks have the same initial values where they coincide.
    The complex one has no exit.
    """

    def server_network(self, model: nn.Module) -> nn.Module:
        """A copy of the first stages with the exit, and the network without the exit."""
        complex = copy.deepcopy(_require_exit("decoupled", model))
        del complex.exit
        return Both(copy.deepcopy(Simple(model)), complex)

    def network(self, server_network: nn.Module, level: int) -> nn.Module:
        """One of the two networks."""
        return server_network.get_submodule("simple" if level else "complex")


@dataclass(frozen=True)
class WidthSlice(Personal):
    """A client of width r holds the first r·C of the C channels (or units) of every hidden layer.

    ::

        server   each parameter: the mean over the active clients that hold it

    Inputs and classes are not cut. The r-network equals the whole one with all other parameters set to zero. Client i
    has the width number i modulo the number of widths. This is HeteroFL's aggregation rule and, with ``scale``, its
    scaler: in training, an r-network divides the output of each hidden layer by r (before normalisation and
    activation), so that features have the scale of the whole network, which is evaluated without it. Static batch
    normalisation and the masked loss are not included. Diao, Ding & Tarokh, ICLR 2021.

    Args:
        widths: decreasing from 1, one per level; every r·C must be an integer, and so must r times the number of groups
            of a group normalisation, so that no group is cut.
        scale: whether narrow networks scale their features in training.

    Raises:
        ConfigError: if the widths do not decrease from 1 to above 0.
    """

    widths: tuple[Annotated[float, Range(0, 1, above=True)], ...] = (1.0, 0.5)
    scale: bool = False

    citation = "diao2021heterofl"

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self.widths
        if not widths or widths[0] != 1 or any(b >= a for a, b in pairwise(widths)):
            raise ConfigError(
                f"personal 'width_slice': widths must start at 1 and decrease towards 0, not {list(widths)}; "
                "like [1, 0.5, 0.25]."
            )

    @property
    def levels(self) -> tuple[str, ...]:
        """Named by their widths."""
        return tuple(f"width_{share:g}" for share in self.widths)

    def uses(self, client: int, load_state: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """The client's number modulo the number of widths."""
        return (Use(client % len(self.widths)),)

    def network(self, server_network: nn.Module, level: int) -> nn.Module:
        """The network of the first channels."""
        return server_network if self.widths[level] == 1 else narrowed(server_network, self.widths[level], self.scale)


@dataclass(frozen=True)
class Scaler:
    """A forward hook that divides a layer's output by ``share``, in training only."""

    share: float

    @property
    def training_divisor(self) -> float:
        """The divisor of the output in training, for computes that do not call hooks."""
        return self.share

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The layer's output, scaled."""
        return output / self.share if module.training else output


KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.GroupNorm)


def narrowed(model: nn.Module, share: float, scale: bool = False) -> nn.Module:
    """The network of the first channels of every hidden layer, with the model's parameters.

    The first layer keeps all inputs; layers named ``head`` keep all outputs, or the last layer if there is none. With
    ``scale``, hidden layers get a ``Scaler``.

    Raises:
        ConfigError: if a layer cannot be cut.
    """
    network = copy.deepcopy(model)
    layers = [
        (name, part)
        for name, part in network.named_modules()
        if isinstance(part, nn.GroupNorm) or any(True for _ in (*part.parameters(False), *part.buffers(False)))
    ]
    cut = [name for name, part in layers if not isinstance(part, nn.GroupNorm)]
    heads = [name for name in cut if name.rpartition(".")[2] == "head"] or cut[-1:]
    for name, part in layers:
        if not isinstance(part, KINDS):
            raise ConfigError(
                f"personal 'width_slice' cannot cut {name!r}, a {type(part).__name__}; it can cut linear layers, "
                "convolutions and group normalisation."
            )
        if isinstance(part, nn.GroupNorm):
            part.num_groups = _integer(name, "groups", part.num_groups, share)
            part.num_channels = _integer(name, "channels", part.num_channels, share)
            _truncate(part, "weight", part.num_channels)
            _truncate(part, "bias", part.num_channels)
            continue
        linear = isinstance(part, nn.Linear)
        fan_out, fan_in = ("out_features", "in_features") if linear else ("out_channels", "in_channels")
        if name not in heads:
            if scale:
                part.register_forward_hook(Scaler(share))
            setattr(part, fan_out, _integer(name, "outputs", getattr(part, fan_out), share))
        if name != cut[0]:
            setattr(part, fan_in, _integer(name, "inputs", getattr(part, fan_in), share))
            if not linear and part.groups > 1:
                part.groups = _integer(name, "groups", part.groups, share)
        groups = 1 if linear else part.groups
        _truncate(part, "weight", getattr(part, fan_out), getattr(part, fan_in) // groups)
        _truncate(part, "bias", getattr(part, fan_out))
    return network


def _integer(name: str, what: str, count: int, share: float) -> int:
    """The integer share · count."""
    product = round(share * count)
    if product < 1 or abs(product - share * count) > 1e-6:
        raise ConfigError(
            f"personal 'width_slice' cannot take {share:g} of the {count} {what} of {name!r}: "
            "this must be a whole number of at least 1."
        )
    return product


def _truncate(part: nn.Module, name: str, *sizes: int) -> None:
    """Keep the first rows, and columns, of a parameter."""
    old = getattr(part, name)
    if old is not None:
        with torch.no_grad():
            values = old[tuple(slice(size) for size in sizes)].clone()
        setattr(part, name, nn.Parameter(values, requires_grad=old.requires_grad))
