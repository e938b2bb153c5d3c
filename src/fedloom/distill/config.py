"""From what a person typed to a checked configuration, and from that to an experiment."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedloom.core.errors import CheckpointError, ConfigError, nearest
from fedloom.core.registry import Entry, Registry
from fedloom.data import Source, sources
from fedloom.distill.data import Splits
from fedloom.distill.experiment import Distillation
from fedloom.distill.method import distillers
from fedloom.distill.methods import ce
from fedloom.distill.training import Training
from fedloom.models import models
from fedloom.run.config import schema
from fedloom.run.config.overrides import Assignment, combinations, parse
from fedloom.run.config.tree import RECORDED, read
from fedloom.run.config.values import convert, default, plain, settings, shown, typed

GROUPS: dict[str, Registry[Any]] = {"method": distillers, "data": sources, "model": models, "teacher": models}
"""Keys that choose by name; ``teacher`` may also be a run directory."""

RECORDS: dict[str, type] = {"training": Training, "teaching": Training}
"""Keys that are records of settings: the student's training, and that of a teacher trained on the spot."""

COMPARED = ("ce", "kd", "disk")
"""The methods that are compared when none is named."""

DEFAULTS: Mapping[str, Any] = {
    "method": {"name": "disk"},
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [4]},
    "teacher": {"name": "mlp", "hidden": [256, 256]},
    "training": {"batch_size": 50, "lr": 0.05, "clip": 10.0},
    "teaching": {"batch_size": 50, "lr": 0.05, "clip": 10.0},
}
"""What runs when nothing is said, where it is not the default of a signature."""

PENDING = Path("still to be trained")
"""Stands for a teacher in an experiment that is only checked."""


def conditions(
    epochs: int = 40,
    budget: str = "passes",
    warm: int | None = None,
    start: Path | None = None,
    validation: float = 0.1,
    samples: int | None = None,
    tested: int | None = None,
    split_seed: int = 0,
    teaching_epochs: int = 20,
    augment: tuple[str | Mapping[str, Any], ...] = (),
    every: int = 1,
    cache: str = "auto",
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
) -> None:
    """Keys of their own.

    Args:
        epochs: E: all the student's passes over the data, or under budget=published the method's rounds.
        budget: ``passes`` (equal student passes) or ``published``.
        warm: passes of the warm start; null for E/4, or E as published.
        start: the run directory of a student trained by ``ce``, instead of a warm start.
        validation: the share of training samples on which the reported model is chosen.
        samples: how many training samples are used; null for all.
        tested: how many test samples; null for all.
        split_seed: of the split and of a teacher trained on the spot, the same for runs of several seeds.
        teaching_epochs: passes of a teacher trained on the spot.
        augment: random changes of images, the same for student and teacher.
        every: student passes between two evaluations.
        cache: where the teacher's answers are kept: auto, memory, disk or none.
        seed: of everything else that is random.
        dtype: float32 or float64.
        device: auto, cpu or cuda.
    """


SCALARS = schema.signature(conditions)
SCALARS.pop("return", None)


@dataclass(frozen=True)
class Config:
    """A complete configuration, as plain data.

    Attributes:
        values: every key with its value, as in ``config.yaml``.
        out: the run directory, if one was named.
        resume: the run directory to continue, if one was named.
        swept: the keys that vary within a sweep, with this one's values.
    """

    values: dict[str, Any]
    out: Path | None = None
    resume: Path | None = None
    swept: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """The value at a key of the first level."""
        return self.values[key]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.values["method"]["name"]


def resolve(words: Sequence[str], base: Path | None = None, multirun: bool = False) -> list[Config]:
    """The configurations that words ask for: one, those of a sweep, or the comparison that is the default.

    >>> [c.method for c in resolve([])], resolve(["method=kd", "method.tau=2"])[0]["method"]
    (['ce', 'kd', 'disk'], {'name': 'kd', 'alpha': 0.1, 'tau': 2.0, 'warm': True})
    >>> resolve(["method=kdd"])
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: unknown method of distillation 'kdd'; did you mean 'kd'? There are: ...

    Raises:
        ConfigError: for anything unknown, of the wrong type, or several values without ``multirun``.
    """
    recipe = {} if base is None else read(base)
    recipe = {key: value for key, value in recipe.items() if key not in (*RECORDED, "command")}
    names = {group: registry.names() for group, registry in GROUPS.items()}
    given = {a.path: a for a in (parse(word, names) for word in words)}
    for (first, *_), one in given.items():
        if one.is_sweep and not multirun:
            raise ConfigError(f"{one.key} has several values; add -m to run each of them, or write a list as [a,b].")
        if first not in {*GROUPS, *RECORDS, *SCALARS, "out", "resume"}:
            raise ConfigError(
                f"unknown key {first!r}; {nearest(first, [*GROUPS, *RECORDS, *SCALARS, 'out', 'resume'])}"
            )
    if not any(path[0] == "method" or path == ("resume",) for path in given) and "method" not in recipe:
        given = {("method",): Assignment(("method",), COMPARED, is_sweep=True)} | given
    found = []
    for one in combinations(list(given.values())):
        values = dict(one)
        out, resume = (convert(key, values.pop((key,), None), Path | None) for key in ("out", "resume"))
        swept = {a.key: values[a.path] for a in given.values() if a.is_sweep and a.path in values}
        if resume is not None:
            found.append(Config(_resumed(resume, values, out), resume=resume))
        else:
            found.append(Config(complete(recipe, values), out, swept=swept))
    return found


def _resumed(resume: Path, values: Mapping[tuple[str, ...], Any], out: Path | None) -> dict[str, Any]:
    if values or out is not None:
        raise ConfigError("resume= continues a run as it is, so it cannot be combined with other settings.")
    path = resume / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{str(resume)!r} is not a run directory: it has no config.yaml.")
    stored = read(path)
    if stored.get("command") != "distill":
        raise ConfigError(f"{str(resume)!r} is no run of distillation; go on with: fedloom run resume={resume}")
    return complete({key: value for key, value in stored.items() if key not in (*RECORDED, "command")}, {})


def complete(recipe: Mapping[str, Any], overrides: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Every key with its value: overrides over a recipe over the defaults."""
    full: dict[str, Any] = copy.deepcopy(dict(DEFAULTS))
    for key, value in recipe.items():
        _put(full, (key,), value)
    for path, value in sorted(overrides.items(), key=lambda item: len(item[0])):
        _put(full, path, value)
    values: dict[str, Any] = {"command": "distill"}
    for group, registry in GROUPS.items():
        chosen = full[group]
        if "run" in chosen:
            values[group] = {"run": str(Path(chosen["run"]).expanduser().resolve())}
            continue
        entry = registry[chosen["name"]]
        own = {k: v for k, v in chosen.items() if k != "name"}
        parameters = _parameters(group, entry)
        where = f"{entry.kind} {entry.name!r}"
        values[group] = {"name": entry.name, **settings(where, f"{group}.", entry.factory, parameters, own)}
    for key, parameter in SCALARS.items():
        found = convert(key, full.get(key, parameter.default), parameter.annotation)
        values[key] = plain(found.resolve() if isinstance(found, Path) else found)
    for record, made in RECORDS.items():
        values[record] = settings(record, f"{record}.", made, schema.signature(made), full.get(record, {}))
    return values


def _put(full: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    first, *rest = path
    if first not in {*GROUPS, *RECORDS, *SCALARS}:
        raise ConfigError(f"unknown key {first!r}; {nearest(first, [*GROUPS, *RECORDS, *SCALARS, 'out', 'resume'])}")
    if first in GROUPS and not rest:
        given = dict(value) if isinstance(value, Mapping) else _named(first, value)
        if "run" in given:
            full[first] = given
        else:
            before = full[first] if full[first].get("name") == given.get("name", full[first].get("name")) else {}
            full[first] = {**before, **given}
    elif first in GROUPS or first in RECORDS:
        if not rest and not isinstance(value, Mapping):
            raise ConfigError(f"{first} is {shown(value)}, but it is a record of settings, like {first}.lr=0.1.")
        inner = value if not rest else {".".join(rest): value}
        full[first] = {**full.get(first, {}), **{str(k): v for k, v in inner.items()}}
    elif rest:
        raise ConfigError(f"{'.'.join(path)} cannot be set: {first} is one value.")
    else:
        full[first] = value


def _named(group: str, value: Any) -> dict[str, Any]:
    """A choice by name; a teacher that is no model is a run directory."""
    if group != "teacher" or str(value) in models:
        return {"name": str(value)}
    if Path(str(value)).exists() or "/" in str(value):
        return {"run": str(value)}
    raise ConfigError(
        f"teacher is {value!r}: neither a run directory nor a model; {nearest(str(value), models.names())}"
    )


def _parameters(group: str, entry: Entry[Any]) -> dict[str, inspect.Parameter]:
    kind = "model" if group == "teacher" else group
    return {n: p for n, p in entry.parameters.items() if n not in schema.FROM_DATA.get(kind, ())}


def _made(group: str, registry: Registry[Any], values: Mapping[str, Any], **fixed: Any) -> Any:
    entry = registry[values["name"]]
    given = {key: value for key, value in values.items() if key != "name"}
    return entry.make(**fixed, **typed(_parameters(group, entry), given))


@functools.lru_cache(maxsize=1)
def _source(described: str) -> Source:
    """The data source, kept for the next run of a sweep."""
    return _made("data", sources, json.loads(described))


def splits(config: Config) -> Splits:
    """The data, divided."""
    names = ("validation", "samples", "tested")
    source = _source(json.dumps(config["data"], sort_keys=True))
    return Splits.of(source, **{name: config[name] for name in names}, seed=config["split_seed"])


def build(config: Config, teacher: nn.Module | Path | None = None, data: Splits | None = None) -> Distillation:
    """The experiment of a configuration; what is impossible is refused here.

    Args:
        config: the configuration.
        teacher: the teacher that was trained on the spot, or its run directory; None while it is not yet.
        data: the splits, if they were made already.
    """
    values = config.values
    method = _made("method", distillers, values["method"])
    data = data or splits(config)
    scalars = typed(SCALARS, {key: values[key] for key in SCALARS})
    own = {key: scalars[key] for key in schema.signature(Distillation) if key in scalars}
    return Distillation(
        method,
        data,
        _maker(values["model"], "model", data),
        Path(values["teacher"]["run"]) if "run" in values["teacher"] else teacher or PENDING,
        training=_record("training", values),
        config=values,
        **own,
    )


def build_teacher(config: Config, data: Splits) -> Distillation | None:
    """The training of a teacher on the spot; None if it comes from a run directory."""
    values = config.values
    if "run" in values["teacher"]:
        return None
    kept = {"command": "distill", "data": values["data"], "training": values["teaching"]}
    return Distillation(
        ce(),
        data,
        _maker(values["teacher"], "teacher", data),
        epochs=values["teaching_epochs"],
        training=_record("teaching", values),
        augment=tuple(values["augment"]),
        seed=values["split_seed"],
        dtype=values["dtype"],
        device=values["device"],
        config={**kept, "method": {"name": "ce", "warm": False}, "model": values["teacher"]},
    )


def _record(name: str, values: Mapping[str, Any]) -> Training:
    return Training(**typed(schema.signature(Training), values[name]))


def _maker(values: Mapping[str, Any], group: str, data: Splits) -> functools.partial[nn.Module]:
    """What makes a network; tried without memory first, so that one that does not fit is refused here."""
    fixed = {"classes": data.train.classes, "inputs": tuple(data.train.x.shape[1:])}
    with torch.device("meta"):
        _made(group, models, values, **fixed)
    return functools.partial(_made, group, models, values, **fixed)


def defaults() -> dict[str, Any]:
    """Keys of their own with their defaults, for listings.

    >>> defaults()["budget"]
    'passes'
    """
    return {key: default(conditions, parameter) for key, parameter in SCALARS.items()}
