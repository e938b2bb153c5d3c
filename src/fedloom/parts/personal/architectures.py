"""Clients with different architectures: each trains one network of a list."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegativeInt
from fedloom.base.tree import Tree
from fedloom.core.method import Method
from fedloom.core.parts import Personal, Use
from fedloom.core.slots import label
from fedloom.parts.personal.private import LocalOnly, PrivateBody


@dataclass(frozen=True)
class Architectures(Personal):
    """Groups of clients with a network of their own each, averaged within the group, batch statistics included.

    ::

        θ_g ← θ_g - Σ_{i∈S∩g} p_i Δ_i / Σ_{i∈S∩g} p_i           for every group g that takes part in the round

    Without another part these are separate federations. What clients of all groups exchange has the same shape
    whatever the network: class means of features (FedProto), outputs by class (federated distillation). The model of
    the run is a list of networks (``fl.run(method, federation, [...])``, or ``model=several``).

    Args:
        count: number of networks.
        members: the network of each client, by its number; () deals them as ``by`` says.
        by: ``turn``, one after the other; ``speed`` or ``memory``, by the clients' devices, to equal numbers of
            clients: the first network to the slowest or smallest devices, the last to the fastest or largest.

    Raises:
        ConfigError: if a client's network is none of them.
    """

    count: Count = 2
    members: tuple[NonNegativeInt, ...] = ()
    by: Literal["turn", "speed", "memory"] = "turn"

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

    def server_network(self, model: nn.Module) -> nn.Module:
        """The list of networks."""
        networks = getattr(model, "networks", None)
        if not isinstance(networks, nn.ModuleList) or len(networks) != self.count:
            count = len(networks) if isinstance(networks, nn.ModuleList) else 1
            raise ConfigError(
                f"personal: clients have {self.count} networks to choose from, but the model has {count}; give a list "
                "of models, or model=several with as many names."
            )
        return model

    def network(self, server_network: nn.Module, level: int) -> nn.Module:
        """The network of a group."""
        return server_network.get_submodule(f"networks.{level}")

    def uses(self, client: int, load_state: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """The network of the client's group."""
        if not self.members:
            return (Use(client % self.count),)
        if client >= len(self.members):
            raise ConfigError(
                f"personal: members names the networks of {len(self.members)} clients, but there are more; "
                "name one for each."
            )
        return (Use(self.members[client]),)


@dataclass(frozen=True)
class OwnArchitectures(Architectures):
    """Clients of different architecture, each of which keeps all parameters of its network.

    Args:
        by: see ``architectures``.
    """

    def is_private(self, name: str, owner: nn.Module) -> bool:
        return True


@dataclass(frozen=True)
class OwnBodies(Architectures):
    """Clients of different architecture, each of which keeps its body; all share one head.

    ::

        h ← h - Σ_{i∈S} p_i Δ_i                    over the clients of all groups

    All networks have a module ``head`` with parameters of the same shapes; the shared head is that of the first
    network, and the heads of the others are not used. With equal networks it is ``private_body``.

    Args:
        by: see ``architectures``.

    Raises:
        ConfigError: if the heads differ.
    """

    def network(self, server_network: nn.Module, level: int) -> nn.Module:
        """The network of a group, with the head of the first."""
        first, network = super().network(server_network, 0), super().network(server_network, level)
        heads = [getattr(model, "head", None) for model in (first, network)]
        shapes = [isinstance(head, nn.Module) and [tuple(p.shape) for p in head.parameters()] for head in heads]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"personal 'own_bodies': all networks share one head, but that of network {level} has parameters of "
                f"the shapes {shapes[1] or []}, and that of network 0 {shapes[0] or []}; give all of them a module "
                "'head' for features of one length."
            )
        if not level:
            return network
        network = copy.deepcopy(network)
        network.head = first.head
        return network

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter does not belong to the shared head."""
        return not name.startswith(("networks.0.head.", "head."))


class NetworkPair(nn.Module):
    """A network of the client's own beside the shared one; features and output are those of the client's own network.

    Args:
        shared: the shared network.
        own: the client's own.
        align: maps features of the shared network to those of the own one.
    """

    def __init__(self, shared: nn.Module, own: nn.Module, align: nn.Module) -> None:
        super().__init__()
        self.shared, self.own, self.align = shared, own, align

    def features(self, x: Tensor) -> Tensor:
        return self.own.features(x)  # pyright: ignore[reportCallIssue]

    @property
    def head(self) -> nn.Module:
        """The own network's head."""
        return self.own.head  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        """The own network's logits [B, C]."""
        return self.own(x)


class SharedFirst(nn.Module):
    """Networks of which the first is shared; the output is the shared network's."""

    def __init__(self, networks: nn.ModuleList, align: nn.ModuleList) -> None:
        super().__init__()
        self.networks, self.align = networks, align

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of the shared network."""
        return self.networks[0](x)


@dataclass(frozen=True)
class OwnNetwork(Architectures):
    """A network of the client's own, of any architecture, beside a shared one; both are trained, the own one deployed.

    ::

        θ ← θ - Σ_{i∈S} p_i Δ_i                    of the shared network alone; own networks never leave their clients

    Of a list of models the first is shared, and the others are the clients' own; of a single model the own network is a
    copy. What ties the two is a term of the objective that trains both, like ``mutual``. A client that never
    participated deploys its own network as it starts.

    Args:
        count: number of architectures of own networks.
        members: the own network of each client, by its number; () deals them as ``by`` says.
        by: see ``architectures``.
        align: a linear map from the shared network's features to those of the own one, kept and trained at the client.

    Raises:
        ConfigError: if a client's network is none of them.
    """

    count: Count = 1
    align: bool = False

    def server_network(self, model: nn.Module) -> nn.Module:
        """The shared network and the own ones."""
        networks = getattr(model, "networks", None)
        if networks is None:
            networks = nn.ModuleList([model, copy.deepcopy(model)])
        if len(networks) != self.count + 1:
            raise ConfigError(
                f"personal 'own_network': a shared network and {self.count} of the clients' own are "
                f"{self.count + 1} models, but there are {len(networks)}; list the shared one first."
            )
        maps = nn.ModuleList([_map(networks[0], network) if self.align else nn.Identity() for network in networks[1:]])
        return SharedFirst(networks, maps)

    def network(self, server_network: nn.Module, level: int) -> nn.Module:
        """The shared network with the own one of a group beside it."""
        names = "networks.0", f"networks.{level + 1}", f"align.{level}"
        return NetworkPair(*map(server_network.get_submodule, names))

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter is one of an own network, or of a map to its features."""
        return name.startswith(("networks.", "own.", "align.")) and not name.startswith("networks.0.")


def _map(shared: nn.Module, private: nn.Module) -> nn.Linear:
    """A map from the shared network's features to the private one's, at first the identity, truncated or padded."""
    lengths = [getattr(getattr(network, "head", None), "in_features", None) for network in (shared, private)]
    if None in lengths:
        raise ConfigError(
            "personal 'own_network' aligns the features before linear heads, but a network has no such 'head'; set "
            "align=false, or give it one."
        )
    layer = nn.Linear(*lengths, bias=False, dtype=next(private.parameters()).dtype)  # pyright: ignore
    nn.init.eye_(layer.weight)
    return layer


def for_networks(method: Method, count: int) -> Method:
    """The method for clients that each train one of ``count`` networks; one that assigns networks itself is unchanged.

    Parameters that a method keeps at its clients stay there; those that it averages are averaged within a group, but
    the head over all groups if the bodies are kept.
    """
    personal, parts = method.personal, {Personal: Architectures, LocalOnly: OwnArchitectures, PrivateBody: OwnBodies}
    if isinstance(personal, OwnNetwork):
        return replace(method, personal=replace(personal, count=count - 1))
    if isinstance(personal, Architectures):
        return method
    if part := parts.get(type(personal)):
        return replace(method, personal=part(count))
    raise ConfigError(
        f"with a list of models every client trains one whole network, but personal {label(personal)!r} splits "
        "or doubles it; choose a method that averages whole models, or one like fedproto that keeps them."
    )
