"""A method from its settings: a preset, and the parts that replace its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fedloom.core.errors import ConfigError
from fedloom.core.method import Method
from fedloom.core.parts import Part
from fedloom.core.registry import Entry
from fedloom.core.renamed import hint
from fedloom.core.slots import SLOTS, label, objectives
from fedloom.experiment.config.values import plain, settings, typed
from fedloom.methods import methods


def resolve_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a method as plain data: the preset's own, and those of each part that was replaced or changed.

    >>> resolve_method({"name": "feddyn", "mixing": {"name": "by_samples"}})
    {'name': 'feddyn', 'alpha': 0.01, 'size_weighted': True, 'mixing': {'name': 'by_samples'}}

    Raises:
        ConfigError: for unknown names and settings, and wrong types.
    """
    entry = methods[given["name"]]
    own = {key: value for key, value in given.items() if key != "name" and key not in SLOTS}
    for key in own:
        if key not in entry.parameters:
            what = f"method {entry.name!r}"
            raise ConfigError(f"{what} has no setting or slot {key!r}; {hint(what, key, [*entry.parameters, *SLOTS])}")
    resolved: dict[str, Any] = {"name": entry.name}
    resolved |= settings(f"method {entry.name!r}", "method.", entry.factory, entry.parameters, own)
    preset = _preset(resolved)
    for slot in SLOTS:
        if slot == "objective" and slot in given:
            resolved[slot] = _objective(preset, given[slot])
        elif given.get(slot):
            resolved[slot] = _slot(preset, slot, given[slot])
    return resolved


def make_method(resolved: Mapping[str, Any]) -> Method:
    """The method of resolved settings, named after the preset and what was replaced in it.

    >>> make_method(resolve_method({"name": "feddyn", "mixing": {"name": "by_samples"}})).name
    'feddyn+by_samples'
    >>> make_method(resolve_method({"name": "feddyn", "drift": {"name": "none"}})).name
    'feddyn-dynamic'

    Raises:
        ConfigError: if parts are incompatible or settings impossible.
    """
    preset = _preset(resolved)
    parts: dict[str, Any] = {}
    name = preset.name
    for slot, registry in SLOTS.items():
        if slot not in resolved:
            continue
        if slot == "objective":
            parts[slot] = tuple(_part(objectives[term], given) for term, given in resolved[slot].items())
            before, after = [label(term) for term in preset.objective], list(resolved[slot])
            name += "".join(f"-{term}" for term in before if term not in after)
            name += "".join(f"+{term}" for term in after if term not in before)
            continue
        chosen = resolved[slot]["name"]
        parts[slot] = part = _part(registry[chosen], {k: v for k, v in resolved[slot].items() if k != "name"})
        before = label(getattr(preset, slot))
        if chosen != before:
            nothing = part.is_identity and chosen == "none"
            name += f"-{before}" if nothing else f"+{chosen}"
    return replace(preset, name=name, **parts) if parts else preset


def _preset(resolved: Mapping[str, Any]) -> Method:
    entry = methods[resolved["name"]]
    own = {key: value for key, value in resolved.items() if key != "name" and key not in SLOTS}
    return entry.make(**typed(entry.parameters, own))


def _part(entry: Entry[Any], values: Mapping[str, Any]) -> Part:
    return entry.make(**typed(entry.parameters, values))


def _slot(preset: Method, slot: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A slot's part with all its settings; those of the preset's own part are where they start, if it stays."""
    own: Part = getattr(preset, slot)
    values = {key: value for key, value in given.items() if key != "name"}
    if "name" not in given and own.is_identity:
        raise ConfigError(
            f"{slot} of method {preset.name!r} is {label(own)!r}, which has no setting {next(iter(values))!r}; "
            f"choose a part first, with method.{slot}=…."
        )
    entry = SLOTS[slot][given.get("name", label(own))]
    return {"name": entry.name} | _settings(entry, own, f"method.{slot}.", values)


def _objective(preset: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """The objective's terms by name, each with all its settings."""
    own = {label(term): term for term in preset.objective}
    names = list(given["terms"]) if given["listed"] else list(own)
    for name in given["terms"]:
        if name not in names and name in objectives:
            both = ", ".join([*own, name])
            has = f"the objective of method {preset.name!r} has no term {name!r}"
            raise ConfigError(f"{has}; add it with method.objective=[{both}].")
    if not given["listed"]:
        names += [name for name in given["terms"] if name not in own]  # unknown ones, refused below
    if not names:
        raise ConfigError("method.objective is empty; it needs a term with a loss on the data, like cross_entropy.")
    resolved = {}
    for name in names:
        entry = objectives[name]
        resolved[name] = _settings(entry, own.get(name), f"method.objective.{name}.", given["terms"].get(name, {}))
    return resolved


def _settings(entry: Entry[Any], own: Part | None, prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    start = {}
    if type(own) is entry.factory:
        for field in fields(own):  # pyright: ignore[reportArgumentType]
            if field.init and field.name in entry.parameters and _is_plain(getattr(own, field.name)):
                start[field.name] = getattr(own, field.name)
    return settings(f"{entry.kind} {entry.name!r}", prefix, entry.factory, entry.parameters, {**start, **given})


def _is_plain(value: Any) -> bool:
    try:
        plain(value)
    except TypeError:
        return False
    return value is not inspect.Parameter.empty
