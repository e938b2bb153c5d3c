"""Descriptions of a user's functions and parts without memory addresses: equal where the same is computed."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedloom.core.parts import Part


def part(one: Part) -> str:
    """Describe a part for the identity of a run: its ``repr``, unless that tells too little or too much.

    Long tensors are abbreviated there, and functions have memory addresses. A user's own class has a checksum of its
    code beside it, as a user's own loss has.

    >>> from fedloom.parts.adaptation import Maml
    >>> part(Maml(lr=0.5)) == repr(Maml(lr=0.5))
    True
    """
    settings = {field.name: getattr(one, field.name) for field in fields(one) if field.repr}
    told = repr(one)
    if type(one).__dataclass_params__.repr and any(map(_obscure, settings.values())):  # pyright: ignore[reportAttributeAccessIssue]
        told = f"{type(one).__qualname__}({', '.join(f'{name}={plain(value)}' for name, value in settings.items())})"
    return told + "".join(f" {code}" for code in _codes(type(one)))


def _obscure(value: Any) -> bool:
    """Whether the ``repr`` of a setting abbreviates it or has a memory address."""
    if isinstance(value, Mapping):
        return any(map(_obscure, value.values()))
    if isinstance(value, Part):
        return part(value) != repr(value)
    if isinstance(value, tuple | list):
        return any(map(_obscure, value))
    return isinstance(value, Tensor | np.ndarray | nn.Module) or " at 0x" in repr(value)


def _codes(kind: type) -> Iterator[str]:
    """Checksums of the code and the declarations of a user's own class and of its own base classes."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in ("fedloom", "builtins", "abc", "typing"):
            continue
        found = hashlib.blake2b(digest_size=6)
        settings = {field.name for field in fields(one)} if is_dataclass(one) else ()
        for name, value in sorted(vars(one).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                if name != "__repr__" and function.__code__.co_filename != "<string>":
                    found.update(described(function).encode())  # those of a dataclass are made from a string
            elif not name.startswith(("__", "_abc_")) and name not in settings:
                found.update(f"{name} {plain(value)}".encode())
        yield found.hexdigest()


def described(function: Any, within: tuple[Any, ...] = ()) -> str:
    """Describe a function without memory addresses; a module's description includes a checksum of its tensors.

    ``within`` are the functions whose description is under way and includes this one: functions may call each other.
    """
    if isinstance(function, functools.partial):
        given = [plain(value, within) for value in function.args]
        given += [f"{key}={plain(value, within)}" for key, value in sorted(function.keywords.items())]
        return f"{described(function.func, within)}({', '.join(given)})"
    if isinstance(function, nn.Module):
        tensors = b"".join(t.detach().cpu().numpy().tobytes() for t in function.state_dict().values())
        own = {k: v for k, v in sorted(vars(function).items()) if isinstance(v, int | float | str) and k[0] != "_"}
        told = f"{type(function).__qualname__}({', '.join(f'{k}={v!r}' for k, v in own.items() if k != 'training')})"
        return f"{told} {hashlib.blake2b(tensors, digest_size=6).hexdigest()}" if tensors else told
    code = getattr(function, "__code__", None)
    where, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return f"{where}.{name}"
    found = hashlib.blake2b(digest_size=6)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    settings = *(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())
    for value in (*_constants(code), *cells, *settings):
        found.update(plain(value, (*within, function)).encode())
    inside = f"{where}." if where.partition(".")[0] == "fedloom" else ""  # a user's module may be __main__ or another
    return f"{inside}{name} {found.hexdigest()}"


def _constants(code: CodeType) -> Iterator[Any]:
    """The instructions of a function's code and the names and constants that they read, nested code included."""
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield constant


def plain(value: Any, within: tuple[Any, ...] = ()) -> str:
    """A value as text without memory addresses; functions and modules as ``described`` has them."""
    if any(value is one for one in within):
        return value.__qualname__
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{list(value.shape)} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {hashlib.blake2b(value.detach().cpu().numpy().tobytes()).hexdigest()}"
    if isinstance(value, nn.Module | functools.partial) or hasattr(value, "__code__"):
        return described(value, within)
    if isinstance(value, Part):
        return part(value)
    if isinstance(value, tuple | list) and any(map(_obscure, value)):
        return f"[{', '.join(plain(entry, within) for entry in value)}]"
    if isinstance(value, Mapping) and any(map(_obscure, value.values())):
        return f"{{{', '.join(f'{key!r}: {plain(entry, within)}' for key, entry in value.items())}}}"
    if isinstance(value, frozenset):
        value = sorted(value, key=repr)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
