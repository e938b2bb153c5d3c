"""How metrics read numbers: one-dimensional float64, with the better direction said by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.errors import ConfigError

Values: TypeAlias = Sequence[float] | NDArray[np.floating] | NDArray[np.integer] | Tensor
Direction: TypeAlias = Literal["max", "min"]
"""``max`` when a higher value is better (accuracy), ``min`` when a lower one is (loss)."""


def vector(values: Values) -> NDArray[np.float64]:
    """The values as a float64 vector of their own.

    >>> vector([1, None, 3.5])
    array([1. , nan, 3.5])
    """
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.array(values, dtype=np.float64).reshape(-1)


def sign(direction: str) -> float:
    """1 when higher is better and -1 when lower is, so that ``sign * value`` is to be maximised.

    Raises:
        ConfigError: for another direction.

    >>> sign("max"), sign("min")
    (1.0, -1.0)
    """
    if direction not in ("max", "min"):
        raise ConfigError(f"a metric's direction is 'max' (higher is better) or 'min', not {direction!r}.")
    return 1.0 if direction == "max" else -1.0
