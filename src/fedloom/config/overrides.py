"""Words of a command line: a recipe, and overrides ``key=value`` in Hydra's grammar, sweeps among them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, OverrideType, QuotedString, Sweep
from hydra.errors import HydraException

from fedloom.core.errors import ConfigError

Key = tuple[str, ...]
PATHS = ("out", "resume")  # keys whose value is literally what follows the "="
RUNS = 1000  # of a sweep
SIMPLE = re.compile(r"([\w.]+)=([^\[\]{}(),'\"]*)", re.DOTALL)


class ParsedOverride(NamedTuple):
    """One override: a key and the values that it takes, one unless it is a sweep."""

    key: Key
    values: tuple[Any, ...]
    is_sweep: bool = False


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe, if one of the words is a YAML file, and the overrides.

    >>> split_words(["recipe.yaml", "seed=1"])
    (PosixPath('recipe.yaml'), ['seed=1'])

    Raises:
        ConfigError: for two recipes.
    """
    recipes = [word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))]
    if len(recipes) > 1:
        raise ConfigError(f"a command takes one recipe, but {' and '.join(map(repr, recipes))} are given.")
    return (Path(recipes[0]) if recipes else None), [word for word in words if word not in recipes]


def parse(text: str, names: Mapping[str, Sequence[str]] | None = None) -> ParsedOverride:
    """Read one override.

    Args:
        text: like ``seed=1,2`` or ``model.hidden=[64,32]``.
        names: for keys that choose by name, the names there are, for ``glob``.

    >>> parse("method.alpha=.1")
    ParsedOverride(key=('method', 'alpha'), values=(0.1,), is_sweep=False)
    >>> parse("seed=range(1,4)").values, parse("out=a,b").values
    ((1, 2, 3), ('a,b',))
    >>> parse("method")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: 'method' is not a setting; write it as key=value, like method=feddyn.

    Raises:
        ConfigError: if it cannot be read.
    """
    unreadable = ConfigError(f"{text!r} is not a setting; write it as key=value, like method=feddyn.")
    key, equals, literal = text.partition("=")
    if not equals and Path(text).is_dir():
        raise ConfigError(
            f"{text!r} is a folder; write resume={text} to continue a run, {Path(text) / 'config.yaml'} to repeat it."
        )
    if not equals or not key:
        raise unreadable
    if key[0] in "+~":
        raise ConfigError(f"{text!r}: keys are set with key=value, without {key[0]!r}.")
    if key == "resume" and not literal.strip("'\""):
        raise ConfigError("resume= names no run directory; leave it out to start a new run.")
    if key in PATHS:
        return ParsedOverride((key,), (literal.strip("'\"") or None,))
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError) as error:  # ValueError: a whole number of thousands of digits
        if simple := SIMPLE.fullmatch(text):  # characters that the grammar does not know, in a value that needs none
            return ParsedOverride(tuple(simple[1].split(".")), (simple[2],))
        raise ConfigError(
            f"{text!r} cannot be read: a bracket, brace or quote is left open, a comma is misplaced, or text with "
            "special characters needs quotes; values are written like 0.1, [a,b] and {name: feddyn, alpha: 0.1}."
        ) from error
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise unreadable
    path = tuple(override.key_or_group.replace("/", ".").split("."))
    if not override.is_sweep_override():
        return ParsedOverride(path, (_plain(override.value()),))
    try:
        values = tuple(itertools.islice(_swept(override, (names or {}).get(".".join(path))), RUNS + 1))
    except ConfigError:
        raise
    except ValueError as error:  # of range()
        raise ConfigError(f"{text!r} cannot be swept over: {error}.") from error
    if not values:
        raise ConfigError(f"{text!r} sweeps over nothing.")
    if len(values) > RUNS:
        raise ConfigError(f"{text!r} has more than {RUNS:,} values; a sweep has at most as many runs.")
    return ParsedOverride(path, values, is_sweep=True)


def _swept(override: Override, names: Sequence[str] | None) -> Iterator[Any]:
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        raise ConfigError(f"{override.input_line!r}: an interval is not a list of values; use range() or choices.")
    if not isinstance(sweep, Glob):
        yield from map(_plain, override.sweep_iterator())
    elif names is None:
        raise ConfigError(f"{override.input_line!r}: glob() works for keys that choose by name, like method.")
    else:
        for name in names:
            if any(fnmatch(name, p) for p in sweep.include) and not any(fnmatch(name, p) for p in sweep.exclude):
                yield name


def _plain(value: Any) -> Any:
    """A parsed value as plain data."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, Sweep):
        raise ConfigError("a sweep inside a list of choices cannot be read; write out all choices.")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return value


def combinations(overrides: Sequence[ParsedOverride]) -> Iterator[dict[Key, Any]]:
    """The product of all sweeps; the last sweep changes fastest.

    >>> both = [parse("method=fedavg,feddyn"), parse("seed=1,2"), parse("rounds=3")]
    >>> [list(one.values()) for one in combinations(both)]
    [['fedavg', 1, 3], ['fedavg', 2, 3], ['feddyn', 1, 3], ['feddyn', 2, 3]]
    """
    if (count := math.prod(len(one.values) for one in overrides)) > RUNS:
        raise ConfigError(f"these are {count:,} runs, but a sweep has at most {RUNS:,}; take fewer values.")
    for values in itertools.product(*(one.values for one in overrides)):
        yield dict(zip((one.key for one in overrides), values, strict=True))
