"""FedSA-LoRA: one factor of low-rank adapters is private."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedloom.core.parts import Personal


@dataclass(frozen=True)
class PrivateLora(Personal):
    """A layer with a low-rank adapter computes Wx + (α/r)BAx; W is constant, A is shared and B stays at the client.

    Everything else that is trained, such as the head, is shared. Both factors are trained together. Guo et al., ICLR
    2025 (FedSA-LoRA), who find that A learns what clients have in common and B what is specific to each.

    Args:
        factor: the private factor; ``both`` keeps the whole adapter at the client.

    >>> [PrivateLora().is_private(f"q.lora_{factor}.default.weight", nn.Identity()) for factor in "AB"]
    [False, True]
    """

    factor: Literal["A", "B", "both"] = "B"

    citation = "guo2025fedsalora"

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter belongs to the private factor of an adapter."""
        return any(f".lora_{factor}." in name for factor in ("AB" if self.factor == "both" else self.factor))
