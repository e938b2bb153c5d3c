"""Sections of a configuration: one value, a record of settings, or a choice by name with its settings.

A section brings every way of writing its settings into one form (``nest``), checks them (``validate``) and makes the
object that they describe (``instantiate``).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from fedloom.base.errors import ConfigError
from fedloom.base.registry import Registry
from fedloom.base.settings import (
    EMPTY,
    Parameters,
    convert,
    format_value,
    from_plain,
    signature,
    to_plain,
    validate,
)
from fedloom.core.compose import compose, resolve_method
from fedloom.core.method import Method


class Tree(dict[str, Any]):
    """Settings by name, of which some may be trees again; a plain mapping is a value."""


def merge(base: Tree, over: Tree) -> Tree:
    """One tree laid over another. Another ``name`` drops the settings of the one before.

    >>> before = Tree(name="feddyn", alpha=0.1)
    >>> merge(before, Tree(alpha=0.2)), merge(before, Tree(name="fedavg"))
    ({'name': 'feddyn', 'alpha': 0.2}, {'name': 'fedavg'})
    """
    if "name" in over and over["name"] != base.get("name", over["name"]):
        base = Tree()
    merged = Tree(base)
    for key, value in over.items():
        before = base.get(key)
        merged[key] = merge(before, value) if isinstance(value, Tree) and isinstance(before, Tree) else value
    return merged


class Section(ABC):
    """The part of a configuration below one key of the first level."""

    @property
    @abstractmethod
    def default(self) -> Any:
        """The default, in any form in which it may be written."""

    @abstractmethod
    def nest(self, key: str, rest: Sequence[str], value: Any) -> Any:
        """The tree that ``key.rest=value`` describes, or the value itself."""

    @abstractmethod
    def validate(self, key: str, raw: Any) -> Any:
        """All settings as plain data: those given, checked and converted, and the defaults of the others."""

    @abstractmethod
    def instantiate(self, values: Any, **fixed: Any) -> Any:
        """The object that validated settings describe; ``fixed`` are arguments that are not settings."""


@dataclass(frozen=True)
class Value(Section):
    """One value, a parameter of its owner."""

    owner: Callable[..., Any]
    parameter: inspect.Parameter

    @property
    def default(self) -> Any:
        return EMPTY if self.parameter.default is EMPTY else to_plain(self.parameter.default)

    def nest(self, key: str, rest: Sequence[str], value: Any) -> Any:
        if rest:
            raise ConfigError(f"{'.'.join((key, *rest))} cannot be set: {key} is one value.")
        return value

    def validate(self, key: str, raw: Any) -> Any:
        if raw is EMPTY:
            raise ConfigError(f"{key} needs a value; give it as {key}=….")
        converted = convert(key, raw, self.parameter.annotation)
        return to_plain(converted.resolve() if isinstance(converted, Path) else converted)  # holds from any folder

    def instantiate(self, values: Any, **fixed: Any) -> Any:
        return convert(self.parameter.name, values, self.parameter.annotation)


@dataclass(frozen=True)
class Record(Section):
    """Settings of one factory; with ``grid`` each may be a list of values."""

    factory: Callable[..., Any]
    grid: bool = False

    @property
    def default(self) -> Any:
        return {}

    def nest(self, key: str, rest: Sequence[str], value: Any) -> Tree:
        if not rest:
            if not isinstance(value, Mapping):
                like = f"{key}.{next(iter(signature(self.factory)))}"
                raise ConfigError(f"{key} is {format_value(value)}, but it must be a mapping of settings, like {like}.")
            return Tree({"on" if name is True else str(name): inner for name, inner in value.items()})  # YAML 1.1's on
        return Tree({single_key(key, rest): value})

    def validate(self, key: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        return validate(key, f"{key}.", signature(self.factory), raw, self.grid)

    def instantiate(self, values: Mapping[str, Any], **fixed: Any) -> Any:
        return self.factory(**fixed, **from_plain(signature(self.factory), values))


@dataclass(frozen=True)
class Choice(Section):
    """One of a registry by its name, with its settings.

    Args:
        registry: the factories to choose from.
        start: the default name.
        hidden: parameters that are not settings, because they follow from something else.
        grid: whether each setting may be a list of values.
        slots: settings that are choices themselves.
    """

    registry: Registry[Any]
    start: str = ""
    hidden: tuple[str, ...] = ()
    grid: bool = False
    slots: Mapping[str, Choice] = field(default_factory=dict)

    @property
    def default(self) -> Any:
        return self.start

    def parameters(self, name: str) -> Parameters:
        """The settings of the factory called ``name``."""
        return {key: p for key, p in self.registry[name].parameters.items() if key not in self.hidden}

    def nest(self, key: str, rest: Sequence[str], value: Any) -> Tree:
        if not rest:
            if isinstance(value, str):
                name, setting = self.registry.shorthand(value)
                value = {"name": name, **setting}
            tree = Tree()
            for inner, inner_value in (value if isinstance(value, Mapping) else {"name": value}).items():
                tree |= self.nest(key, [str(inner)], inner_value)
            return tree
        first, *deeper = rest
        if first in self.slots:
            return Tree({first: self.slots[first].nest(f"{key}.{first}", deeper, value)})
        if single_key(key, rest) != "name":
            return Tree({first: value})
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{key} is {format_value(value)}, but it must be a name.")
        return Tree(name=self.registry.canonical(str(value)))

    def validate(self, key: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        entry = self.registry[raw["name"]]
        settings = {name: value for name, value in raw.items() if name != "name"}
        where = f"{entry.kind} {entry.name!r}"
        return {"name": entry.name, **validate(where, f"{key}.", self.parameters(entry.name), settings, self.grid)}

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Validated settings, without the name, as the types that the factory asks for."""
        return from_plain(self.registry[values["name"]].parameters, {k: v for k, v in values.items() if k != "name"})

    def instantiate(self, values: Mapping[str, Any], **fixed: Any) -> Any:
        return self.registry.make(values["name"], **fixed, **self.settings(values))


class MethodChoice(Choice):
    """A preset by its name, with its settings and, by slot, the parts that replace or change its own."""

    def validate(self, key: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        return resolve_method(self.registry, raw)

    def instantiate(self, values: Mapping[str, Any], **fixed: Any) -> Method:
        return compose(self.registry, values)


class Terms(Choice):
    """The parts of a slot that holds several, like terms: a list replaces all, ``key.part.setting`` sets one."""

    def nest(self, key: str, rest: Sequence[str], value: Any) -> Tree:
        if rest:
            term, *deeper = rest
            return Tree(
                {term: Tree({single_key(f"{key}.{term}", deeper): value}) if deeper else self._term(key, term, value)}
            )
        if isinstance(value, Mapping) and "name" not in value:
            return Tree(
                name=list(map(str, value)),
                **{str(term): self._term(key, str(term), inner) for term, inner in value.items()},
            )
        tree = Tree(name=[])
        for item in value if isinstance(value, list | tuple) else [value]:
            settings = dict(item) if isinstance(item, Mapping) else {"name": item}
            name = settings.pop("name", None)
            if not isinstance(name, str):
                raise ConfigError(f"{key} is {format_value(value)}, but it must be a list of names.")
            name = self.registry.canonical(name)
            if name in tree["name"]:
                raise ConfigError(f"{key} lists {name!r} twice.")
            tree["name"].append(name)
            tree[name] = self._term(key, name, settings)
        return tree

    def _term(self, key: str, term: str, value: Any) -> Tree:
        if value is not None and not isinstance(value, Mapping):
            owners = [] if term in self.registry else [e.name for e in self.registry if term in e.parameters]
            like = f"; write the part first, like {key}.{owners[0]}.{term}" if owners else ""
            like += f" ({', '.join(owners[1:])} have one, too)" if owners[1:] else ""
            message = f"{key}.{term} is {format_value(value)}, but it must be a mapping of a part's settings"
            raise ConfigError(f"{message}{like}.")
        return Tree({str(name): inner for name, inner in (value or {}).items()})


def single_key(key: str, rest: Sequence[str]) -> str:
    """The name of a setting directly below a key."""
    if len(rest) > 1:
        raise ConfigError(f"unknown key {'.'.join((key, *rest))!r}; settings have one dot, like {key}.{rest[0]}.")
    return rest[0]


def sections_of(owner: Callable[..., Any], skip: Sequence[str] = (), **choices: Registry[Any]) -> dict[str, Section]:
    """One section for each parameter of ``owner``: a choice, a record where it is a dataclass, or one value.

    Args:
        owner: a record of conditions, like ``Experiment``.
        skip: parameters that are not keys, other than ``engine_settings`` of a choice ``engine``.
        choices: registries of those that are chosen by name.
    """
    sections: dict[str, Section] = {}
    for name, parameter in signature(owner).items():
        if name in skip or name.removesuffix("_settings") in (choices.keys() - {name}):
            continue
        if name in choices:
            sections[name] = Choice(choices[name], parameter.default if isinstance(parameter.default, str) else "")
        elif is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
            sections[name] = Record(parameter.annotation)
        else:
            sections[name] = Value(owner, parameter)
    return sections


def arguments(owner: Callable[..., Any], sections: Mapping[str, Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``owner`` from validated settings; a choice may be passed on as a name and its settings."""
    parameters, keywords = signature(owner), {}
    for key in parameters.keys() & sections.keys():
        section = sections[key]
        if isinstance(section, Choice) and f"{key}_settings" in parameters:
            keywords |= {key: values[key]["name"], f"{key}_settings": section.settings(values[key])}
        else:
            keywords[key] = section.instantiate(values[key])
    return keywords
