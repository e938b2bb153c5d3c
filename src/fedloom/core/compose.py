"""Methods from plain settings: a preset, with parts replaced or changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from fedloom.base.errors import ConfigError, nearest
from fedloom.base.registry import Entry, Registry
from fedloom.base.settings import from_plain, to_plain, validate
from fedloom.core.method import Method
from fedloom.core.parts import Part
from fedloom.core.slots import SEVERAL, SLOTS, label


def resolve_method(methods: Registry[Method], raw: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a method as plain data, including those of every part that was replaced or changed.

    Args:
        methods: the presets.
        raw: ``name``, settings of the preset, and for each slot a mapping with a part's ``name`` and settings. For
            the objective, ``name`` lists all terms, and settings are given in one mapping per term.

    Raises:
        ConfigError: for unknown names or settings, values of the wrong type, and settings of the preset that are
            overridden by settings of its parts.
    """
    entry = methods[raw["name"]]
    preset_values = {key: value for key, value in raw.items() if key != "name" and key not in SLOTS}
    for key in preset_values:
        if key not in entry.parameters:
            what = f"method {entry.name!r}"
            raise ConfigError(
                f"{what} has no setting or slot {key!r}; {nearest(key, [*entry.parameters, *SLOTS], what)}"
            )
    settings = {"name": entry.name, **validate(f"method {entry.name!r}", "method.", entry.parameters, preset_values)}
    preset, parts = _preset(methods, settings), {slot: raw[slot] for slot in SLOTS if raw.get(slot)}
    resolved = settings | {
        slot: (_terms if slot in SEVERAL else _part)(preset, slot, preset_values)
        for slot, preset_values in parts.items()
    }
    for key in preset_values if parts else ():
        usual = _preset(methods, {name: value for name, value in settings.items() if name != key})
        if _is_lost(usual, preset, compose(methods, resolved)):
            which = " and ".join(f"method.{slot}" for slot in parts)
            raise ConfigError(f"method.{key} has no effect beside {which}; leave one of them out.")
    return resolved


def _is_lost(usual: Method, preset: Method, method: Method) -> bool:
    """Whether the composed method has kept nothing of what distinguishes the preset from the usual one."""
    was, now, left = (
        {(owner, name): getattr(part, name) for part in candidate.parts.values() for name, owner in _owners(type(part))}
        for candidate in (usual, preset, method)
    )
    changed = [key for key, value in now.items() if was.get(key) != value]
    return bool(changed) and all(key not in left or left[key] != now[key] for key in changed)


def _owners(kind: Any) -> Iterator[tuple[str, type]]:
    """The settings of a kind of parts, with the class that has introduced each: parts of a family share those."""
    for name in getattr(kind, "__dataclass_fields__", ()):
        yield name, next(base for base in reversed(kind.__mro__) if name in getattr(base, "__dataclass_fields__", ()))


def compose(methods: Registry[Method], resolved: Mapping[str, Any]) -> Method:
    """The method for resolved settings, named after the preset and the parts replaced in it.

    >>> from fedloom.methods import methods
    >>> compose(methods, resolve_method(methods, {"name": "feddyn", "mixing": {"name": "by_samples"}})).name
    'feddyn+by_samples'
    >>> compose(methods, resolve_method(methods, {"name": "feddyn", "drift": {"name": "none"}})).name
    'feddyn-dynamic'
    """
    preset = _preset(methods, resolved)
    parts: dict[str, Any] = {}
    for slot in (slot for slot in SLOTS if slot in resolved):
        setting = resolved[slot]
        if slot in SEVERAL:
            parts[slot] = tuple(_make(SLOTS[slot][term], settings) for term, settings in setting.items())
        else:
            parts[slot] = _make(SLOTS[slot][setting["name"]], {k: v for k, v in setting.items() if k != "name"})
    return rename(methods, replace(preset, **parts)) if parts else preset


def rename(methods: Registry[Method], method: Method) -> Method:
    """The method with a name that lists its changed parts (``Method.changes``); a user's own name is kept."""
    name, *changes = re.split(r"(?=[+-])", method.name)
    if name not in methods:
        return method
    preset = methods.make(name)
    if changes:
        preset_labels = {"pooled", *map(label, preset.parts.values())}
        part_labels = {
            "pooled",
            *map(label, method.objective),
            *(part for slot in SLOTS.values() for part in slot.names()),
        }
        if any(change[1:] not in (preset_labels if change[0] == "-" else part_labels) for change in changes):
            return method  # no change of the preset is called so
    name += method.changes(preset)
    return method if name == method.name else replace(method, name=name)


def _preset(methods: Registry[Method], resolved: Mapping[str, Any]) -> Method:
    return _make(methods[resolved["name"]], {k: v for k, v in resolved.items() if k != "name" and k not in SLOTS})


def _make(entry: Entry[Any], values: Mapping[str, Any]) -> Any:
    return entry.make(**from_plain(entry.parameters, values))


def _part(preset: Method, slot: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """A slot's part with all its settings; if the preset's part stays, its settings are the defaults."""
    part: Part = getattr(preset, slot)
    values = {key: value for key, value in raw.items() if key != "name"}
    if "name" not in raw and part.is_identity:
        raise ConfigError(
            f"{slot} of method {preset.name!r} is {label(part)!r}, which has no setting {next(iter(values))!r}; "
            f"choose a part first, with method.{slot}=…."
        )
    entry = SLOTS[slot][raw.get("name", label(part))]
    return {"name": entry.name, **_settings(entry, part, f"method.{slot}.", values)}


def _terms(preset: Method, slot: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a slot that holds several, such as the objective's terms, by name, each with all its settings."""
    registry, terms = SLOTS[slot], {label(term): term for term in getattr(preset, slot)}
    settings = {term: values for term, values in raw.items() if term != "name"}
    names = raw.get("name", [*terms, *(term for term in settings if term not in registry)])  # unknown: raises below
    for term in settings:
        if term not in names:
            raise ConfigError(
                f"the {slot} of method {preset.name!r} has no part {term!r}; add it with "
                f"method.{slot}=[{', '.join([*terms, term])}]."
            )
    if not names and slot == "objective":
        raise ConfigError("method.objective is empty; it needs a term with a loss on the data, like cross_entropy.")
    return {
        term: _settings(registry[term], terms.get(term), f"method.{slot}.{term}.", settings.get(term, {}))
        for term in names
    }


def _settings(entry: Entry[Any], part: Part | None, prefix: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a part; those that the preset's part has from the same class are set as the preset does."""
    start, shared = {}, {*_owners(type(part))} & {*_owners(entry.factory)}
    for field in fields(part) if shared else ():  # pyright: ignore[reportArgumentType]
        if field.init and field.name in entry.parameters and field.name in dict(shared):
            try:
                value = to_plain(getattr(part, field.name))
            except TypeError:  # an object that plain data cannot express
                continue
            if value != field.default:  # else another part has its own default
                start[field.name] = value
    return validate(f"{entry.kind} {entry.name!r}", prefix, entry.parameters, {**start, **raw})
