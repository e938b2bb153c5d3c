"""The hooks of parts, which of them a part overrides, and whether its declarations are what they should be."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache

from fedloom.base.errors import ConfigError, closest, user_stacklevel
from fedloom.core.needs import Needs
from fedloom.core.parts import Part, Reduce

HOOKS = (
    "init_server", "broadcast", "init_client", "begin", "start", "lessons", "lesson", "point", "on_step", "loss",
    "probe", "grad", "prox", "end", "send", "after_send", "receive", "combine", "correct", "step", "refine", "between",
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
    return frozenset(
        [name for name, function in methods.items() if callable(function) and function.__module__ != Part.__module__]
    )


def check_declarations(who: str, part: Part) -> None:
    """Raise a ``ConfigError`` about ``who`` if a part's declarations do not have the types that ``Part`` states."""
    if not isinstance(part.needs, Needs):
        raise ConfigError(f"{who}: needs is {part.needs!r:.60}, but it must be Needs(...), like Needs(twin=True).")
    for name in ("downloads", "boundable", "mixed"):
        names = getattr(part, name)
        if not (isinstance(names, tuple | list) and all(isinstance(entry, str) for entry in names)):
            text = f"{names!r:.60}"
            raise ConfigError(f"{who}: {name} is {text}, but it must be a tuple of names, like ('momentum',).")
    if part.common and Reduce.MIX in part.uploads.values():
        raise ConfigError(
            f"{who} is common to several models, between which coefficients p do not compare; reduce its uploads by "
            "another rule than MIX, like Reduce.MEAN."
        )
    for name, fits, example in (
        ("uploads", lambda value: isinstance(value, Reduce), "Reduce.MEAN"),
        ("update_statistics", callable, "torch.norm"),
    ):
        mapping = getattr(part, name)
        if not (isinstance(mapping, Mapping) and all(isinstance(k, str) and fits(v) for k, v in mapping.items())):
            raise ConfigError(
                f"{who}: {name} is {mapping!r:.60}, but it must map names, like {{'control': {example}}}."
            )
    if overrides(part, "lessons") and not part.needs.model:
        raise ConfigError(
            f"{who} takes steps on other inputs than the client's samples; declare needs = Needs(model='evaluated')."
        )
    _check_names(who, part)


def _check_names(who: str, part: Part) -> None:
    """Name methods of a part that are almost hooks: an error if it overrides no hook at all, else a warning."""
    kinds = type(part).__mro__
    bases = [kind for kind in kinds if kind.__module__ == Part.__module__]
    contract = {name for kind in bases for name in vars(kind) if not name.startswith("_")}
    attributes = {name: value for kind in kinds if kind not in (*bases, object) for name, value in vars(kind).items()}
    missing, works = contract - attributes.keys(), bool(contract & attributes.keys())
    for name, value in attributes.items():
        if name in contract or name.startswith("_") or not callable(value):
            continue
        if not (close := closest(name, missing, alike=0.75 if works else 0.6)):
            continue
        if not works:
            raise ConfigError(f"{who} does nothing: it has no hook {name!r}; did you mean {close!r}?")
        helper = f"if it is a method of your own, call it {'_' + name!r}"
        warnings.warn(
            f"{who}: {name!r} is not a hook; did you mean {close!r}? Otherwise, {helper}.", stacklevel=user_stacklevel()
        )
