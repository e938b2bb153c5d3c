"""Arithmetic on trees: ``dict[str, Tensor]``, the one shape in which state, updates and messages travel.

A tree's keys are parameter *groups* (usually just ``"shared"``), each one flat vector, so that most operations are one
call on one tensor; nothing here depends on that, and trees of named tensors work as well. A trailing underscore marks
functions that write into their first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def zeros_like(tree: Mapping[str, Tensor]) -> Tree:
    """A tree of zeros of the same shapes."""
    return {k: torch.zeros_like(v) for k, v in tree.items()}


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """A copy that shares no memory with its source."""
    return {k: v.clone() for k, v in tree.items()}


def transform(f: Callable[..., Tensor], tree: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> Tree:
    """Apply ``f`` leaf by leaf.

    >>> transform(torch.add, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    {'a': tensor([2.])}
    """
    return {k: f(v, *(o[k] for o in others)) for k, v in tree.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float | Tensor = 1.0) -> Tree:
    """A + alpha b."""
    return {k: v + alpha * b[k] for k, v in a.items()}


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """A - b."""
    return {k: v - b[k] for k, v in a.items()}


def scale(a: Mapping[str, Tensor], alpha: float | Tensor) -> Tree:
    """Alpha a."""
    return {k: alpha * v for k, v in a.items()}


def axpy_(y: Tensor, alpha: float | Tensor, x: Tensor) -> Tensor:
    """Y <- y + alpha x, in place, for a number or (under vmap) a scalar tensor alpha."""
    return y.add_(alpha * x) if isinstance(alpha, Tensor) else y.add_(x, alpha=alpha)


def add_(a: Tree, b: Mapping[str, Tensor], alpha: float | Tensor = 1.0) -> Tree:
    """A <- a + alpha b, in place."""
    for k, v in a.items():
        axpy_(v, alpha, b[k])
    return a


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The inner product of the two trees, each read as one vector (a scalar; zero for empty trees)."""
    return sum((torch.sum(v * b[k]) for k, v in a.items()), torch.zeros(()))


def squared_norm(a: Mapping[str, Tensor]) -> Tensor:
    """The squared Euclidean norm of the tree, read as one vector (a scalar)."""
    return dot(a, a)


def finite(tree: Mapping[str, Tensor]) -> bool:
    """Whether every number in the tree is finite.

    A sum is finite only if every term is, so one reduction decides all but the rare overflow of a finite tree.

    >>> finite({"a": torch.tensor([1.0, float("nan")])}), finite({"a": torch.tensor([3e38, 3e38])})
    (False, True)
    """
    return all(bool(torch.isfinite(v.sum())) or bool(torch.isfinite(v).all()) for v in tree.values())


def count(tree: Mapping[str, Tensor]) -> int:
    """Number of scalars in the tree."""
    return sum(v.numel() for v in tree.values())


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """Number of bytes of the tree's tensors."""
    return sum(v.numel() * v.element_size() for v in tree.values())
