"""Ranges of settings, as annotations on their fields: ``lr: Positive = 0.1``; ``fedloom list`` shows them.

The range of a text is a ``Literal``; that of a list or a mapping stands at its elements, like ``tuple[Positive, ...]``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Real
from typing import Annotated, Any, Literal, get_args, get_origin

from fedloom.base.errors import ConfigError, nearest


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``.

    Args:
        low: the least number.
        high: the greatest number.
        above: whether ``low`` itself is excluded.
        below: whether ``high`` itself is excluded.
        infinite: whether infinity is included, if there is no ``high``.

    >>> 0.5 in Range(0, 0.5), 0.5 in Range(0, 0.5, below=True), float("inf") in Range(0)
    (True, False, False)
    >>> [str(interval) for interval in (Range(0, 1, below=True), Range(1), Range(0, above=True))]
    ['in [0, 1)', 'of at least 1', 'greater than 0']
    """

    low: float = -inf
    high: float = inf
    above: bool = False
    below: bool = False
    infinite: bool = False

    def __contains__(self, value: float) -> bool:
        high = value < self.high if self.below else value <= self.high
        return (value > self.low if self.above else value >= self.low) and high and (self.infinite or isfinite(value))

    def __str__(self) -> str:
        if self.high < inf:
            return f"in {self._interval}"
        if self.low == -inf:
            return "that is finite"
        return f"greater than {self.low:.10g}" if self.above else f"of at least {self.low:.10g}"

    @property
    def _interval(self) -> str:
        return f"{'(' if self.above else '['}{self.low:.10g}, {self.high:.10g}{')' if self.below else ']'}"

    def requirement(self, value: float) -> str:
        """What a value outside must be, as the end of a sentence.

        >>> Range(0).requirement(-1), Range(0, 1).requirement(2)
        ('must be at least 0, not -1', 'must lie in [0, 1], not 2')
        """
        if self.high < inf:
            return f"must lie in {self._interval}, not {value}"
        if self.low == -inf:
            return f"must be finite, not {value}"
        if self.above:
            return f"must be a {'' if self.infinite else 'finite '}number greater than {self.low:.10g}, not {value}"
        finite = "" if self.infinite or isfinite(value) else "finite and "
        return f"must be {finite}at least {self.low:.10g}, not {value}"


@dataclass(frozen=True)
class Words:
    """The words of a ``Literal``.

    >>> "adam" in Words(("adam", "sgd")), Words(("adam", "sgd")).requirement("adm")
    (True, "is 'adm'; did you mean 'adam'? There are: adam, sgd")
    """

    words: tuple[str, ...]

    def __contains__(self, value: str) -> bool:
        return value in self.words

    def requirement(self, value: str) -> str:
        """What another word must be, as the end of a sentence."""
        return f"is {value!r}; {nearest(value, self.words).removesuffix('.')}"


Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 1, below=True)]
Fraction = Annotated[float, Range(0, 1, above=True, below=True)]
Count = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Bound = Annotated[float, Range(0, above=True, infinite=True)]


def out_of_range(record: Any) -> str | None:
    """What is wrong with the first field of a dataclass that is outside the range of its annotation; None if none is.

    >>> @dataclass
    ... class Step:
    ...     lr: Annotated[float, Range(0, above=True)] = 0.1
    >>> out_of_range(Step()), out_of_range(Step(0.0))
    (None, 'lr must be a finite number greater than 0, not 0.0')
    """
    fields = record.__dataclass_fields__
    for name, allowed in ranges(type(record)).items():
        setting = getattr(record, name)
        if setting is fields[name].default:
            continue
        for value in elements(setting):
            if wrong := range_error(allowed, value):
                return f"{name} {wrong}"
    return None


def elements(value: Any) -> Iterable[Any]:
    """The values of a list or a mapping, or the value itself."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def range_error(allowed: Range | Words, value: Any) -> str | None:
    """What a value outside a range must be; None for a value inside it or of another type."""
    if isinstance(allowed, Words):
        return allowed.requirement(value) if isinstance(value, str) and value not in allowed else None
    return allowed.requirement(value) if isinstance(value, Real) and float(value) not in allowed else None  # pyright: ignore


def check_ranges(record: Any, where: str = "") -> None:
    """Raise a ``ConfigError`` for a field outside the range of its annotation; ``where`` begins the sentence."""
    if wrong := out_of_range(record):
        raise ConfigError(f"{where}{wrong}.")


@functools.cache
def ranges(kind: type) -> dict[str, Range | Words]:
    """The ranges of a dataclass's fields by name, inherited fields included, as far as its module knows their types."""
    by_name: dict[str, Range | Words] = {}
    for owner in reversed(kind.__mro__):
        namespace = vars(sys.modules.get(owner.__module__, sys))
        for name, hint in vars(owner).get("__annotations__", {}).items():
            try:
                allowed = range_of(eval(hint, namespace, dict(vars(owner))) if isinstance(hint, str) else hint)
            except Exception:  # the type checker alone knows it
                continue
            by_name.pop(name, None)
            by_name |= {} if allowed is None else {name: allowed}
    return by_name


@functools.cache
def range_of(annotation: Any) -> Range | Words | None:
    """The range in an annotation, or in one of its options, as in ``Count | None``."""
    if get_origin(annotation) is Literal:
        return Words(get_args(annotation))
    for extra in getattr(annotation, "__metadata__", ()):
        if isinstance(extra, Range):
            return extra
    for option in get_args(annotation):
        if inner := range_of(option):
            return inner
    return None
