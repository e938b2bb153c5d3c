"""The hooks of parts, and which of them a part overrides."""

from __future__ import annotations

from functools import cache

from fedloom.core.parts import Part

HOOKS = (
    "init_server", "init_client", "begin", "start", "lessons", "lesson", "point", "on_step", "loss", "probe", "grad",
    "prox", "end", "send", "after_send", "receive", "combine", "correct", "step", "refine", "between",
)  # fmt: skip


def overrides(part: Part, hook: str) -> bool:
    """Whether a part overrides the given hook, so that the others can be skipped.

    >>> from fedloom.core.parts import Drift
    >>> overrides(Drift(), "grad")
    False
    """
    return hook in overridden(type(part))


@cache
def overridden(kind: type[Part]) -> frozenset[str]:
    """The hooks and other methods that a kind of part has from elsewhere than the base classes."""
    # a setting may share its name with another slot's hook
    methods = {name: getattr(kind, name) for name in dir(kind) if name[0] != "_"}
    return frozenset([name for name, own in methods.items() if callable(own) and own.__module__ != Part.__module__])
