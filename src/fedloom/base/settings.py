"""Settings as plain data: validated and converted to the types of a factory's signature, and back.

The signature of a factory (a function or a frozen dataclass) *is* its schema: names, types and defaults are read from
it and stated nowhere else.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from operator import is_
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedloom.base.errors import ConfigError, in_words, nearest
from fedloom.base.ranges import check_ranges

LARGEST = 2**63 - 1
LONG = 200  # characters of a value that an error shows
EMPTY = inspect.Parameter.empty
Parameters = Mapping[str, inspect.Parameter]


@cache
def signature(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be given by name, with annotations resolved to types and defaults to values.

    All callers share what is returned.
    """
    constructor = factory.__init__ if inspect.isclass(factory) and not is_dataclass(factory) else factory
    hints = get_type_hints(constructor, include_extras=True)
    dataclass_fields = getattr(factory, "__dataclass_fields__", {}).values()
    default_factories = {f.name: f.default_factory for f in dataclass_fields if f.default_factory is not MISSING}
    settable = {}
    for name, p in inspect.signature(factory).parameters.items():
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            default = default_factories[name]() if name in default_factories else p.default
            settable[name] = p.replace(annotation=hints.get(name, p.annotation), default=default)
    return settable


def validate(
    where: str, prefix: str, parameters: Parameters, values: Mapping[str, Any], grid: bool = False
) -> dict[str, Any]:
    """All settings of a factory as plain data: those in ``values``, validated and converted, else the defaults.

    Args:
        where: what has these settings, as the start of error messages, like ``method 'feddyn'``.
        prefix: the configuration key they are under, like ``method.``.
        parameters: the factory's parameters.
        values: settings by name.
        grid: whether a list may be given for a single-valued setting; its elements are validated one by one.
    """
    for name in values:
        if name not in parameters:
            advice = nearest(name, parameters, where) if parameters else "it has none."
            raise ConfigError(f"{where} has no setting {name!r}; {advice}")
    plain: dict[str, Any] = {}
    for name, parameter in parameters.items():
        key, value, kind = f"{prefix}{name}", values.get(name, parameter.default), parameter.annotation
        if value is EMPTY:
            raise ConfigError(f"{where} needs a value for {name!r}; give it as {key}=….")
        if name in values and grid and is_grid(kind, value):
            if not value:
                raise ConfigError(f"{key} is an empty list.")
            value = [convert(key, element, kind) for element in value]
        elif name in values:
            value = convert(key, value, kind)
        try:
            plain[name] = to_plain(value.resolve() if isinstance(value, Path) else value)  # holds from any folder
        except TypeError:  # a default that only Python code can override
            if name in values:
                raise ConfigError(f"{key} cannot be set from a configuration, only from Python.") from None
    return plain


def is_grid(annotation: Any, value: Any) -> bool:
    """Whether ``value`` is a list although the setting has a single value."""
    return isinstance(value, list) and get_origin(bare_type(annotation)) not in (tuple, list, Sequence)


@cache
def bare_type(annotation: Any) -> Any:
    """The type itself of an annotation with a range.

    >>> from fedloom.base.ranges import Positive
    >>> bare_type(Positive)
    <class 'float'>
    """
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def to_plain(value: Any) -> Any:
    """``value`` in a form that YAML can represent: tuples become lists, paths strings.

    Raises:
        TypeError: for an object that exists only in Python.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    raise TypeError(f"{value!r} is not plain data")


def from_plain(parameters: Parameters, values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings converted to the types of the signature: the inverse of ``to_plain``."""
    return {name: convert(name, value, parameters[name].annotation) for name, value in values.items()}


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


def short_repr(record: Any) -> str:
    """A dataclass as one would write it: with the fields that are not at their defaults.

    >>> from fedloom.parts.drift import FedDynDrift
    >>> short_repr(FedDynDrift(alpha=0.5))
    'FedDynDrift(alpha=0.5)'
    """
    words = []
    for entry in fields(record):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if entry.repr and (text := repr(getattr(record, entry.name))) != repr(default):
            words.append(f"{entry.name}={text}")
    return f"{type(record).__name__}({', '.join(words)})"


def convert(key: str, value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type: integral floats become ints, lists tuples, a single value a list of one.

    Raises:
        ConfigError: if it cannot be that type, saying what was given and what is expected.
    """
    try:
        return _convert(value, annotation)
    except OverflowError:  # beyond every float
        raise ConfigError(f"{key} holds a whole number of hundreds of digits; give one below 1e308.") from None
    except TypeError:
        if get_origin(annotation) is Literal and isinstance(value, str):
            raise ConfigError(f"{key} is {value!r}; {nearest(value, map(str, get_args(annotation)))}") from None
        if isinstance(value, int | float) and LARGEST < abs(value) < 1e308:
            raise ConfigError(f"{key} is {value:.3g}, but whole numbers go up to {LARGEST:.3g}.") from None
        text = format_value(value)
        text = text if len(text) <= LONG and "\n" not in text else in_words(value)  # of an array, its shape
        raise ConfigError(f"{key} is {text}, but it must be {type_in_words(annotation)}.") from None


def _convert(value: Any, annotation: Any) -> Any:
    """``convert``, raising ``TypeError`` if it is impossible."""
    annotation = bare_type(annotation)
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in (Any, object, EMPTY):
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        for option in sorted(inner, key=partial(is_, str)):  # str last: it accepts numbers too
            try:
                return _convert(value, option)
            except TypeError:
                continue
    elif (origin is Literal and value in inner) or (annotation is bool and isinstance(value, bool)):
        return value
    elif annotation in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isnan(value) and (annotation is float or (math.isfinite(value) and value == value // 1)):
            if annotation is int and abs(value) > LARGEST:
                raise TypeError
            return annotation(value)
    elif annotation is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    elif annotation is Path and isinstance(value, str | Path) and "\0" not in str(value):
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
    values = [_convert(item, kind) for item, kind in zip(items, kinds, strict=True)]
    return tuple(values) if origin is tuple else values


def convert_argument(key: str, value: Any, annotation: Any) -> Any:
    """``convert`` for a value given in Python: NumPy's numbers are numbers, and only plain types are checked.

    >>> convert_argument("method.alpha", "big", float)
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: method.alpha is 'big', but it must be a number.
    """
    value = value.item() if type(value).__module__ == "numpy" and value.ndim == 0 else value
    numeric = isinstance(value, float) and not abs(value) <= LARGEST  # the factory's own range checks name the range
    return value if numeric or not _is_plain(annotation) else convert(key, value, annotation)


def check_fields(record: Any, prefix: str = "") -> None:
    """Convert the fields of a frozen dataclass to their annotated types and check their ranges.

    A mapping becomes a nested record.
    """
    for name, parameter in _signature(type(record)).items():
        value, kind = getattr(record, name), parameter.annotation
        if (
            type(value) is type(parameter.default)
            and name in _stable_defaults(type(record))
            and value == parameter.default
        ):
            continue
        if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
            nested = _signature(kind)
            if unknown := next((key for key in value if key not in nested), None):
                raise ConfigError(f"{prefix}{name} has no setting {unknown!r}; {nearest(str(unknown), nested, name)}")
            value = kind(**value)
        elif is_dataclass(kind) and isinstance(kind, type) and not isinstance(value, kind):
            raise ConfigError(
                f"{prefix}{name} is {in_words(value)}, but it must be {kind.__name__}(...) or a mapping of "
                "its settings."
            )
        else:
            value = convert_argument(prefix + name, value, kind)
        object.__setattr__(record, name, value)
    check_ranges(record, prefix)


@cache
def _signature(kind: type) -> Parameters:
    """The fields of a dataclass with their types; none if only its module knows one of them."""
    try:
        return signature(kind)
    except NameError:
        return {}


@cache
def _stable_defaults(kind: type) -> frozenset[str]:
    """The fields of a dataclass whose default is a single value that conversion leaves as it is."""
    parameters = {
        name: p for name, p in _signature(kind).items() if isinstance(p.default, bool | int | float | str | None)
    }
    return frozenset(
        name
        for name, p in parameters.items()
        if type(convert_argument(name, p.default, p.annotation)) is type(p.default)
    )


@cache
def _is_plain(annotation: Any) -> bool:
    """Whether all values of a type can be written in a configuration.

    >>> _is_plain(tuple[int, ...] | None), _is_plain(Callable[[], int]), _is_plain(Mapping[str, float])
    (True, False, True)
    """
    annotation = bare_type(annotation)
    if annotation is Ellipsis or get_origin(annotation) is Literal:
        return True
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, Sequence, Mapping, dict):
        return all(map(_is_plain, get_args(annotation)))
    return annotation in (bool, int, float, str, Path, type(None), Any)


def type_in_words(annotation: Any) -> str:
    """A type in words.

    >>> type_in_words(int | None), type_in_words(tuple[int, ...]), type_in_words(dict[str, float])
    ('a whole number or null', 'a list of whole numbers', 'a mapping of names to numbers')
    >>> from fedloom.base.ranges import Count, Decay
    >>> type_in_words(Count | None), type_in_words(Decay)
    ('a whole number of at least 1 or null', 'a number in [0, 1)')
    """
    if get_origin(annotation) is Annotated:
        return " ".join(filter(None, (type_in_words(bare_type(annotation)), *map(str, get_args(annotation)[1:]))))
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        options = sorted(inner, key=lambda option: option is type(None))
        return " or ".join(
            dict.fromkeys(map(type_in_words, filter(_is_typeable, options))) or map(type_in_words, options)
        )
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    plural = {int: "whole numbers", float: "numbers", str: "names"}
    if origin in (tuple, list, Sequence):
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            return f"a list of {len(inner)} values ({', '.join(map(type_in_words, inner))})"
        return f"a list of {plural.get(bare_type(inner[0]) if inner else None, 'values')}"
    if (origin or annotation) in (Mapping, dict):
        return f"a mapping of names to {plural.get(bare_type(inner[1]) if inner else None, 'values')}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    words |= {type(None): "null"}
    return words.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _is_typeable(annotation: Any) -> bool:
    """Whether values of a type can be written in a configuration; some settings also accept Python objects."""
    annotation = bare_type(annotation)
    types = (bool, int, float, str, Path, type(None), Mapping, Sequence)
    is_class = isinstance(annotation, type) and get_origin(annotation) is None  # Python 3.10 calls list[int] a type
    return not is_class or issubclass(annotation, types)


def format_value(value: Any) -> str:
    """A value as it is written on the command line; strings are quoted.

    >>> format_value(None), format_value(True), format_value("x"), format_value([1, None])
    ('null', 'true', "'x'", '[1, null]')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def format_unquoted(value: Any) -> str:
    """A value as typed on the command line, without quotes."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_unquoted, value))}]"
    return value if isinstance(value, str) and value else format_value(value)
