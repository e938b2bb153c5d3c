"""Values of settings: converted to the type that a factory's signature asks for, or refused in one sentence."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.renamed import hint

Parameters = Mapping[str, inspect.Parameter]


def convert(key: str, value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type: whole floats become integers, lists tuples, one thing a list of one.

    >>> convert("rounds", 1e3, int), convert("hidden", [64, 32], tuple[int, ...]), convert("cohort", None, int | None)
    (1000, (64, 32), None)
    >>> convert("local.lr", "fast", float)
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: local.lr is 'fast', but it must be a number.

    Raises:
        ConfigError: if it cannot be that type, saying what was given and what is expected.
    """
    try:
        return _convert(value, annotation)
    except TypeError:
        if get_origin(annotation) is Literal and isinstance(value, str):
            raise ConfigError(f"{key} is {value!r}; {nearest(value, map(str, get_args(annotation)))}") from None
        raise ConfigError(f"{key} is {shown(value)}, but it must be {expected(annotation)}.") from None


def _convert(value: Any, annotation: Any) -> Any:
    """As ``convert``; a ``TypeError`` says that it cannot be done."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in (Any, object, inspect.Parameter.empty):
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        for option in sorted(inner, key=lambda option: option is str):  # text last: it would take numbers too
            try:
                return _convert(value, option)
            except TypeError:
                continue
    elif (origin is Literal and value in inner) or (annotation is bool and isinstance(value, bool)):
        return value
    elif annotation in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isnan(value) and (annotation is float or (math.isfinite(value) and value == value // 1)):
            return annotation(value)
    elif annotation is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    elif annotation is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    elif origin in (tuple, list, Sequence):
        items = [value] if isinstance(value, str | int | float | Mapping) else value
        if isinstance(items, list | tuple):
            return _sequence(items, origin, inner)
    elif isinstance(value, Mapping) and (origin or annotation) in (Mapping, dict):
        return {str(key): _convert(item, inner[1] if inner else Any) for key, item in value.items()}
    elif isinstance(annotation, type) and isinstance(value, annotation) and annotation not in (int, float):
        return value
    raise TypeError


def _sequence(items: Sequence[Any], origin: Any, inner: tuple[Any, ...]) -> Any:
    if origin is not tuple or not inner or inner[-1] is Ellipsis:
        kinds = (inner[0] if inner else Any,) * len(items)
    elif len(inner) == len(items):
        kinds = inner
    else:
        raise TypeError
    made = [_convert(item, kind) for item, kind in zip(items, kinds, strict=True)]
    return tuple(made) if origin is tuple else made


def expected(annotation: Any) -> str:
    """A type in words.

    >>> expected(int | None), expected(tuple[int, ...]), expected(dict[str, float])
    ('a whole number or null', 'a list of whole numbers', 'a mapping of names to values')
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        options = sorted(inner, key=lambda option: option is type(None))
        return " or ".join(dict.fromkeys(map(expected, filter(_typeable, options))) or map(expected, options))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (tuple, list, Sequence):
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            return f"a list of {len(inner)} values ({', '.join(expected(kind) for kind in inner)})"
        plural = {int: "whole numbers", float: "numbers", str: "names"}
        return f"a list of {plural.get(inner[0] if inner else None, 'values')}"
    if (origin or annotation) in (Mapping, dict):
        return "a mapping of names to values"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    words |= {type(None): "null"}
    return words.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _typeable(annotation: Any) -> bool:
    """Whether a value of that type can be written in a configuration; some settings take Python objects as well."""
    given = (bool, int, float, str, Path, type(None), Mapping, Sequence)
    return not isinstance(annotation, type) or issubclass(annotation, given)


def shown(value: Any) -> str:
    """A value as it is written on the command line, in quotes if it is text.

    >>> shown(None), shown(True), shown("x"), shown([1, None])
    ('null', 'true', "'x'", '[1, null]')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def plain(value: Any) -> Any:
    """``value`` as YAML can hold it: tuples become lists, paths text.

    Raises:
        TypeError: if it is something else, an object that only Python code can give.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    raise TypeError


def default(factory: Any, parameter: inspect.Parameter) -> Any:
    """The default of a factory's parameter; ``inspect.Parameter.empty`` if it has none."""
    if is_dataclass(factory):
        field = next((f for f in fields(factory) if f.name == parameter.name), None)
        if field is not None and field.default_factory is not MISSING:
            return field.default_factory()
    return parameter.default


def settings(where: str, prefix: str, factory: Any, parameters: Parameters, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a factory as plain data: those given, checked and converted, and the others at their defaults.

    Args:
        where: what has these settings, to begin sentences with, like ``method 'feddyn'``.
        prefix: the key under which they are set, like ``method.``.
        factory: whose settings they are.
        parameters: its parameters, with resolved annotations.
        given: values by name.

    Raises:
        ConfigError: for an unknown setting, a missing one, or one of the wrong type.
    """
    for name in given:
        if name not in parameters:
            tip = hint(where, name, parameters) if parameters else "it has none."
            raise ConfigError(f"{where} has no setting {name!r}; {tip}")
    result: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in given:
            value = convert(f"{prefix}{name}", given[name], parameter.annotation)
        else:
            value = default(factory, parameter)
        if value is inspect.Parameter.empty:
            raise ConfigError(f"{where} needs a value for {name!r}; give it as {prefix}{name}=….")
        try:
            result[name] = plain(value)
        except TypeError:  # an object: a default that only Python code can replace
            if name in given:
                raise ConfigError(f"{prefix}{name} cannot be set from a configuration, only from Python.") from None
    return result


def typed(parameters: Parameters, values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings as the types that the factory asks for: the inverse of ``plain``."""
    kinds = {name: parameters[name].annotation if name in parameters else Any for name in values}  # refused when made
    return {name: convert(name, value, kinds[name]) for name, value in values.items()}
