"""How the server reduces the slices that clients upload."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor


class Reduce(Enum):
    """How the server reduces a slice that every client of the cohort uploads.

    Whole numbers and truth values are converted to the model's type first, except by ``ALL``, which keeps their type.
    """

    MIX = "mix"  # Σ p_i x_i with the mixing coefficients p
    MEAN = "mean"  # (1/|S|) Σ x_i
    SUM = "sum"  # Σ x_i
    SHARE = "share"  # (1/K) Σ_{i in S} x_i: the cohort's share of a mean over all K clients
    ALL = "all"  # every client's slice, stacked [|S|, ...]; the only one that cannot be streamed


class Reduced(NamedTuple):
    """A slice reduced over the cohort, at the server, and how it was reduced."""

    value: Tensor
    how: Reduce
