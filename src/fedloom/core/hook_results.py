"""What the hooks of parts return, checked: what does not fit is refused in one sentence."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor

from fedloom.base.errors import ConfigError, in_words
from fedloom.base.tree import Tree


def tensors(result: object, hook: str) -> Tree:
    """The tree that a part's hook returned.

    >>> tensors({"visits": 0}, "drift.init_client")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: drift.init_client returned 'visits' as int; states hold tensors, by name.
    """
    if not isinstance(result, dict):
        raise ConfigError(f"{hook} returned {in_words(result)}; a state is a dict of tensors, by name, or {{}}.")
    for name, value in result.items():
        if not (isinstance(value, Tensor) and isinstance(name, str)):
            raise ConfigError(f"{hook} returned {name!r} as {type(value).__name__}; states hold tensors, by name.")
    return result


def in_own_memory(tree: Tree, hook: str, existing: Iterable[Tensor]) -> Tree:
    """The same tree in memory of its own: a hook may return one of the ``existing`` tensors of model and message.

    What it has computed is not copied.

    >>> theta, h = torch.zeros(2), torch.ones(2)
    >>> made = in_own_memory({"a": theta, "b": h, "c": h}, "drift.end", [theta])
    >>> [value.data_ptr() in (theta.data_ptr(), h.data_ptr()) for value in made.values()]
    [False, True, False]
    """
    plain, memories, result = torch.contiguous_format, {other.untyped_storage().data_ptr() for other in existing}, {}
    for name, value in tensors(tree, hook).items():
        value, memory = value.detach(), value.untyped_storage()
        is_separate = memory.nbytes() == value.nbytes and memory.data_ptr() not in memories and value.is_contiguous()
        memories.add(memory.data_ptr())
        result[name] = value if is_separate else value.clone(memory_format=plain)
    return result


def without_shared_storage(states: dict[str, Tree], *vectors: Tensor) -> dict[str, Tree]:
    """The states with copies of tensors that share memory with a vector or an earlier state, as files hold each once.

    >>> x = torch.zeros(2)
    >>> found = without_shared_storage({"drift": {"a": x, "b": x}}, torch.ones(2))["drift"]
    >>> found["a"] is x, found["b"] is x
    (True, False)
    """
    memories = {vector.untyped_storage().data_ptr() for vector in vectors}
    trees: dict[str, Tree] = {}
    for place, state in states.items():
        trees[place] = {}
        for name, value in state.items():
            memory = value.untyped_storage().data_ptr()
            trees[place][name] = value.clone() if memory in memories else value
            memories.add(memory)
    return trees


def pair(result: object, hook: str, second: str) -> tuple[Tree, Any]:
    """The pair that a server half returned: the part's new state, and a ``second`` that is not checked here.

    >>> pair(torch.zeros(3), "server 'own': step", "Δ")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: server 'own': step returned a Tensor of shape [3] instead of the pair (state, Δ).
    """
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise ConfigError(f"{hook} returned {in_words(result)} instead of the pair (state, {second}).")
    return tensors(result[0], hook), result[1]


def asking(result: object, hook: str) -> Generator[Any, Any, Any]:
    """The generator that a hook returned, which asks for gradients with ``yield``."""
    if not isinstance(result, Generator):
        raise ConfigError(f"{hook} returned {in_words(result)} instead of a generator: it has to have a yield.")
    return result


def like(value: object, other: Tensor, hook: str) -> Tensor:
    """The tensor that a hook returned, in the shape and the type of another one.

    >>> like(torch.zeros(2), torch.zeros(3), "server 'own': step")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: server 'own': step returned a tensor of the shape [2] instead of [3].
    """
    if not isinstance(value, Tensor):
        raise ConfigError(f"{hook} returned {in_words(value)} instead of a tensor of the shape {list(other.shape)}.")
    if value.shape != other.shape:
        raise ConfigError(f"{hook} returned a tensor of the shape {list(value.shape)} instead of {list(other.shape)}.")
    if value.dtype != other.dtype:
        raise ConfigError(f"{hook} returned a tensor of type {value.dtype} instead of {other.dtype}.")
    return value


def halves(result: object, hook: str, theta: Tensor) -> tuple[Tree, Tensor]:
    """The new state and the vector that a server half returned, for a model θ [P]."""
    state, vector = pair(result, hook, f"a tensor of the shape {list(theta.shape)}")
    return state, like(vector, theta, hook)
