"""Types of values: trees, ``dict[str, Tensor]``, of part states and uploaded slices, and shapes in annotations.

``Float[Tensor, "C P"]`` is a tensor [C, P] of floating-point numbers, in jaxtyping's syntax; ``"B ..."`` has any number
of further dimensions, and ``""`` none. A name of a dimension has one size in a call. Nothing is checked at run time;
the tests do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int
from typing import Annotated as Shaped

import torch
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Shaped", "Tree", "finite", "fresh_copy", "nbytes"]

Tree = dict[str, Tensor]


def finite(*trees: Mapping[str, Tensor]) -> bool:
    """Whether every number in the trees is finite.

    A sum is finite only if every term is, so one reduction suffices except for the rare overflow of finite numbers; a
    GPU is waited for once.

    >>> large = {"a": torch.tensor([3e38])}
    >>> finite({"a": torch.tensor([1.0, float("nan")])}), finite(large, large)
    (False, True)
    """
    values = [value for tree in trees for value in tree.values() if value.numel()]
    if not values:
        return True
    if len({value.device for value in values}) == 1:
        sums = [value.sum() for value in values]
        if torch.isfinite(sums[0] if len(sums) == 1 else torch.stack(sums).sum()):
            return True
    return all(bool(torch.isfinite(value).all()) for value in values)


def fresh_copy(t: Tensor, device: torch.device | str | None = None) -> Tensor:
    """A copy in freshly allocated memory: the summation order of some kernels depends on a tensor's alignment."""
    return torch.empty_like(t, device=device).copy_(t)


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """Total size of the tree's tensors in bytes."""
    return sum(v.numel() * v.element_size() for v in tree.values())
