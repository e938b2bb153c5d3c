"""Parameters that are never communicated: all of them, the head, or the body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.core.parts import Personal


@dataclass(frozen=True)
class LocalOnly(Personal):
    """All parameters are private: every client trains alone and nothing is sent."""

    def is_private(self, name: str, owner: nn.Module) -> bool:
        return True


@dataclass(frozen=True)
class Reinitialised(Personal):
    """All parameters are private and discarded after the round; each round starts from a new random initialisation.

    For methods that communicate something other than models, such as FedEvg's synthetic samples.
    """

    def private_start(
        self, received: Tensor, initial: Tensor, private: Tensor | None, initialise: Callable[[], Tensor]
    ) -> Tensor:
        return initialise()

    def is_private(self, name: str, owner: nn.Module) -> bool:
        return True


@dataclass(frozen=True)
class PrivateHead(Personal):
    """The body is shared, the head private; both are trained together. Arivazhagan et al. 2019 (FedPer)."""

    citation = "arivazhagan2019fedper"

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter belongs to the model's ``head``."""
        return name.startswith("head.")


@dataclass(frozen=True)
class PrivateBody(Personal):
    """The head is shared, the body private. Liang et al. 2020 (LG-FedAvg)."""

    citation = "liang2020lgfedavg"

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter belongs to the body."""
        return not name.startswith("head.")
