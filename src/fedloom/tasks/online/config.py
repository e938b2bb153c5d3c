"""From what a person typed to an online experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.local import Local
from fedloom.core.registry import Registry
from fedloom.core.slots import adaptations
from fedloom.data import sources, task_stream
from fedloom.data.streams import TaskStream, streams
from fedloom.experiment.config import schema
from fedloom.experiment.config.choices import Config, Layout, settled
from fedloom.experiment.config.making import made, maker, source
from fedloom.experiment.config.resolve import flatten
from fedloom.experiment.config.schema import Checkpoints
from fedloom.experiment.config.tree import stored
from fedloom.experiment.config.values import convert, plain, typed
from fedloom.models import models
from fedloom.tasks.online.ensemble import ExpertConfig, grid
from fedloom.tasks.online.experiment import Measures, Online
from fedloom.tasks.online.hedge import Hedge
from fedloom.tasks.online.learners import learners

GRID: Mapping[str, Registry[Any] | type] = {"learner": learners, "adaptation": adaptations, "local": Local}
"""Keys below which a list is a grid of experts."""

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
"""Keys that are one value."""

LAYOUT = Layout(
    {
        "learner": learners,
        "adaptation": adaptations,
        "data": sources,
        "stream": streams,
        "model": models,
        "local": Local,
        "hedge": Hedge,
        "measures": Measures,
        "checkpoint": Checkpoints,
        **SCALARS,
    },
    DEFAULTS,
    compared=("moml", "ftml", "mogd"),
    short={"tasks": "stream.tasks"},
)


def resolve(words: Sequence[str], base: Path | None = None) -> list[Config]:
    """The configurations that words ask for: one, or one for each of several values ``a,b``.

    A list ``[a,b]`` of a setting of learner, adaptation or local is no such thing: it is a grid of experts.

    >>> [config["learner.name"] for config in resolve([])]
    ['moml', 'ftml', 'mogd']
    >>> resolve(["learner=moml", "learner.alpha=[1,5]", "tasks=9"])[0]["learner"]
    {'name': 'moml', 'alpha': [1.0, 5.0]}
    >>> resolve(["learner=mogg"])
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: unknown learner 'mogg'; did you mean 'mogd'? There are: ...

    Raises:
        ConfigError: for anything unknown or of the wrong type.
    """
    return LAYOUT.configs(words, base, complete, _resumed)


def complete(recipe: Mapping[str, Any], words: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Every key with its value: words over a recipe over what runs when nothing is said.

    Raises:
        ConfigError: for anything unknown or of the wrong type.
    """
    values = LAYOUT.laid(recipe, words)
    for key, given in values.items():
        values[key] = _gridded(key, given) if key in GRID else settled(key, LAYOUT.keys[key], given)
    return values


def _gridded(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of which some may be lists of values: every value is checked by itself."""
    lists = _lists(key, given)
    for name, values in lists.items():
        if not values:
            raise ConfigError(f"{key}.{name} is an empty list.")
    found = settled(key, GRID[key], {**given, **{name: values[0] for name, values in lists.items()}})
    kinds = _parameters(key, given)
    for name, values in lists.items():
        found[name] = [plain(convert(f"{key}.{name}", value, kinds[name].annotation)) for value in values]
    return found


def _lists(key: str, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The settings that are a list where one value belongs."""
    several = {name for name, p in _parameters(key, given).items() if get_origin(p.annotation) not in (tuple, list)}
    return {name: value for name, value in given.items() if name in several and isinstance(value, list)}


def _parameters(key: str, given: Mapping[str, Any]) -> schema.Parameters:
    held = GRID[key]
    return schema.parameters(held[given["name"]]) if isinstance(held, Registry) else schema.signature(held)


def _resumed(resume: Path, words: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The configuration of a stored run, with the changes that a continued run may have."""
    kept = stored(resume)
    if "learner" not in kept:
        path = str(resume / "config.yaml")
        raise CheckpointError(f"{path!r} names no learner: this is no online run that was begun here.")
    before, after = complete(kept, {}), complete(kept, words)
    old = flatten(before)
    for key, value in flatten(after).items():
        allowed = key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE
        if old.get(key) != value and not (allowed and (key != "stream.tasks" or value > old[key])):
            raise ConfigError(
                f"{str(resume)!r} cannot be continued with another {key}; what may change is "
                "checkpoint, device, and tasks, upwards."
            )
    return after


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
    return Online(
        name=config["learner.name"],
        experts=_experts(values),
        stream=stream,
        model=maker(values["model"], stream[0].train),
        hedge=made(Hedge, values["hedge"]),
        measures=made(Measures, values["measures"]),
        config=values,
        **typed(SCALARS, {key: values[key] for key in SCALARS}),
    )


def build_stream(values: Mapping[str, Any]) -> TaskStream:
    """The tasks."""
    return task_stream(source(values["data"]), made(streams, values["stream"]), seed=values["seed"])


def _experts(values: Mapping[str, Any]) -> tuple[ExpertConfig, ...]:
    """The product of all lists of settings."""
    first = {key: dict(values[key]) for key in GRID}
    over: dict[str, list[Any]] = {}
    for key in GRID:
        for name, several in _lists(key, values[key]).items():
            first[key][name] = several[0]
            over[f"{key}.{name}"] = several
    learner, adaptation, local = (made(held, first[key]) for key, held in GRID.items())
    return grid(learner, adaptation, local, over)
