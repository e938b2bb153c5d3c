"""Shapes in annotations, such as ``Float[Tensor, "C P"]``, are checked while tests run.

Functions of the packages that are checked are wrapped when their modules are imported: annotated arguments, the fields
of records among them (``ctx.received``) and the result must fit each other, so that a name of a dimension has one size
in a call. An override is held to the annotations of what it overrides. Whether a call fits depends on shapes and types
alone; each combination is looked at once, by jaxtyping and beartype, among the first ``CALLS`` of a function in a test:
those that follow are further steps of the same clients.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
import sys
import typing
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

import jaxtyping
import pytest
from beartype.door import is_bearable
from torch import Tensor, compiler

FORMS = "fedloom.base.tree"  # which says what ``Float`` and the like are
KINDS = ("Bool", "Float", "Int", "Shaped")
Hints = dict[str, Any]

CALLS = 6

_records: dict[type, Hints] = {}  # the annotated fields of NamedTuples and dataclasses


class Now:
    """The test that runs; each has calls of its own."""

    test = 0


class Finder:
    """Finds modules of some packages, to wrap what they define when they have been executed."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{package}.") for package in self.packages):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_wrap(module: ModuleType) -> None:
                execute(module)
                if name == FORMS:
                    vars(module).update({kind: getattr(jaxtyping, kind) for kind in KINDS})
                wrap(module)

            spec.loader.exec_module = then_wrap  # type: ignore[method-assign]
        return spec


def check_shapes(*packages: str) -> None:
    """Check shapes in these packages, none of which may have been imported."""
    assert not any(package in sys.modules for package in packages), "modules were imported before"
    sys.meta_path.insert(0, Finder(packages))  # type: ignore[arg-type]


def wrap(module: ModuleType) -> None:
    """Replace what a module defines by what checks its annotations."""
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for kind in classes:
        fields = shapes_of(vars(kind).get("__annotations__", {}), module, of_records=False)
        if fields and (issubclass(kind, tuple) or dataclasses.is_dataclass(kind)):
            _records[kind] = fields
    for name, function in list(vars(module).items()):
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            setattr(module, name, with_checks(function, shapes_of(function.__annotations__, module)))
    for kind in classes:
        for name, member in list(vars(kind).items()):
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            function = function.fget if isinstance(function, property) else function
            if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
                continue
            if name == "__init__" and kind in _records:
                continue  # its fields are looked at where it is received
            hints = inherited(kind, name) | shapes_of(function.__annotations__, module)
            wrapper = with_checks(function, hints)
            if wrapper is not function:
                outer = type(member) if isinstance(member, classmethod | staticmethod | property) else None
                setattr(kind, name, outer(wrapper) if outer else wrapper)


def shapes_of(annotations: dict[str, Any], module: ModuleType, of_records: bool = True) -> Hints:
    """Those annotations that say a shape, or name a record whose fields do."""
    hints = {}
    for name, text in annotations.items():
        text = text.__forward_arg__ if isinstance(text, typing.ForwardRef) else text
        try:
            hint = eval(text, vars(module)) if isinstance(text, str) else text
        except (NameError, TypeError):  # imported for type checkers alone
            continue
        if has_shape(hint, of_records):
            hints[name] = hint
    return hints


def has_shape(hint: Any, of_records: bool) -> bool:
    """Whether a hint holds a shape, or a record with some; what functions take and return is not looked at."""
    if isinstance(hint, type) and (issubclass(hint, jaxtyping.AbstractArray) or (of_records and hint in _records)):
        return True
    return typing.get_origin(hint) is not Callable and any(
        has_shape(argument, of_records) for argument in typing.get_args(hint)
    )


def inherited(kind: type, name: str) -> Hints:
    """The annotations of the method that a method overrides."""
    for base in kind.__mro__[1:]:
        member = vars(base).get(name)
        member = member.fget if isinstance(member, property) else member
        if hints := getattr(member, "shapes", None):
            return hints
    return {}


def with_checks(function: Callable[..., Any], hints: Hints) -> Callable[..., Any]:
    """The function, which looks at the shapes of its arguments and result; itself if none is annotated."""
    if inspect.isgeneratorfunction(function):
        hints = {name: hint for name, hint in hints.items() if name != "return"}
    if not hints:
        return function
    names = tuple(inspect.signature(function).parameters)
    places = tuple((name, names.index(name)) for name in hints if name in names)
    with_result, combinations, test, left = "return" in hints, set(), -1, 0

    def wrapper(*inputs: Any, **keywords: Any) -> Any:
        nonlocal test, left
        result = function(*inputs, **keywords)
        if test != Now.test:
            test, left = Now.test, CALLS
        if not left or compiler.is_compiling():  # there sizes are symbols, also where a model is exported
            return result
        left -= 1
        key: list[Any] = []
        for name, at in places:
            add_form(inputs[at] if at < len(inputs) else keywords.get(name), key)
        if with_result:
            add_form(result, key)
        if (combination := tuple(key)) not in combinations:
            values = {name: inputs[at] for name, at in places if at < len(inputs)} | keywords
            values |= {"return": result} if with_result else {}
            look(function, {name: (hint, values[name]) for name, hint in hints.items() if name in values})
            combinations.add(combination)
        return result

    # warnings name the first caller outside FedLoom, so the wrapper stands in the module of what it wraps
    inside = FunctionType(
        wrapper.__code__, globals() | {"__name__": function.__module__}, None, None, wrapper.__closure__
    )
    functools.update_wrapper(inside, function)
    inside.shapes = hints  # type: ignore[attr-defined]
    return inside


def add_form(value: Any, key: list[Any]) -> None:
    """Append all of a value on which its fitting depends."""
    kind = type(value)
    if kind is Tensor:
        key.append(value.shape)
        key.append(value.dtype)
    elif kind in _records:
        for name in _records[kind]:
            add_form(getattr(value, name), key)
    elif isinstance(value, Tensor):
        key += (kind, value.shape, value.dtype)
    elif kind is tuple or kind is list:
        key.append(len(value))
        for item in value:
            add_form(item, key)
    else:
        key.append(kind)


def look(function: Callable[..., Any], values: dict[str, tuple[Any, Any]]) -> None:
    """Fail the test if values do not fit their annotations, all with the same sizes by the names of dimensions.

    Of two records of one kind each has sizes of its own, as a support and a query batch have. Empty vectors in records
    stand for what is not there, like the logits of a model that makes images.
    """
    of_kind = Counter(type(value) for _, value in values.values())
    flat: dict[str, tuple[Any, Any]] = {}
    for name, (hint, value) in values.items():
        if (hints := _records.get(type(value))) is None:
            flat |= {name: (hint, value)} if has_shape(hint, of_records=False) else {}
            continue
        fields = {f"{name}.{field}": (inner, getattr(value, field)) for field, inner in hints.items()}
        fields = {field: pair for field, pair in fields.items() if not is_nothing(pair[1])}
        if of_kind[type(value)] > 1:
            look(function, fields)
        else:
            flat |= fields
    state = random.getstate()  # beartype draws the items of sequences that it looks at
    with jaxtyping.jaxtyped("context"):
        for name, (hint, value) in flat.items():
            if isinstance(value, dict | list | tuple) and isinstance(hint, type):
                continue  # a structure that a user's collate or model returned in place of a tensor
            if not is_bearable(value, hint):
                sizes = ", ".join(
                    f"{label} {list(it.shape)}" for label, (_, it) in flat.items() if isinstance(it, Tensor)
                )
                pytest.fail(f"{function.__module__}.{function.__qualname__}: {name} is no {hint} among {sizes}")
    random.setstate(state)


def is_nothing(value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == (0,)
