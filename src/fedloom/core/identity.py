"""The identity of a user's functions and parts: descriptions without memory addresses, equal for equal source code."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor, nn

from fedloom.base.errors import is_ours
from fedloom.base.files import readable_path
from fedloom.base.registry import Ranged
from fedloom.core.parts import Part

CODE = re.compile(r" code [0-9a-f]{12}")
"""The checksum of a user's code in a description."""
UNSAID = ("annotation", "kind", "returns", "type_comment", "type_params")  # fields of syntax that compute nothing


def of_part(part: Ranged) -> str:
    """Describe a part or a condition for the identity of a run: its ``repr``, unless that tells too little or too much.

    Long tensors are abbreviated there, and functions have memory addresses. A user's own class has a checksum of its
    code beside it, as a user's own loss has, and a setting that names a file one of its contents.

    >>> from fedloom.parts.adaptation import Maml
    >>> of_part(Maml(lr=0.5)) == repr(Maml(lr=0.5))
    True
    """
    assert is_dataclass(part)
    settings = {field.name: getattr(part, field.name) for field in fields(part) if field.repr}
    text = repr(part)
    if type(part).__dataclass_params__.repr and any(map(_obscure, settings.values())):  # pyright: ignore[reportAttributeAccessIssue]
        text = (
            f"{type(part).__qualname__}({', '.join(f'{name}={of_value(value)}' for name, value in settings.items())})"
        )
    files = (f" {of_file(path)}" for path in settings.values() if isinstance(path, Path) and not path.is_dir())
    return text + "".join(files) + "".join(f" code {code}" for code in _codes(type(part)))


def of_file(path: Path) -> str:
    """A checksum of a file; what cannot be read is refused where it is used."""
    try:
        return f"contents {hashlib.blake2b(readable_path(path).read_bytes(), digest_size=6).hexdigest()}"
    except OSError:
        return "unreadable"


def _obscure(value: Any) -> bool:
    """Whether the ``repr`` of a setting abbreviates it or has a memory address."""
    if isinstance(value, Mapping):
        return any(map(_obscure, value.values()))
    if isinstance(value, Part):
        return of_part(value) != repr(value)
    if isinstance(value, tuple | list):
        return any(map(_obscure, value))
    return isinstance(value, Tensor | np.ndarray | nn.Module) or " at 0x" in repr(value)


def _codes(kind: type) -> Iterator[str]:
    """Checksums of the code and the declarations of a user's own class and of its own base classes."""
    for base in kind.__mro__:
        if is_ours(base.__module__) or base.__module__.partition(".")[0] in ("builtins", "abc", "typing"):
            continue
        digest = hashlib.blake2b(digest_size=6)
        settings = {field.name for field in fields(base)} if is_dataclass(base) else ()
        for name, value in sorted(vars(base).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                if name != "__repr__" and function.__code__.co_filename != "<string>":
                    digest.update(of_function(function).encode())  # those of a dataclass are made from a string
            elif not name.startswith(("__", "_abc_")) and name not in settings:
                digest.update(f"{name} {of_value(value)}".encode())
        yield digest.hexdigest()


def of_function(function: Any, within: tuple[Any, ...] = ()) -> str:
    """Describe a function by its source code and the values that it holds, a module by its settings and tensors.

    ``within`` are the functions whose description is under way and includes this one: functions may call each other.
    """
    if isinstance(function, functools.partial):
        values = [of_value(value, within) for value in function.args]
        values += [f"{key}={of_value(value, within)}" for key, value in sorted(function.keywords.items())]
        return f"{of_function(function.func, within)}({', '.join(values)})"
    if isinstance(function, nn.Module):
        tensors = b"".join(t.detach().cpu().numpy().tobytes() for t in function.state_dict().values())
        attributes = {
            k: v for k, v in sorted(vars(function).items()) if isinstance(v, int | float | str) and k[0] != "_"
        }
        settings = ", ".join(f"{k}={v!r}" for k, v in attributes.items() if k != "training")
        text = f"{type(function).__qualname__}({settings})"
        return f"{text} {hashlib.blake2b(tensors, digest_size=6).hexdigest()}" if tensors else text
    code = getattr(function, "__code__", None)
    where, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return f"{where}.{name}"
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    referenced = *cells, *(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())
    values = "".join(of_value(value, (*within, function)) for value in referenced)
    inside = f"{where}." if is_ours(where) else ""  # a user's module may be __main__ or another
    return f"{inside}{name} code {_checksum(_source(code))}{f' {_checksum(values)}' if values else ''}"


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _source(code: CodeType) -> str:
    """The syntax of a function, without its docstring, comments and annotations: equal in all versions of Python.

    A function whose source is not at hand, as one typed at a prompt, is described by its instructions, which differ
    between versions.
    """
    try:
        tree = _parsed("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, SyntaxError):
        tree = ast.Module([], [])
    nodes = [node for node in ast.walk(tree) if _is_source_of(node, code)]
    if not nodes:
        return repr([*_instructions(code)])
    node = max(nodes, key=lambda node: (node.lineno, node.col_offset))  # the innermost
    body = node.body if isinstance(node.body, list) else [node.body]
    documented = not isinstance(node, ast.Lambda) and ast.get_docstring(node, clean=False) is not None
    names = node.args  # their defaults are values that the function holds
    arguments = [names.posonlyargs, names.args, names.vararg, names.kwonlyargs, names.kwarg]
    return _dumped([*arguments, *body[documented:]])


_parsed = functools.lru_cache(maxsize=16)(ast.parse)


def _is_source_of(node: ast.AST, code: CodeType) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    """Whether a code object was compiled from a node of its file; a line may have several lambdas."""
    if isinstance(node, ast.Lambda):
        positions = getattr(code, "co_positions", tuple)()  # from Python 3.11 on; before, the first of a line counts
        places = [place for place in positions if None not in place and place[2:] != (0, 0)]
        start = node.body.lineno, node.body.col_offset
        end = node.body.end_lineno, node.body.end_col_offset
        inside = all(start <= (line, column) and (last, stop) <= end for line, last, column, stop in places)
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno and inside
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    first = min(line.lineno for line in (node, *node.decorator_list))
    return node.name == code.co_name and first == code.co_firstlineno


def _dumped(node: Any) -> str:
    """Like ``ast.dump``, which has fields that some versions of Python lack or leave out if they are empty."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    items = ((name, value) for name, value in ast.iter_fields(node) if name not in UNSAID and value not in (None, []))
    return f"{type(node).__name__}({', '.join(f'{name}={_dumped(value)}' for name, value in sorted(items))})"


def _instructions(code: CodeType) -> Iterator[Any]:
    """The instructions of a function's code and the names and constants that they read, nested code included."""
    yield from (code.co_code, code.co_names)
    for constant in code.co_consts:
        yield [*_instructions(constant)] if isinstance(constant, CodeType) else of_value(constant)


def of_value(value: Any, within: tuple[Any, ...] = ()) -> str:
    """A value as text without memory addresses; functions and modules as ``of_function`` has them."""
    if any(value is function for function in within):
        return value.__qualname__
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{list(value.shape)} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {hashlib.blake2b(value.detach().cpu().numpy().tobytes()).hexdigest()}"
    if isinstance(value, nn.Module | functools.partial) or hasattr(value, "__code__"):
        return of_function(value, within)
    if isinstance(value, Part):
        return of_part(value)
    if isinstance(value, tuple | list) and any(map(_obscure, value)):
        return f"[{', '.join(of_value(entry, within) for entry in value)}]"
    if isinstance(value, Mapping) and any(map(_obscure, value.values())):
        return f"{{{', '.join(f'{key!r}: {of_value(entry, within)}' for key, entry in value.items())}}}"
    if isinstance(value, frozenset):
        value = sorted(value, key=repr)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
