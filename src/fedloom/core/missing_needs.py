"""What a part's own error leaves unsaid: which fields hold something only if the part declares that it needs them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fedloom.base.errors import ClientError, FedLoomError, LossError, add_note, with_type
from fedloom.core.context import Context
from fedloom.core.parts import Part

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

FIELDS = (
    "features", "twin", "teacher", "model", "received", "label_counts", "heard", "losses", "target", "public",
)  # fmt: skip
"""The needs without which a field of a batch, an output, a context or a round's record is None."""


def hint(error: BaseException) -> str:
    """What a part may have forgotten to declare, as a sentence after an error's message; empty if it is not that."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        if not isinstance(part, Part):
            continue
        if isinstance(error, TypeError | AttributeError) and "NoneType" in str(error):
            undeclared = ", ".join(name for name in FIELDS if name not in part.needs)
            return f". Fields that are None have to be declared in the needs of {type(part).__name__}: {undeclared}"
        context = next((value for value in frame.f_locals.values() if isinstance(value, Context)), None)
        if isinstance(error, KeyError) and context is not None:
            down, state, local = (", ".join(names or ()) or "nothing" for names in context[1:4])
            return (
                f". The context of {type(part).__name__} has {down} in down (from its downloads), {state} in state "
                f"(from init_client and end) and {local} in local (from begin and on_step)"
            )
    return ""


def as_client_error(
    work: Callable[[], Value], sentence: str, kind: type[ClientError] = ClientError
) -> Value | ClientError:
    """The result of ``work``; an exception in a part, which any worker would raise, becomes a ``ClientError``."""
    try:
        return work()
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return kind(f"{sentence}: {with_type(error)}{hint(error)}.", trace)


def as_loss_error(work: Callable[[], Value]) -> Value | ClientError:
    """The losses that ``work`` computes; an exception becomes a ``LossError``, to be read after a client's name."""
    return as_client_error(work, "its loss of the received model cannot be computed", LossError)


def with_hint(work: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """The same function; its exceptions have a note on what the part that raised them does not declare."""

    @wraps(work)
    def noting(*args: Arguments.args, **settings: Arguments.kwargs) -> Value:
        try:
            return work(*args, **settings)
        except FedLoomError:
            raise
        except Exception as error:
            if sentence := hint(error):
                add_note(error, f"{sentence.lstrip('. ')}.")
            raise

    return noting
