"""From what a person typed to a complete, checked configuration."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.run.config import schema, tree
from fedloom.run.config.method import resolve_method
from fedloom.run.config.overrides import Assignment, combinations, parse
from fedloom.run.config.tree import Key, Tree
from fedloom.run.config.values import convert, default, plain, settings, shown

DEFAULTS: Mapping[str, Any] = {
    "method": "fedavg",
    "data": "digits",
    "partition": "dirichlet",
    "noise": "none",
    "target": "none",
    "model": "mlp",
    "engine": "serial",
    "clients": 20,
    "participation": 0.5,
    "rounds": 50,
    "local": {"weight_decay": 1e-3},
}
"""What runs when nothing is said, where it is not the default of a signature."""

COMPARED = ("fedavg", "feddyn")
"""The methods that are compared when none is named."""

FITTING: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("data", "synthetic"): {"partition": "natural", "model": "logistic", "local": {"weight_decay": 1e-5}},
    ("partition", "natural"): {"clients": None},
    ("partition", "acid"): {"clients": 100, "held_out": "common"},
    ("partition", "alid"): {"clients": 100, "held_out": "common"},
    ("partition", "niid1"): {"clients": 5, "participation": 1.0},
    ("partition", "niid2"): {"clients": 10, "participation": 1.0},
    ("method", "fedevg"): {
        "model": {"name": "energy_cnn", "channels": [16, 32, 64]},
        "clients": 10,
        "participation": 1.0,
        "rounds": 40,
        "local": {"steps": 15, "batch_size": 32, "lr": 1e-3, "optimizer": "adam", "weight_decay": 0.0},
        "evaluation": {"on": []},
    },
    ("method", "fedcgan"): {
        "model": "conditional_gan",
        "clients": 10,
        "participation": 1.0,
        "rounds": 40,
        "local": {"steps": 15, "batch_size": 32, "lr": 1e-3, "optimizer": "adam", "beta1": 0.5, "weight_decay": 0.0},
        "evaluation": {"on": []},
    },
    ("method", "fedcvae"): {
        "model": "conditional_vae",
        "clients": 10,
        "participation": 1.0,
        "rounds": 40,
        "local": {"steps": 15, "batch_size": 32, "lr": 2e-3, "optimizer": "adam", "weight_decay": 0.0},
        "evaluation": {"on": []},
    },
}
"""Defaults that go with a choice."""

MAY_CHANGE = ("engine", "device", "states", "checkpoint", "track")
"""Keys that a continued run may change, besides more rounds: what was computed so far does not depend on them."""


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


def resolve(overrides: Sequence[str] = (), base: Path | str | None = None) -> Config:
    """One configuration from a recipe and overrides; the order of overrides does not matter.

    Args:
        overrides: like ``method=feddyn``, ``method.alpha=0.1``; of two for one key the last one counts.
        base: a YAML file with the same keys.

    >>> config = resolve(["method.alpha=.1", "method=feddyn", "partition.alpha=0.6"])
    >>> config["method"], config["partition.alpha"], config["clients"]
    ({'name': 'feddyn', 'alpha': 0.1, 'by_size': True}, 0.6, 20)
    >>> resolve(["method=feddin"])
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: unknown method 'feddin'; did you mean 'feddyn'? There are: ...

    Raises:
        ConfigError: for anything unknown, of the wrong type, or swept over.
    """
    assignments = [parse(text, schema.names()) for text in overrides]
    for assignment, text in zip(assignments, overrides, strict=True):
        if assignment.is_sweep:
            raise ConfigError(f"{text!r} holds several values; add -m to run each of them, or write a list as [a,b].")
    return _one(_last(assignments), base)


def sweep(overrides: Sequence[str] = (), base: Path | str | None = None) -> list[Config]:
    """All configurations of a sweep: the product of everything that has several values.

    >>> [(c["method.name"], c["seed"]) for c in sweep(["method=fedavg,feddyn", "seed=range(1,3)"])]
    [('fedavg', 1), ('fedavg', 2), ('feddyn', 1), ('feddyn', 2)]

    Raises:
        ConfigError: as ``resolve``, for any of them.
    """
    assignments = _last([parse(text, schema.names()) for text in overrides])
    return [_one(one, base, assignments) for one in map(_fixed, combinations(assignments))]


def names_method(overrides: Sequence[str], base: Path | str | None) -> bool:
    """Whether a method is named (or a run continued), so that there is nothing to compare by default."""
    keys = {text.partition("=")[0] for text in overrides}
    if keys & {"method", "method.name", "resume"}:
        return True
    if base is not None and "method" in tree.read(Path(base)):
        return True
    return any(key.startswith("method.") for key in keys)


def to_yaml(config: Config) -> str:
    r"""A configuration as a recipe, which gives the same configuration again.

    >>> print("\n".join(to_yaml(resolve(["method=fedprox"])).splitlines()[:3]))
    method:
      name: fedprox
      mu: 0.01
    """
    return OmegaConf.to_yaml(OmegaConf.create(copy.deepcopy(config.values)))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted keys.

    >>> flatten({"method": {"name": "fedavg"}, "seed": 1})
    {'method.name': 'fedavg', 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _last(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Of several assignments to one key the last one, in the order in which keys were first given."""
    return list({assignment.path: assignment for assignment in assignments}.values())


def _fixed(one: Sequence[tuple[Key, Any]]) -> list[Assignment]:
    return [Assignment(path, (value,)) for path, value in one]


def _one(assignments: Sequence[Assignment], base: Path | str | None, all_of_them: Sequence[Assignment] = ()) -> Config:
    given = {a.path: a.values[0] for a in assignments}
    out, resume = (_path(key, given.pop((key,), None)) for key in ("out", "resume"))
    if resume is not None:
        if base is not None or out is not None or any(a.is_sweep for a in all_of_them):
            other = "a recipe" if base is not None else "out=" if out is not None else "a sweep"
            raise ConfigError(f"resume= continues a run as it is, so it cannot be combined with {other}.")
        return Config(_resumed(resume, given), resume=resume)
    top = tree.read(Path(base)) if base is not None else {}
    if "resume" in top:
        raise ConfigError(f"{str(base)!r} has the key 'resume', which belongs on the command line.")
    recipe_out = _path("out", top.pop("out", None))
    swept = {a.key: given[a.path] for a in all_of_them if a.is_sweep}
    return Config(complete(top, given), out or recipe_out, swept=swept)


def _path(key: str, value: Any) -> Path | None:
    return convert(key, value, Path | None)


def complete(recipe: Mapping[str, Any], overrides: Mapping[Key, Any]) -> dict[str, Any]:
    """Every key with its value: overrides over a recipe over what goes with the choices over the defaults.

    Raises:
        ConfigError: for anything unknown or of the wrong type.
    """
    given: Tree = {}
    tree.lay(given, recipe)
    _known(given)
    tree.put_all(given, list(overrides.items()))
    _known(given)
    full: Tree = {}
    tree.lay(full, DEFAULTS)
    for (group, name), fitting in FITTING.items():
        if given.get(group, full[group]).get("name", full[group]["name"]) == name:
            tree.lay(full, fitting)
    for key, scalar in schema.SCALARS.items():
        full.setdefault(key, default(scalar.owner, scalar.parameter))
    for key, value in given.items():
        if key in schema.RECORDS:
            full.setdefault(key, {}).update(value)
        elif key in schema.GROUPS:
            same = value.get("name", full[key]["name"]) == full[key]["name"]
            full[key] = {**full[key], **value} if same else value
        else:
            full[key] = value
    return _checked(tree.interpolate(full))


def _known(given: Tree) -> None:
    leaves = [f"{record}.{name}" for record, made in schema.RECORDS.items() for name in schema.signature(made)]
    for key in given:
        if key not in schema.GROUPS | schema.RECORDS | schema.SCALARS:
            raise schema.unknown(key, leaves)


def _checked(full: Tree) -> dict[str, Any]:
    """All settings, converted to what the signatures ask for, as plain data."""
    values: dict[str, Any] = {}
    for group, registry in schema.GROUPS.items():
        if group == "method":
            values[group] = resolve_method(full[group])
            continue
        entry = registry[full[group]["name"]]
        given = {key: value for key, value in full[group].items() if key != "name"}
        where = f"{entry.kind} {entry.name!r}"
        found = settings(where, f"{group}.", entry.factory, schema.parameters(group, entry), given)
        values[group] = {"name": entry.name, **found}
    for key, scalar in schema.SCALARS.items():
        value = full[key]
        if value is inspect.Parameter.empty:
            raise ConfigError(f"{key} needs a value; give it as {key}=….")
        found = convert(key, value, scalar.parameter.annotation)
        values[key] = plain(found.resolve() if isinstance(found, Path) else found)  # holds from any folder
    for record, made in schema.RECORDS.items():
        values[record] = settings(record, f"{record}.", made, schema.signature(made), full.get(record, {}))
    return values


def _resumed(resume: Path, overrides: Mapping[Key, Any]) -> dict[str, Any]:
    """The configuration of a stored run, with the changes that a continued run may have."""
    directory = run_directory(resume)
    path = directory / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{str(directory)!r} is not a run directory: it has no config.yaml.")
    stored = tree.read(path)
    if "method" not in stored:
        raise CheckpointError(f"{str(path)!r} names no method: this run was made from Python and is continued there.")
    before, after = complete(stored, {}), complete(stored, overrides)
    old, new = flatten(before), flatten(after)
    changed = []
    for key in [*old, *(key for key in new if key not in old)]:
        a, b = old.get(key), new.get(key)
        grows = key == "rounds" and b is not None and b > a
        if a != b and not grows and key.partition(".")[0] not in MAY_CHANGE:
            changed.append(f"{key}: {shown(a)} → {shown(b)}")
    if changed:
        raise ConfigError(
            f"{str(directory)!r} cannot be continued with other settings ({'; '.join(changed)}); "
            f"what may change is {', '.join(MAY_CHANGE)}, and rounds, upwards."
        )
    return after


def run_directory(resume: Path) -> Path:
    """The run directory of a path given to ``resume=``, which may also be one of its checkpoints.

    >>> run_directory(Path("runs/a/checkpoint/round-000010")).as_posix(), run_directory(Path("runs/a")).as_posix()
    ('runs/a', 'runs/a')
    """
    return resume.parents[1] if resume.parent.name == "checkpoint" else resume
