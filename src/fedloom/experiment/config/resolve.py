"""From what a person typed to a complete, checked configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.experiment.config import schema, tree
from fedloom.experiment.config.choices import Config, configs, settled
from fedloom.experiment.config.method import resolve_method
from fedloom.experiment.config.overrides import parse_all
from fedloom.experiment.config.tree import Key, Tree
from fedloom.experiment.config.values import default, shown

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

_ENERGY = {
    "model": "energy_cnn",
    "clients": 10,
    "participation": 1.0,
    "rounds": 40,
    "local": {"steps": 15, "batch_size": 32, "lr": 1e-3, "optimizer": "adam", "weight_decay": 0.0},
    "evaluation": {"what": []},
}
FITTING: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("data", "synthetic"): {"partition": "natural", "model": "logistic", "local": {"weight_decay": 1e-5}},
    ("partition", "natural"): {"clients": None},
    ("partition", "acid"): {"clients": 100, "held_out": "common"},
    ("partition", "alid"): {"clients": 100, "held_out": "common"},
    ("partition", "niid1"): {"clients": 5, "participation": 1.0},
    ("partition", "niid2"): {"clients": 10, "participation": 1.0},
    ("method", "fedevg"): _ENERGY,
    ("method", "fedevg_kept"): _ENERGY,
    ("method", "fedcgan"): {
        "model": "conditional_gan",
        "clients": 10,
        "participation": 1.0,
        "rounds": 40,
        "local": {"steps": 15, "batch_size": 32, "lr": 1e-3, "optimizer": "adam", "beta1": 0.5, "weight_decay": 0.0},
        "evaluation": {"what": []},
    },
    ("method", "fedcvae"): {
        "model": "conditional_vae",
        "clients": 10,
        "participation": 1.0,
        "rounds": 40,
        "local": {"steps": 15, "batch_size": 32, "lr": 2e-3, "optimizer": "adam", "weight_decay": 0.0},
        "evaluation": {"what": []},
    },
}
"""Defaults that go with a choice."""

MAY_CHANGE = ("engine", "device", "client_state", "checkpoint", "trackers")
"""Keys that a continued run may change, besides more rounds: what was computed so far does not depend on them."""


def resolve(overrides: Sequence[str] = (), base: Path | str | None = None) -> Config:
    """One configuration from a recipe and overrides; the order of overrides does not matter.

    Args:
        overrides: like ``method=feddyn``, ``method.alpha=0.1``; of two for one key the last one counts.
        base: a YAML file with the same keys.

    >>> config = resolve(["method.alpha=.1", "method=feddyn", "partition.alpha=0.6"])
    >>> config["method"], config["partition.alpha"], config["clients"]
    ({'name': 'feddyn', 'alpha': 0.1, 'size_weighted': True}, 0.6, 20)
    >>> resolve(["method=feddin"])
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: unknown method 'feddin'; did you mean 'feddyn'? There are: ...

    Raises:
        ConfigError: for anything unknown, of the wrong type, or swept over.
    """
    return configs(parse_all(overrides, schema.names(), sweeps=False), base, complete, _resumed)[0]


def sweep(overrides: Sequence[str] = (), base: Path | str | None = None) -> list[Config]:
    """All configurations of a sweep: the product of everything that has several values.

    >>> [(c["method.name"], c["seed"]) for c in sweep(["method=fedavg,feddyn", "seed=range(1,3)"])]
    [('fedavg', 1), ('fedavg', 2), ('feddyn', 1), ('feddyn', 2)]

    Raises:
        ConfigError: as ``resolve``, for any of them.
    """
    return configs(parse_all(overrides, schema.names()), base, complete, _resumed)


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
    held = schema.GROUPS | {key: scalar.parameter for key, scalar in schema.SCALARS.items()} | schema.RECORDS
    values: dict[str, Any] = {"method": resolve_method(full["method"])}
    return values | {key: settled(key, what, full.get(key, {})) for key, what in held.items() if key != "method"}


def _resumed(resume: Path, overrides: Mapping[Key, Any]) -> dict[str, Any]:
    """The configuration of a stored run, with the changes that a continued run may have."""
    directory = run_directory(resume)
    stored = tree.stored(directory)
    if "method" not in stored:
        path = str(directory / "config.yaml")
        raise CheckpointError(f"{path!r} names no method: this run was made from Python and is continued there.")
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
