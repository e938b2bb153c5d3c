"""A method as a function of the settings of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from fedloom.base.documentation import documentation
from fedloom.base.errors import ConfigError, nearest
from fedloom.base.settings import convert_argument
from fedloom.core.method import Method
from fedloom.core.slots import SEVERAL


@cache
def described(kind: type) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Types and descriptions of a class's fields; many methods share a part."""
    return get_type_hints(kind, include_extras=True), documentation(kind)[1]


def factory(
    method: Method, summary: str, note: str = "", names: Mapping[str, str] | None = None
) -> Callable[..., Method]:
    """Return a function that makes the method from its parts' settings, with name, signature and docstring.

    Args:
        method: the composition, with all settings at their defaults.
        summary: one line on what it does.
        note: further sentences: the place in the paper, requirements.
        names: the method's name for a setting, by place and field like ``server.lr``; "" fixes the setting. A setting
            that several parts have under one name is set in all of them.
    """
    parts, names, places = method.parts, names or {}, dict[str, list[tuple[str, str]]]()
    parameters, lines = [], []
    for place, part in parts.items():
        types, helps = described(type(part))
        for field in fields(part):  # pyright: ignore[reportArgumentType]
            name = names.get(f"{place}.{field.name}", field.name)
            places.setdefault(name, []).append((place, field.name))
            if name and len(places[name]) == 1:
                default, kind = getattr(part, field.name), Parameter.POSITIONAL_OR_KEYWORD
                parameters.append(Parameter(name, kind, default=default, annotation=types[field.name]))
                lines.append(f"    {name}: {helps.get(field.name, '')}")
    signature = Signature(parameters, return_annotation=Method)

    def compose(*values: Any, **settings: Any) -> Method:
        changes: dict[str, dict[str, Any]] = {place: {} for place in parts}
        what = f"method {method.name!r}"
        for name in settings:
            if name not in signature.parameters:
                raise ConfigError(f"{what} has no setting {name!r}; {nearest(name, signature.parameters, what)}")
        for name, value in signature.bind(*values, **settings).arguments.items():
            value = convert_argument(f"{what}: {name}", value, signature.parameters[name].annotation)
            for place, field in places[name]:
                changes[place][field] = value
        new: dict[str, Any] = {}
        for place, part in parts.items():
            try:
                new[place] = replace(part, **changes[place])  # pyright: ignore[reportArgumentType]
            except ConfigError as error:
                renamed = ((names.get(f"{place}.{field}", field), field) for field in changes[place])
                sources = [f"{name!r} sets {place}.{field}" for name, field in renamed if name != field]
                raise ConfigError(f"{error} In {what}, {' and '.join(sources)}." if sources else str(error)) from error
        for slot in SEVERAL:
            new[slot] = tuple(new.pop(place) for place in parts if place.startswith(f"{slot}."))
        return replace(method, **new)

    compose.__name__ = compose.__qualname__ = method.name
    compose.__doc__ = "\n\n".join(filter(None, [summary, note, "\n".join(["Args:", *lines] if lines else [])]))
    compose.__annotations__ = {p.name: p.annotation for p in parameters}
    compose.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return compose
