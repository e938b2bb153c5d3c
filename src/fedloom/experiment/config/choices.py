"""Configurations of names, records and single values: what is asked for, laid over the defaults, checked."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.registry import Registry
from fedloom.experiment.config.overrides import PLAIN_KEYS, Assignment, combinations, parse_all
from fedloom.experiment.config.schema import parameters, signature
from fedloom.experiment.config.tree import Key, Tree, read
from fedloom.experiment.config.values import convert, plain, settings, shown

Complete = Callable[[Tree, dict[Key, Any]], dict[str, Any]]
"""Gives every key its value, from a recipe and overrides."""

Resumed = Callable[[Path, dict[Key, Any]], dict[str, Any]]
"""Likewise from the stored run that ``resume=`` names, and overrides."""

Held = Registry[Any] | type | inspect.Parameter
"""What a key of the first level holds: a choice by name, a record of settings, or one value."""


@dataclass(frozen=True)
class Config:
    """A complete configuration: every key with its value, as plain data.

    Attributes:
        values: nested mappings, as in a run directory's ``config.yaml``; ``values["method"]["name"]`` is the method.
        out: the run directory, if one was named.
        resume: the run directory or checkpoint to continue, if one was named.
        swept: in a sweep, the keys that vary with this one's values.
    """

    values: dict[str, Any]
    out: Path | None = None
    resume: Path | None = None
    swept: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """The value at a dotted key."""
        found: Any = self.values
        for part in key.split("."):
            found = found[part]
        return found


def configs(
    assignments: Sequence[Assignment],
    base: Path | str | None,
    complete: Complete,
    resumed: Resumed,
    usual: Assignment | None = None,
) -> list[Config]:
    """The configurations that overrides ask for: the product of those that have several values.

    Args:
        assignments: the overrides, one a key.
        base: a recipe.
        complete: gives every key its value.
        resumed: likewise for a run that goes on.
        usual: what is added where its key is named nowhere and no run goes on.

    >>> sweep = parse_all(["seed=1,2", "out=there"])
    >>> [(one.values, one.out.name) for one in configs(sweep, None, lambda _, words: words, lambda _, words: words)]
    [({('seed',): 1}, 'there'), ({('seed',): 2}, 'there')]

    Raises:
        ConfigError: for a recipe that cannot be read, or ``resume=`` beside a recipe, a sweep or ``out=``.
    """
    recipe = {} if base is None else read(Path(base))
    if "resume" in recipe:
        raise ConfigError(f"{str(base)!r} has the key 'resume', which belongs on the command line.")
    place = recipe.pop("out", None)
    if usual is not None and not {usual.path[0], "resume"} & {*recipe, *(one.path[0] for one in assignments)}:
        assignments = [usual, *assignments]
    sweeps = [one for one in assignments if one.is_sweep]
    found = []
    for words in map(dict, combinations(assignments)):
        swept = {one.key: words[one.path] for one in sweeps}
        out, resume = (convert(key, words.pop((key,), None), Path | None) for key in PLAIN_KEYS)
        if resume is None:
            out = out or convert("out", place, Path | None)
            found.append(Config(complete(copy.deepcopy(recipe), words), out, swept=swept))
            continue
        if base is not None or out is not None or sweeps:
            other = "a recipe" if base is not None else "out=" if out is not None else "a sweep"
            raise ConfigError(f"resume= continues a run as it is, so it cannot be combined with {other}.")
        found.append(Config(resumed(resume, words), resume=resume))
    return found


def settled(key: str, held: Held, given: Any) -> Any:
    """All settings of a key as plain data: those given, checked and converted, and the others at their defaults.

    >>> from fedloom.data import sources
    >>> settled("data", sources, {"name": "synthetic", "clients": 5.0})["clients"]
    5

    Raises:
        ConfigError: for a name or a setting that there is not, a missing value, or one of the wrong type.
    """
    if isinstance(held, Registry):
        entry = held[given["name"]]
        own = {name: value for name, value in given.items() if name != "name"}
        where = f"{entry.kind} {entry.name!r}"
        return {"name": entry.name} | settings(where, f"{key}.", entry.factory, parameters(entry), own)
    if isinstance(held, type):
        return settings(key, f"{key}.", held, signature(held), given)
    if given is inspect.Parameter.empty:
        raise ConfigError(f"{key} needs a value; give it as {key}=….")
    found = convert(key, given, held.annotation)
    return plain(found.resolve() if isinstance(found, Path) else found)  # holds from any folder


@dataclass(frozen=True)
class Layout:
    """The keys of a command, and what runs when nothing is said.

    Args:
        keys: what each key of the first level holds, in the order in which they are written down.
        defaults: what a key starts from where that is not its signature's; a name at least for those that choose by it.
        compared: names for the first key, which are compared when none is chosen.
        short: keys that stand for longer ones.

    >>> from fedloom.core.local import Local
    >>> from fedloom.data import sources
    >>> layout = Layout({"data": sources, "local": Local}, {"data": {"name": "digits"}}, compared=("digits",))
    >>> layout.laid({"local": {"lr": 1}}, {("data", "clients"): 5, ("data",): "synthetic"})
    {'data': {'name': 'synthetic', 'clients': 5}, 'local': {'lr': 1}}
    """

    keys: Mapping[str, Held]
    defaults: Mapping[str, Any]
    compared: tuple[str, ...]
    short: Mapping[str, str] = field(default_factory=dict)

    def configs(
        self, words: Sequence[str], base: Path | None, complete: Complete, resumed: Resumed, sweeps: bool = True
    ) -> list[Config]:
        """The configurations that words ask for, or those to compare if they choose nothing for the first key.

        Args:
            words: overrides, of which some may have several values if ``sweeps``.
            base: a recipe.
            complete: gives every key its value.
            resumed: likewise for a run that goes on.
            sweeps: whether there may be several.

        Raises:
            ConfigError: as ``configs`` and ``parse_all``.
        """
        names = {key: held.names() for key, held in self.keys.items() if isinstance(held, Registry)}
        usual = Assignment((next(iter(self.keys)),), self.compared, is_sweep=True)
        return configs(parse_all(words, names, sweeps), base, complete, resumed, usual)

    def laid(self, recipe: Mapping[str, Any], words: Mapping[Key, Any]) -> Tree:
        """Settings by key: words over a recipe over the defaults. Another name drops the settings of the one before.

        Raises:
            ConfigError: for a key that there is not, or something else than settings where settings belong.
        """
        full = {key: self._start(key) for key in self.keys}
        for given in ({(key,): value for key, value in recipe.items()}, words):
            longer = [((*self.short.get(key[0], key[0]).split("."), *key[1:]), value) for key, value in given.items()]
            for key, value in sorted(longer, key=lambda item: len(item[0])):
                self._put(full, key, value)
        return full

    def _start(self, key: str) -> Any:
        held = self.keys[key]
        return self.defaults.get(key, held.default if isinstance(held, inspect.Parameter) else {})

    def _put(self, full: Tree, path: Key, value: Any) -> None:
        first, *rest = path
        if first not in self.keys:
            raise ConfigError(f"unknown key {first!r}; {nearest(first, [*self.keys, *self.short, *PLAIN_KEYS])}")
        held, written = self.keys[first], ".".join(path)
        if isinstance(held, inspect.Parameter):
            if rest:
                raise ConfigError(f"{written} cannot be set: {first} is one value.")
            full[first] = value
            return
        if len(rest) > 1:
            raise ConfigError(f"unknown key {written!r}; settings have one dot, like {first}.{rest[0]}.")
        if not rest and isinstance(held, type) and not isinstance(value, Mapping):
            like = next(iter(signature(held)))
            raise ConfigError(f"{first} is {shown(value)}, but it must be a mapping of settings, like {first}.{like}.")
        given = {rest[0]: value} if rest else dict(value) if isinstance(value, Mapping) else {"name": value}
        if "name" in given:
            given["name"] = str(given["name"])
        name = given.get("name", full[first].get("name"))
        before = next((b for b in (full[first], self._start(first)) if b.get("name") == name), {})
        full[first] = {**before, **given}
