"""Weightings: factors of clients' shares beside the mixing coefficients, which need not sum to 1."""

from typing import TYPE_CHECKING

from fedloom.core.slots import weightings

if TYPE_CHECKING:
    from fedloom.parts.weighting.inverse_probability import InverseProbability as InverseProbability
    from fedloom.parts.weighting.staleness import Staleness as Staleness

make = weightings.make
__getattr__ = weightings.register_lazily(
    __name__,
    [
        "staleness.Staleness", "inverse_probability=inverse_probability.InverseProbability",
    ],
)  # fmt: skip
