"""What a part's own error leaves unsaid: that it reads something which it does not declare, and how to declare it."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeVar

from fedloom.core.context import Batch, Context, Output, RoundInfo
from fedloom.core.errors import ClientError, FedLoomError, LossError, with_type
from fedloom.core.needs import Needs
from fedloom.core.parts import Part

Given = ParamSpec("Given")
Made = TypeVar("Made")

READ = {
    (Output, "features"): "features",
    (Output, "twin"): "twin",
    (Output, "teacher"): "teacher",
    (Output, "model"): "model",
    (Output, "at"): "received",
    (Batch, "twin"): "twin",
    (Batch, "teacher"): "teacher",
    (Context, "label_counts"): "label_counts",
    (Context, "samples"): "samples",
    (RoundInfo, "losses"): "losses",
    (RoundInfo, "updates"): "updates",
    (RoundInfo, "server_data"): "target",
}
"""The fields of records that hold nothing unless a part declares a need, and the need."""
FILLED = {
    "down": "name it in its downloads, and return it from init_server",
    "state": "return it from init_client and end",
    "local": "return it from begin",
}
"""The mappings of a context, and where a part says what they hold."""
EMPTY = (RuntimeError, IndexError, ValueError, ZeroDivisionError, TypeError)  # what code raises that was given none
AFTER = 1 << 20  # lines


def advice(error: BaseException) -> str:
    """What a part may have forgotten to declare, as a sentence after an error's message; empty if that is not it.

    It is looked for in the part's own frames of the traceback, so that local work takes no longer for it.
    """
    part: Part | None = None
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        part = next((value for value in frame.f_locals.values() if isinstance(value, Part)), part)
        if part is not None:
            found = min(_missing(part, frame, line, error), default=(0, found))[1]
    return f". {found}" if found else ""


def _missing(part: Part, frame: FrameType, line: int, error: BaseException) -> Iterator[tuple[int, str]]:
    """Sentences on what this frame of a part reads in vain, each after the number of lines since it was read."""
    who, ago = type(part).__name__, _reads(frame, line)
    for name, value in frame.f_locals.items():
        for (kind, field), need in READ.items():
            if not (isinstance(value, kind) and field in ago and not getattr(part.needs, need)):
                continue
            held = getattr(value, field)
            empty = isinstance(held, tuple | list) and not held and isinstance(error, EMPTY)
            if empty or (held is None and _is_of_none(error)):
                declared = f"needs = {_with(part.needs, need)}"
                yield ago[field], f"{who} reads {name}.{field}, which it does not declare: give the class {declared}"
        if isinstance(value, Context) and isinstance(error, KeyError) and error.args:
            for field, how in FILLED.items():
                held, key = getattr(value, field) or {}, error.args[0]
                if field in ago and isinstance(key, str) and key not in held:
                    holds = f"{name}.{field} holds {', '.join(held) or 'nothing'}"
                    yield ago[field], f"{who} reads {name}.{field}[{key!r}], but {holds}: {how}"


def _reads(frame: FrameType, line: int) -> dict[str, int]:
    """The attributes that a frame's code reads: how many lines before this one, at the least; those after it last."""
    code, found = frame.f_code, dict[str, int]()
    for one in dis.get_instructions(code):
        at = None if one.positions is None else one.positions.lineno
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and at is not None:
            ago = line - at if at <= line else AFTER + at
            found[one.argval] = min(ago, found.get(one.argval, ago))
    return found


def _is_of_none(error: BaseException) -> bool:
    """Whether an exception is one of code that was given None."""
    return isinstance(error, AssertionError) or (isinstance(error, TypeError | AttributeError) and "None" in str(error))


def _with(needs: Needs, need: str) -> str:
    """The declaration with one need more.

    >>> _with(Needs(twin=True), "features")
    'Needs(features=True, twin=True)'
    """
    wanted = replace(needs, **{need: True})
    declared = ((one.name, getattr(wanted, one.name), one.default) for one in fields(Needs))
    return f"Needs({', '.join(f'{name}={value}' for name, value, default in declared if value != default)})"


def or_error(work: Callable[[], Made], sentence: str, kind: type[ClientError] = ClientError) -> Made | ClientError:
    """Return the result of ``work``; an exception in a part, which any worker would raise, becomes a ClientError."""
    try:
        return work()
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return kind(f"{sentence}: {with_type(error)}{advice(error)}.", trace)


def loss_or_error(work: Callable[[], Made]) -> Made | ClientError:
    """Return the losses that ``work`` computes; an exception becomes a LossError, in words that follow a client."""
    return or_error(work, "its loss of the received model cannot be computed", LossError)


def advising(work: Callable[Given, Made]) -> Callable[Given, Made]:
    """The same function, whose exceptions say in a note what the part that raised them does not declare."""

    @wraps(work)
    def advised(*args: Given.args, **settings: Given.kwargs) -> Made:
        try:
            return work(*args, **settings)
        except FedLoomError:
            raise
        except Exception as error:
            if found := advice(error):
                error.add_note(f"{found.lstrip('. ')}.")
            raise

    return advised
