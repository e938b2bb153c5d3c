"""What a server may set at a node: by key, numbers of a range and words of a closed list.

The ranges are those of the settings' own annotations (``fedloom.base.ranges``). A number whose annotation has no upper
end is bounded by its type, and a text that is no word of a list keeps its default, so that none names a file, an
address or code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from math import inf
from typing import Annotated, Any, Literal, get_args, get_origin

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Range, Words, elements, range_error, range_of
from fedloom.base.settings import signature, to_plain, type_in_words
from fedloom.compute import computes
from fedloom.config.keys import METHOD
from fedloom.core.local import Local
from fedloom.core.slots import SEVERAL, SLOTS
from fedloom.data.augment import augmentations
from fedloom.experiment.evaluation import Evaluation
from fedloom.models import models
from fedloom_apps.deploy.messages import MODERATE

WHOLE = 1 << 20  # largest whole number whose range has no upper end
LONG = 10_000  # values of a list, or layers of a network, which take memory and time before they have a parameter
NAMES = ("what", "metric", "metrics", "slices", "bounds", "rates")
"""Settings that name metrics, slices of an update or parameters: words like ``drift/control`` and ``body.0``."""
NAME = re.compile(r"[A-Za-z0-9_]{1,40}([./][A-Za-z0-9_]{1,40}){0,9}")
WORDS = {
    "norm": Literal["none", "group", "batch"],
    "padding": Literal["valid", "same"],
    "activation": Literal["relu", "swish"],
    "positions": Literal["last", "every"],
}
"""The settings of models that are words."""
DEEP = ("model.depth", "model.layers")
DOWNLOADING = ("distilbert",)  # its configuration is on the hub, even without parameters


def check(values: Mapping[str, Any]) -> None:
    """Refuse a configuration with a setting that is not for a server to set."""
    name = values["model"]["name"]
    if name in DOWNLOADING:
        raise ConfigError(
            f"model {name!r} would make nodes download a configuration; choose a model that is defined by sizes."
        )
    if values["model"].get("pretrained"):
        raise ConfigError("model.pretrained=true makes nodes download weights; set it to false.")
    if len(values["augment"]) > LONG:
        raise ConfigError(f"augment has {len(values['augment']):,} steps, where {LONG:,} are allowed.")
    for place, parameters, settings in _settings_by_place(values):
        for key in settings.keys() & parameters.keys():
            value, parameter = settings[key], parameters[key]
            if parameter.default is not parameter.empty and value == to_plain(parameter.default):
                continue
            if wrong := _fault(f"{place}.{key}", value, parameter.annotation):
                raise ConfigError(f"{place}.{key} {wrong}.")


def table() -> dict[str, str]:
    """Every setting that a server may set, and what it may be, in words.

    >>> table()["local.momentum"], table()["method.drift=dynamic.alpha"], "model=timm.weights" in table()
    ('a number in [0, 1)', 'a number greater than 0', False)
    """
    settings = [
        (f"{place}.{key}", p.annotation)
        for place, parameters in _parameters_by_place()
        for key, p in parameters.items()
    ]
    return {key: type_in_words(_kind(key, kind)) for key, kind in settings if _is_closed(key, _kind(key, kind))}


def _settings_by_place(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Parameter], Mapping[str, Any]]]:
    """The settings of a configuration by place, with the parameters of what stands there."""
    method, model, compute = values["method"], values["model"], values["compute"]
    yield "local", signature(Local), values["local"]
    yield "evaluation", signature(Evaluation), values["evaluation"]
    yield "model", models[model["name"]].parameters, model
    yield "compute", computes[compute["name"]].parameters, compute
    yield "method", METHOD.registry[method["name"]].parameters, method
    for choice in values["augment"]:
        step = choice if isinstance(choice, Mapping) else {"name": choice}
        yield "augment", augmentations[step["name"]].parameters, step
    for slot in SLOTS.keys() & method.keys():
        terms = method[slot] if slot in SEVERAL else {method[slot]["name"]: method[slot]}
        for name, term in terms.items():
            yield f"method.{slot}", SLOTS[slot][name].parameters, term


def _parameters_by_place() -> Iterator[tuple[str, Mapping[str, Parameter]]]:
    """The parameters of everything that a server may choose, by place and name."""
    yield "local", signature(Local)
    yield "evaluation", signature(Evaluation)
    registries = {f"method.{slot}": registry for slot, registry in SLOTS.items()}
    for place, registry in ({"model": models, "augment": augmentations, "compute": computes} | registries).items():
        for entry in registry:
            hidden = {"classes", "inputs", "pretrained"} if place == "model" else set[str]()
            if entry.name not in DOWNLOADING:
                yield f"{place}={entry.name}", {key: p for key, p in entry.parameters.items() if key not in hidden}


def _kind(key: str, annotation: Any) -> Any:
    """The type of a setting with its range."""
    return WORDS.get(key.rpartition(".")[2], annotation) if key.startswith("model") else annotation


def _is_closed(key: str, kind: Any) -> bool:
    """Whether a type holds numbers, truth values, words of a list, and names of slices or metrics."""
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) is Callable:  # which no message holds
        return True
    if inner := get_args(kind):
        return all(_is_closed(key, part) for part in (inner[:1] if get_origin(kind) is Annotated else inner))
    return kind in (int, float, bool, type(None), ...) or (kind is str and key.rpartition(".")[2] in NAMES)


def _fault(key: str, value: Any, annotation: Any) -> str | None:
    """What is wrong with the value of a setting, or None."""
    bounds = range_of(_kind(key, annotation))
    long = len(value) if isinstance(value, list | tuple | Mapping) else value if key in DEEP else 0
    if long > LONG:
        return f"asks for {long:,} values or layers, where {LONG:,} are allowed"
    for item in [*elements(value), *(value if isinstance(value, Mapping) else ())]:
        if isinstance(item, str) and not isinstance(bounds, Words):
            if key.rpartition(".")[2] not in NAMES or not NAME.fullmatch(item):
                return "is not for a server to set"
        elif bounds is not None and (wrong := range_error(bounds, item)):
            return wrong
        elif isinstance(item, int | float) and not isinstance(item, bool):
            has_end = isinstance(bounds, Range) and (bounds.high < inf or (bounds.infinite and item == inf))
            if not has_end and abs(item) > (most := WHOLE if isinstance(item, int) else MODERATE):
                return f"must lie within ±{most:g}, not {item:g}"
        elif not isinstance(item, str | bool | None):
            return "is not for a server to set"
    return None
