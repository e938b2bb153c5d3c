"""Weightings: factors of clients' shares beside the mixing coefficients, which need not sum to 1."""

from typing import TYPE_CHECKING

from fedloom.core.slots import weightings

if TYPE_CHECKING:
    from fedloom.parts.weighting.inverse_probability import InverseProbability
    from fedloom.parts.weighting.staleness import Staleness

__all__ = ["InverseProbability", "Staleness", "make"]

make = weightings.make
__getattr__ = weightings.lazily(
    __name__, {"staleness": "staleness.Staleness", "inverse_probability": "inverse_probability.InverseProbability"}
)
