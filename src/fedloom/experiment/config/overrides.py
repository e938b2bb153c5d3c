"""Overrides as a person types them: Hydra's ``key=value``, with lists, mappings and sweeps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, OverrideType, QuotedString, Sweep
from hydra.errors import HydraException

from fedloom.core.errors import ConfigError

Path = tuple[str, ...]
PLAIN_KEYS = ("out", "resume")  # paths: whatever follows the "=" is meant literally
SIMPLE = re.compile(r"([\w.]+)=([^\[\]{}(),'\"]*)", re.DOTALL)


@dataclass(frozen=True)
class Assignment:
    """One override: a key and the values that it is to take, one unless it is a sweep."""

    path: Path
    values: tuple[Any, ...]
    is_sweep: bool = False

    @property
    def key(self) -> str:
        """The key as it was typed."""
        return ".".join(self.path)


def parse(text: str, names: dict[str, list[str]] | None = None) -> Assignment:
    """Read one override.

    Args:
        text: like ``seed=1,2`` or ``model.hidden=[64,32]``.
        names: for keys that choose by name, the names there are, for ``glob``.

    >>> parse("method.alpha=.1")
    Assignment(path=('method', 'alpha'), values=(0.1,), is_sweep=False)
    >>> parse("seed=range(1,4)").values, parse("out=a,b").values
    ((1, 2, 3), ('a,b',))
    >>> parse("method")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: 'method' is not an override; write it as key=value, like method=feddyn.

    Raises:
        ConfigError: if it cannot be read.
    """
    key, equals, literal = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override; write it as key=value, like method=feddyn.")
    if key[0] in "+~":
        raise ConfigError(f"{text!r}: keys are set with key=value, without {key[0]!r}.")
    if key in PLAIN_KEYS:
        return Assignment((key,), (literal.strip("'\"") or None,))
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        simple = SIMPLE.fullmatch(text)
        if simple is None:
            reason = str(error).partition("\n")[0]
            advice = "text with special characters goes in quotes"
            raise ConfigError(f"{text!r} cannot be read ({reason}); {advice}.") from error
        return Assignment(tuple(simple[1].split(".")), (simple[2],))
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise ConfigError(f"{text!r} is not an override; write it as key=value, like method=feddyn.")
    path = tuple(override.key_or_group.replace("/", ".").split("."))
    if not override.is_sweep_override():
        return Assignment(path, (_value(override.value()),))
    values = tuple(_swept(override, (names or {}).get(".".join(path))))
    if not values:
        raise ConfigError(f"{text!r} sweeps over nothing.")
    return Assignment(path, values, is_sweep=True)


def parse_all(texts: Sequence[str], names: dict[str, list[str]] | None = None, sweeps: bool = True) -> list[Assignment]:
    """Read overrides, of which each may have several values if ``sweeps``; of two to one key the last one counts.

    >>> [one.values for one in parse_all(["seed=1,2", "rounds=3", "seed=4"])]
    [(4,), (3,)]

    Raises:
        ConfigError: if one cannot be read, or has several values where it may not.
    """
    found: dict[Path, Assignment] = {}
    for text in texts:
        one = parse(text, names)
        if one.is_sweep and not sweeps:
            raise ConfigError(f"{text!r} holds several values; add -m to run each of them, or write a list as [a,b].")
        found[one.path] = one
    return list(found.values())


def _swept(override: Override, names: list[str] | None) -> Iterator[Any]:
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        raise ConfigError(f"{override.input_line!r}: an interval is no list of values; use range() or choices.")
    if isinstance(sweep, Glob):
        if names is None:
            raise ConfigError(f"{override.input_line!r}: glob() works for keys that choose by name, like method.")
        for name in names:
            if any(fnmatch(name, p) for p in sweep.include) and not any(fnmatch(name, p) for p in sweep.exclude):
                yield name
        return
    for value in override.sweep_iterator():
        yield _value(value)


def _value(value: Any) -> Any:
    """A parsed value as plain data."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, Sweep):
        raise ConfigError("a sweep inside a list of choices cannot be read; write out all choices.")
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {str(_value(key)): _value(item) for key, item in value.items()}
    return value


def combinations(assignments: Sequence[Assignment]) -> list[list[tuple[Path, Any]]]:
    """The product of all sweeps; the last sweep changes fastest.

    >>> both = [parse("method=fedavg,feddyn"), parse("seed=1,2"), parse("rounds=3")]
    >>> [[value for _, value in one] for one in combinations(both)]
    [['fedavg', 1, 3], ['fedavg', 2, 3], ['feddyn', 1, 3], ['feddyn', 2, 3]]
    """
    paths = [assignment.path for assignment in assignments]
    product = itertools.product(*(assignment.values for assignment in assignments))
    return [list(zip(paths, values, strict=True)) for values in product]
