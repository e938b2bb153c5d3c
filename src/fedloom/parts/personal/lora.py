"""FedSA-LoRA: one factor of low-rank adapters is private."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedloom.core.parts import Personal
from fedloom.core.slots import personals


@personals.register(name="private_lora")
@dataclass(frozen=True)
class PrivateLora(Personal):
    """A layer with a low-rank adapter computes Wx + (α/r)BAx; W is constant, A is shared and B stays at the client.

    Everything else that is trained, such as the head, is shared. Both factors are trained together. Guo et al., ICLR
    2025 (FedSA-LoRA), who find that A learns what clients have in common and B what is specific to each.

    Args:
        factor: the private factor; ``both`` keeps the whole adapter at the client.

    >>> [name for name in ("q.lora_A.default.weight", "q.lora_B.default.weight") if PrivateLora().private(name)]
    ['q.lora_B.default.weight']
    """

    factor: Literal["A", "B", "both"] = "B"

    citation = "guo2025fedsalora"

    def private(self, name: str) -> bool:
        """Whether the parameter belongs to the private factor of an adapter."""
        return any(f".lora_{factor}." in name for factor in ("AB" if self.factor == "both" else self.factor))
