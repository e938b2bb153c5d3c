"""From what a person typed to an online experiment."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import torch
from torch import nn

from fedloom.core.errors import CheckpointError, ConfigError, nearest
from fedloom.core.local import Local
from fedloom.core.registry import Entry, Registry
from fedloom.core.slots import adaptations
from fedloom.data import Source, sources, task_stream
from fedloom.data.streams import TaskStream, streams
from fedloom.models import models
from fedloom.online.bank import Expert
from fedloom.online.experiment import Measures, Online
from fedloom.online.hedge import Hedge
from fedloom.online.learners import learners
from fedloom.run.config import schema
from fedloom.run.config.overrides import combinations, parse
from fedloom.run.config.schema import Checkpoints
from fedloom.run.config.tree import RECORDED, read
from fedloom.run.config.values import convert, default, plain, settings, typed

GROUPS: dict[str, Registry[Any]] = {
    "learner": learners,
    "adaptation": adaptations,
    "data": sources,
    "stream": streams,
    "model": models,
}
"""Keys that choose by name."""

RECORDS: dict[str, type] = {"local": Local, "hedge": Hedge, "measures": Measures, "checkpoint": Checkpoints}
"""Keys that are records of settings."""

GRID = ("learner", "adaptation", "local")
"""Keys below which a list is a grid of experts."""

COMPARED = ("moml", "ftml", "mogd")
"""The learners that are compared when none is named."""

DEFAULTS: Mapping[str, Any] = {
    "learner": {"name": "moml", "alpha": 0.5},
    "adaptation": {"name": "maml", "lr": 1.0},
    "data": {"name": "digits"},
    "stream": {"name": "s_mnist", "tasks": 100},
    "model": {"name": "mlp"},
    "local": {"steps": 10, "batch_size": 10, "lr": 0.1, "weight_decay": 1e-3, "clip": 3.0},
    "measures": {"ltm_every": 10},
    "checkpoint": {"every": 50},
}
"""What runs when nothing is said, where it is not the default of a signature."""

MAY_CHANGE = ("checkpoint", "device", "stream.tasks")
"""Keys that a continued run may change; the number of tasks upwards."""

SCALARS = {
    name: p
    for name, p in schema.signature(Online).items()
    if name in ("support", "hedged", "vectorised", "seed", "dtype", "device")
}


@dataclass(frozen=True)
class Config:
    """A complete configuration, as plain data.

    Attributes:
        values: every key with its value, as in ``config.yaml``.
        out: the run directory, if one was named.
        resume: the run directory to continue, if one was named.
    """

    values: dict[str, Any]
    out: Path | None = None
    resume: Path | None = None

    @property
    def learner(self) -> str:
        """The learner's name."""
        return self.values["learner"]["name"]


def resolve(words: Sequence[str], base: Path | None = None) -> list[Config]:
    """The configurations that words ask for: one, or one for each of several values ``a,b``.

    A list ``[a,b]`` of a setting of learner, adaptation or local is no such thing: it is a grid of experts.

    >>> [config.learner for config in resolve([])]
    ['moml', 'ftml', 'mogd']
    >>> resolve(["learner=moml", "learner.alpha=[1,5]", "tasks=9"])[0].values["learner"]
    {'name': 'moml', 'alpha': [1.0, 5.0]}
    >>> resolve(["learner=mogg"])
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: unknown learner 'mogg'; did you mean 'mogd'? There are: ...

    Raises:
        ConfigError: for anything unknown or of the wrong type.
    """
    recipe = {} if base is None else read(base)
    recipe = {key: value for key, value in recipe.items() if key not in (*RECORDED, "command")}
    given = [parse(word, {group: registry.names() for group, registry in GROUPS.items()}) for word in words]
    for first in [*(a.path[0] for a in given), *recipe]:
        keys = [*GROUPS, *RECORDS, *SCALARS, "tasks", "out", "resume"]
        if first not in keys:
            raise ConfigError(f"unknown key {first!r}; {nearest(first, keys)}")
    known = {a.path[0] for a in given} | set(recipe)
    if "resume" not in known and "learner" not in known:
        given = [parse(f"learner={','.join(COMPARED)}"), *given]
    found = []
    for one in combinations(given):
        values = dict(one)
        out, resume = (convert(key, values.pop((key,), None), Path | None) for key in ("out", "resume"))
        if resume is not None:
            if out is not None or base is not None or len(found):
                raise ConfigError("resume= continues one run as it is, so it cannot be combined with others or out=.")
            found.append(Config(_resumed(resume, values), resume=resume))
        else:
            found.append(Config(complete(recipe, values), out))
    return found


def complete(recipe: Mapping[str, Any], words: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Every key with its value: words over a recipe over what runs when nothing is said.

    Raises:
        ConfigError: for anything unknown or of the wrong type.
    """
    given: dict[str, Any] = {}
    for key, value in recipe.items():
        chosen = isinstance(value, str) and key in GROUPS
        given[key] = {"name": value} if chosen else dict(value) if isinstance(value, Mapping) else value
    for path, value in sorted(words.items(), key=lambda item: len(item[0])):
        path = ("stream", "tasks") if path == ("tasks",) else path
        if len(path) == 1 and path[0] in GROUPS:
            same = given.get(path[0], {}).get("name") == value
            given[path[0]] = {**(given[path[0]] if same else {}), "name": str(value)}
        elif len(path) == 1:
            given[path[0]] = value
        elif len(path) == 2 and path[0] in GROUPS | RECORDS:
            given.setdefault(path[0], {})[path[1]] = value
        else:
            raise ConfigError(f"unknown key {'.'.join(path)!r}; settings have one dot, like learner.alpha.")
    return _checked(given)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for group, registry in GROUPS.items():
        mine = dict(given.get(group, {}))
        usual = dict(DEFAULTS[group])
        entry = registry[mine.pop("name", usual["name"])]
        if entry.name == usual.pop("name"):
            mine = usual | mine
        where = f"{entry.kind} {entry.name!r}"
        values[group] = {"name": entry.name} | _gridded(
            group, where, f"{group}.", entry.factory, _open(group, entry), mine
        )
    for record, made in RECORDS.items():
        mine = given.get(record, {})
        if not isinstance(mine, Mapping):
            raise ConfigError(f"{record} is {mine!r}, but it must be a mapping of settings.")
        values[record] = _gridded(
            record, record, f"{record}.", made, schema.signature(made), {**DEFAULTS.get(record, {}), **mine}
        )
    for key, parameter in SCALARS.items():
        values[key] = plain(convert(key, given.get(key, default(Online, parameter)), parameter.annotation))
    return values


def _gridded(
    group: str,
    where: str,
    prefix: str,
    factory: Callable[..., Any],
    parameters: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Settings, of which those below a key of ``GRID`` may be lists of values: every value is checked by itself."""
    lists = {
        name: value
        for name, value in given.items()
        if group in GRID
        and isinstance(value, list)
        and name in parameters
        and get_origin(parameters[name].annotation) not in (tuple, list)
    }
    if any(not value for value in lists.values()):
        raise ConfigError(f"{prefix}{next(name for name, value in lists.items() if not value)} is an empty list.")
    first = {name: value[0] for name, value in lists.items()}
    found = settings(where, prefix, factory, parameters, {**given, **first})
    for name, value in lists.items():
        found[name] = [plain(convert(f"{prefix}{name}", one, parameters[name].annotation)) for one in value]
    return found


def _open(group: str, entry: Entry[Any]) -> Mapping[str, Any]:
    return schema.parameters(group, entry)


def _resumed(resume: Path, words: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The configuration of a stored run, with the changes that a continued run may have."""
    path = resume / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{str(resume)!r} is not a run directory: it has no config.yaml.")
    stored = {key: value for key, value in read(path).items() if key not in RECORDED}
    if "learner" not in stored:
        raise CheckpointError(f"{str(path)!r} names no learner: this is no online run that was begun here.")
    before, after = complete(stored, {}), complete(stored, words)
    old, new = (_flat(values) for values in (before, after))
    for key, value in new.items():
        allowed = key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE
        if old.get(key) != value and not (allowed and (key != "stream.tasks" or value > old[key])):
            raise ConfigError(
                f"{str(resume)!r} cannot be continued with another {key}; what may change is "
                "checkpoint, device, and tasks, upwards."
            )
    return after


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def build(config: Config) -> Online:
    """The experiment that a configuration describes.

    >>> online = build(resolve(["learner=moml", "learner.alpha=[1,5]", "adaptation.lr=[.3,.1]", "tasks=9"])[0])
    >>> len(online.experts), len(online.stream)
    (4, 9)

    Raises:
        ConfigError: for impossible settings.
        DataError: for data that are missing, or too few for such tasks.
    """
    values = config.values
    stream = build_stream(values)
    first = stream[0].train
    scalars = {key: value for key, value in values.items() if key in SCALARS}
    return Online(
        name=config.learner,
        experts=_experts(values),
        stream=stream,
        model=build_model(values, first.classes, tuple(first.x.shape[1:])),
        hedge=Hedge(**typed(schema.signature(Hedge), values["hedge"])),
        measures=Measures(**typed(schema.signature(Measures), values["measures"])),
        config=values,
        **typed(SCALARS, scalars),
    )


def build_stream(values: Mapping[str, Any]) -> TaskStream:
    """The tasks."""
    data = tuple(sorted((key, tuple(v) if isinstance(v, list) else v) for key, v in values["data"].items()))
    return task_stream(_source(data), _made("stream", values["stream"]), seed=values["seed"])


@functools.lru_cache(maxsize=1)
def _source(described: tuple[tuple[str, Any], ...]) -> Source:
    """The data source, kept for the next run of a comparison."""
    return _made("data", dict(described))


def build_model(values: Mapping[str, Any], classes: int, inputs: tuple[int, ...]) -> Callable[[], nn.Module]:
    """What makes the model; tried without memory first, so that one that does not fit is refused here."""
    entry = models[values["model"]["name"]]
    chosen = {key: value for key, value in values["model"].items() if key != "name"}
    make = functools.partial(
        entry.make, classes=classes, inputs=inputs, **typed(schema.parameters("model", entry), chosen)
    )
    with torch.device("meta"):
        make()
    return make


def _made(group: str, values: Mapping[str, Any]) -> Any:
    entry = GROUPS[group][values["name"]]
    return entry.make(**typed(entry.parameters, {key: value for key, value in values.items() if key != "name"}))


def _experts(values: Mapping[str, Any]) -> tuple[Expert, ...]:
    """The product of all lists of settings."""
    varied = [
        (group, name, value)
        for group in GRID
        for name, value in values[group].items()
        if isinstance(value, list) and _is_grid(group, values[group], name)
    ]
    experts = []
    for chosen in itertools.product(*(value for _, _, value in varied)):
        one = {group: dict(values[group]) for group in GRID}
        for (group, name, _), value in zip(varied, chosen, strict=True):
            one[group][name] = value
        local = Local(**typed(schema.signature(Local), one["local"]))
        experts.append(Expert(_made("learner", one["learner"]), _made("adaptation", one["adaptation"]), local))
    return tuple(experts)


def _is_grid(group: str, values: Mapping[str, Any], name: str) -> bool:
    parameters = schema.signature(Local) if group == "local" else GROUPS[group][values["name"]].parameters
    return get_origin(parameters[name].annotation) not in (tuple, list)
