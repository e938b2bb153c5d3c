"""What the hooks of parts return, checked: what does not fit is refused in one sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tree


def tensors(made: object, hook: str) -> Tree:
    """The tree that a part's hook returned.

    >>> tensors({"visits": 0}, "drift.init_client")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: drift.init_client returned 'visits' as int; states hold tensors, by name.

    Raises:
        ConfigError: if it holds anything but tensors.
    """
    if not isinstance(made, dict):
        raise ConfigError(f"{hook} returned {told(made)}; a state is a dict of tensors, by name, or {{}}.")
    for name, value in made.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"{hook} returned {name!r} as {type(value).__name__}; states hold tensors, by name.")
    return made


def copied(made: Tree, hook: str) -> Tree:
    """The same tree in memory of its own: a hook may return a tensor of the model or of the message."""
    plain = torch.contiguous_format
    return {name: value.detach().clone(memory_format=plain) for name, value in tensors(made, hook).items()}


def told(made: object) -> str:
    """What was returned, in words.

    >>> told(None), told(torch.zeros(2)), told((1, 2, 3))
    ('None', 'a Tensor', 'a tuple of 3')
    """
    if made is None:
        return "None"
    kind = f"a {type(made).__name__}"
    return f"{kind} of {len(made)}" if isinstance(made, tuple | list) else kind
