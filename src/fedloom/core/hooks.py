"""The hooks of parts, and which of them a part overrides."""

from __future__ import annotations

from functools import cache

from fedloom.core.parts import Part

HOOKS = (
    "init_server", "init_client", "begin", "start", "on_step", "loss", "grad", "prox", "end",
    "send", "after_send", "receive", "combine", "correct", "step", "refine",
)  # fmt: skip


def overrides(part: Part, hook: str) -> bool:
    """Whether a part overrides the given hook, so that the others can be skipped.

    >>> from fedloom.core.parts import Drift
    >>> overrides(Drift(), "grad")
    False
    """
    return _overrides(type(part), hook)


@cache
def overridden(kind: type[Part]) -> frozenset[str]:
    """The hooks that a kind of part overrides."""
    return frozenset(hook for hook in HOOKS if _overrides(kind, hook))


@cache
def _overrides(kind: type[Part], hook: str) -> bool:
    own = getattr(kind, hook, None)  # a setting may share its name with another slot's hook
    return callable(own) and own.__module__ != Part.__module__
