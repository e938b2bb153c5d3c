"""Several networks of different architecture as one module, of which each client trains one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.classifier import models


class Several(nn.Module):
    """A list of networks for the same inputs and outputs; the output is that of the first.

    Args:
        networks: the networks.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    @classmethod
    def of(cls, factories: Sequence[Callable[[], nn.Module]]) -> Several:
        """The networks of factories."""
        return cls([make() for make in factories])

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of the first network."""
        return self.networks[0](x)


@models.register
def several(classes: int, inputs: tuple[int, ...], names: tuple[str, ...] = ("mlp", "logistic")) -> nn.Module:
    """Networks of different architecture for different clients (personal ``architectures``, ``own_architectures``).

    Args:
        classes: number of classes.
        inputs: shape of one sample.
        names: names of other models, each with its default settings.

    Raises:
        ConfigError: if one of them is no classifier of such samples.
    """
    known = {"classes": classes, "inputs": inputs}
    networks = []
    for name in names:
        if name == "several":
            raise ConfigError("model 'several' cannot hold itself; name other models.")
        networks.append(
            models.make(name, **{key: value for key, value in known.items() if key in models[name].parameters})
        )
    if not networks:
        raise ConfigError("model 'several' needs the names of at least one other model.")
    return Several(networks)
