"""Clients with networks of different architecture, of which each trains one from a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.core.method import Method
from fedloom.core.parts import Personal, Use
from fedloom.core.ranges import Count, NonNegativeInt
from fedloom.core.slots import label
from fedloom.core.tree import Tree
from fedloom.parts.personal.private import LocalOnly


@dataclass(frozen=True)
class Architectures(Personal):
    """Groups of clients with a network of their own each, whose parameters are averaged within the group.

    ::

        θ_g ← θ_g - Σ_{i∈S∩g} p_i Δ_i / Σ_{i∈S∩g} p_i           for every group g that takes part in the round

    Without another part that is as many federations as networks. What clients of all groups exchange has the same shape
    whatever the network: class means of features (FedProto), outputs by class (federated distillation). The model of
    the run is a list of networks (``fl.run(method, federation, [...])``, or ``model=several``).

    Args:
        count: number of networks.
        members: the network of each client, by its number; () deals them in turn.

    Raises:
        ConfigError: if a client's network is none of them.
    """

    count: Count = 2
    members: tuple[NonNegativeInt, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members and max(self.members) >= self.count:
            raise ConfigError(
                f"personal: members names network {max(self.members)}, but there are {self.count}, numbered from 0."
            )

    @property
    def levels(self) -> tuple[str, ...]:
        """Named by their numbers."""
        return tuple(f"network_{number}" for number in range(self.count))

    def whole(self, model: nn.Module) -> nn.Module:
        """The list of networks."""
        networks = getattr(model, "networks", None)
        if not isinstance(networks, nn.ModuleList) or len(networks) != self.count:
            has = len(networks) if isinstance(networks, nn.ModuleList) else 1
            raise ConfigError(
                f"personal: clients have {self.count} networks to choose from, but the model has {has}; give a list of "
                "models, or model=several with as many names."
            )
        return model

    def network(self, whole: nn.Module, level: int) -> nn.Module:
        """The network of a group."""
        return whole.get_submodule(f"networks.{level}")

    def uses(self, client: int, own: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """The network of the client's group."""
        if not self.members:
            return (Use(client % self.count),)
        if client >= len(self.members):
            raise ConfigError(
                f"personal: members names the networks of {len(self.members)} clients, but there are more."
            )
        return (Use(self.members[client]),)


@dataclass(frozen=True)
class OwnArchitectures(Architectures):
    """Clients of different architecture, each of which keeps all parameters of its network.

    Args:
        count: number of networks.
        members: the network of each client, by its number; () deals them in turn.
    """

    def is_private(self, name: str, owner: nn.Module) -> bool:
        return True


def for_networks(method: Method, count: int) -> Method:
    """The method for clients that train one of so many networks each, unless it says itself which.

    Parameters that a method keeps at its clients stay there; those that it averages are averaged within a group.

    Raises:
        ConfigError: if its personal part splits or doubles a model.
    """
    personal = method.personal
    if isinstance(personal, Architectures):
        return method
    if type(personal) is LocalOnly:
        return replace(method, personal=OwnArchitectures(count))
    if personal.is_identity:
        return replace(method, personal=Architectures(count))
    raise ConfigError(
        f"with a list of models every client trains one whole network, but personal {label(personal)!r} splits "
        "or doubles it; choose a method that averages whole models, or one like fedproto that keeps them."
    )
