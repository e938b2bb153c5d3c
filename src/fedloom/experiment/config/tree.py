"""The tree of given settings: defaults, a recipe and overrides laid over each other, before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.slots import SLOTS
from fedloom.experiment.config import schema
from fedloom.experiment.config.values import shown

Tree = dict[str, Any]
Key = tuple[str, ...]
OBJECTIVE: Key = ("method", "objective")
RECORDED = ("kind", "version", "identity", "versions", "machine", "git", "judge")
"""Keys of a run directory's ``config.yaml`` that record how it was made; it can serve as a recipe without them."""


def read(path: Path) -> Tree:
    """A recipe: a YAML file of settings.

    Raises:
        ConfigError: if it cannot be read or is no mapping.
    """
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}.") from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{str(path)!r} is not a YAML file of settings: {reason}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} holds no settings: it should be a mapping of keys to values.")
    found = _named(found)
    return {key: value for key, value in found.items() if "identity" not in found or key not in RECORDED}


def stored(directory: Path) -> Tree:
    """The configuration of a run directory.

    Raises:
        CheckpointError: if it is none.
    """
    path = directory / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{str(directory)!r} is not a run directory: it has no config.yaml.")
    return read(path)


def _named(value: Any) -> Any:
    """The same with text as keys; YAML reads the key ``on`` as a truth value."""
    if isinstance(value, list):
        return [_named(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {"on" if key is True else str(key): _named(item) for key, item in value.items()}


def lay(tree: Tree, top: Mapping[str, Any]) -> None:
    """Lay a mapping of settings, as a recipe has it, over a tree."""
    for key, value in top.items():
        if key in schema.RECORDS:
            if not isinstance(value, Mapping):
                must = f"it must be a mapping of settings, like {key}.{_one(key)}"
                raise ConfigError(f"{key} is {shown(value)}, but {must}.")
            for name, inner in value.items():
                put(tree, (key, str(name)), inner)
        else:
            put(tree, (key,), value)


def _one(record: str) -> str:
    return next(iter(schema.signature(schema.RECORDS[record])))


def put_all(tree: Tree, assignments: Sequence[tuple[Key, Any]]) -> None:
    """Lay overrides over a tree: choices by name first, then their settings, so that their order does not matter."""
    for key, value in sorted(assignments, key=lambda assignment: len(assignment[0])):
        put(tree, key, value)


def put(tree: Tree, key: Key, value: Any) -> None:
    """Set one key. Another name chosen drops the settings of the one before; the same name keeps them."""
    if key[-1] == "name" and schema.chooses(key[:-1]) is not None:
        key = key[:-1]
    node = tree
    for depth, part in enumerate(key[:-1]):
        if key[: depth + 1] == OBJECTIVE:
            node = node.setdefault(part, {"listed": False, "terms": {}})["terms"]
            continue
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(key)} cannot be set: {'.'.join(key[: depth + 1])} is {shown(inner)}.")
        node = inner
    last = key[-1]
    if key == OBJECTIVE:
        node[last] = _objective(value, node.get(last, {}).get("terms", {}))
    elif schema.chooses(key) is not None:
        node[last] = _choice(key, value, node.get(last, {}))
    elif key[0] in schema.RECORDS and len(key) == 1:
        lay(tree, {last: value})
    else:
        node[last] = value


def _choice(key: Key, value: Any, before: Tree) -> Tree:
    """A thing chosen by name, with its settings: from a name, or a mapping with one."""
    given = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {"name": value}
    made: Tree = dict(before)
    if "name" in given:
        name = given.pop("name")
        if isinstance(name, bool) or not isinstance(name, str | int | float):
            raise ConfigError(f"{'.'.join(key)} is {shown(value)}, but it must be a name.")
        if made.get("name", name) != name:
            made = {}
        made["name"] = str(name)
    for inner, setting in given.items():
        if key == ("method",) and inner in SLOTS:
            holder = {"method": made}
            put(holder, ("method", inner), setting)
        else:
            made[inner] = setting
    return made


def _objective(value: Any, before: Tree) -> Tree:
    """The terms of an objective, by name: from a name, a list of names or of mappings, or a mapping of names."""
    if isinstance(value, Mapping) and "name" not in value:
        terms = {str(name): _settings(inner) for name, inner in value.items()}
    else:
        terms = {}
        for item in value if isinstance(value, list | tuple) else [value]:
            given = {str(k): v for k, v in item.items()} if isinstance(item, Mapping) else {"name": item}
            name = given.pop("name", None)
            if not isinstance(name, str):
                raise ConfigError(f"method.objective is {shown(value)}, but it must be a list of names.")
            if name in terms:
                raise ConfigError(f"method.objective lists {name!r} twice.")
            terms[name] = given or before.get(name, {})
    return {"listed": True, "terms": terms}


def _settings(value: Any) -> Tree:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"method.objective holds {shown(value)} where a mapping of a term's settings is expected.")
    return {str(k): v for k, v in value.items()}


def interpolate(tree: Tree) -> Tree:
    """The tree with references like ``${seed}`` replaced by what they refer to."""
    try:
        found = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"a reference cannot be resolved: {str(error).splitlines()[0]}.") from error
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
