"""Words of a command line: a recipe, and overrides ``key=value``, sweeps among them.

Values are written as in Hydra: ``0.1``, ``null``, ``true``, ``[a,b]``, ``{name: feddyn, alpha: 0.1}``, text, in
quotes if it has brackets, commas or quotes, and sweeps ``a,b``, ``choice(a,b)``, ``range(1,4)`` and ``glob(fed*)``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.base.errors import ConfigError

Key = tuple[str, ...]
PATHS = ("out", "resume")  # keys whose value is literally what follows the "="
RUNS = 1000  # of a sweep
KEY = re.compile(r"[\w$][\w$-]*([./][\w$][\w$-]*)*")
QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
PLAIN = re.compile(r"""(?:\$\{[^}]*\}|\\.?|[^\\,()\[\]{}'"])+""", re.DOTALL)
NAME = re.compile(r"""((?:\\.|[^\\:,()\[\]{}'"])+):\s*""")
CALL = re.compile(r"([a-zA-Z_]\w*)\s*\((.*)\)", re.DOTALL)
ARGUMENT = re.compile(r"(\w+)\s*=\s*")
DIGITS, WHOLE = r"\d(?:_?\d)*", r"(?:0|[1-9](?:_?\d)*)"
INTEGER = re.compile(rf"[+-]?{WHOLE}", re.ASCII)
FLOAT = re.compile(
    rf"[+-]?(?:(?:{WHOLE}\.|{WHOLE}?\.{DIGITS}|{WHOLE}(?=e))(?:e[+-]?{DIGITS})?|inf|nan)", re.ASCII | re.IGNORECASE
)
ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
WORDS = {"null": None, "true": True, "false": False}


class ParsedOverride(NamedTuple):
    """One override: a key and the values that it takes, one unless it is a sweep."""

    key: Key
    values: tuple[Any, ...]
    is_sweep: bool = False


def split_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The recipes, which are the words that name a YAML file, and the overrides.

    >>> split_words(["recipe.yaml", "seed=1"])
    ([PosixPath('recipe.yaml')], ['seed=1'])
    """
    recipes = [word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))]
    return [*map(Path, recipes)], [word for word in words if word not in recipes]


def one_recipe(recipes: Sequence[Path]) -> Path | None:
    """The recipe of a command that takes one, if there is any."""
    if len(recipes) > 1:
        raise ConfigError(f"a run takes one recipe, not {len(recipes)}; fedloom run -m runs each of them.")
    return recipes[0] if recipes else None


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
    fedloom.base.errors.ConfigError: 'method' is not a setting; write it as key=value, like method=feddyn.
    """
    unreadable = ConfigError(f"{text!r} is not a setting; write it as key=value, like method=feddyn.")
    key, equals, literal = text.partition("=")
    if not equals and Path(text).is_dir():
        raise ConfigError(
            f"{text!r} is a folder; write resume={text} to continue a run, {Path(text) / 'config.yaml'} to repeat it."
        )
    if not equals or not key:
        raise unreadable
    if key == "resume" and not literal.strip("'\""):
        raise ConfigError("resume= names no run directory; leave it out to start a new run.")
    if key in PATHS:
        return ParsedOverride((key,), (literal.strip("'\"") or None,))
    path = tuple(key.replace("/", ".").split("."))
    if not KEY.fullmatch(key):
        raise unreadable
    try:
        values = _read(literal, names=(names or {}).get(".".join(path)))
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None
    except ValueError as error:
        raise ConfigError(
            f"{text!r} cannot be read: a bracket, brace or quote is left open, a comma is misplaced, or text with "
            "special characters needs quotes; values are written like 0.1, [a,b] and {name: feddyn, alpha: 0.1}."
        ) from error
    if not isinstance(values, Sweep):
        return ParsedOverride(path, (values,))
    if not values:
        raise ConfigError(f"{text!r} sweeps over nothing.")
    return ParsedOverride(path, tuple(values), is_sweep=True)


class Sweep(list[Any]):
    """Several values of one key."""


def _read(text: str, names: Sequence[str] | None = None) -> Any:
    """The value that a text describes, or several as a ``Sweep``.

    >>> _read("{name: feddyn, alpha: .1}"), _read("[64, '1']"), _read("1:30"), _read("a,1e3")
    ({'name': 'feddyn', 'alpha': 0.1}, [64, '1'], '1:30', ['a', 1000.0])
    """
    if call := CALL.fullmatch(text):
        return _sweep(call[1], _arguments(call[2]), names)
    values, rest = _items(text.strip(), "")
    if rest:
        raise ValueError(rest)
    return Sweep(values) if len(values) > 1 else values[0] if values else ""


def _items(text: str, end: str) -> tuple[list[Any], str]:
    """The values up to the bracket ``end``, or the end of the text, and what follows."""
    items: list[Any] = []
    while not (text.startswith(end) if end else not text) or items:
        value, text = _value(text)
        items.append(value)
        if not text.startswith(","):
            break
        text = text[1:].lstrip()
    if not text.startswith(end):
        raise ValueError(text)
    return items, text[len(end) :].lstrip()


def _value(text: str) -> tuple[Any, str]:
    """The value at the beginning of a text, and what follows."""
    if text.startswith("["):
        return _items(text[1:].lstrip(), "]")
    if text.startswith("{"):
        return _mapping(text[1:].lstrip())
    if quoted := QUOTED.match(text):
        content = re.sub(rf"\\+({quoted[0][0]}|\Z)", lambda escaped: escaped[0][1::2], quoted[0][1:-1])
        return content, text[quoted.end() :].lstrip()
    plain = PLAIN.match(text)
    if plain is None or not plain[0].strip():
        raise ValueError(text)
    return _scalar(plain[0].strip()), text[plain.end() :]


def _mapping(text: str) -> tuple[dict[str, Any], str]:
    """The settings up to a closing brace, and what follows."""
    mapping: dict[str, Any] = {}
    while not text.startswith("}") or mapping:
        key = NAME.match(text)
        if key is None:
            raise ValueError(text)
        mapping[str(_scalar(key[1].strip()))], text = _value(text[key.end() :])
        if not text.startswith(","):
            break
        text = text[1:].lstrip()
    if not text.startswith("}"):
        raise ValueError(text)
    return mapping, text[1:].lstrip()


def _scalar(text: str) -> Any:
    """A number, a truth value, nothing, or text."""
    lower = text.lower()
    if lower in WORDS:
        return WORDS[lower]
    if INTEGER.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else ESCAPED.sub(r"\1", text)


def _arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The values in a call, those by position and those by name."""
    values, keywords = [], {}
    text = text.strip()
    while text:
        name = ARGUMENT.match(text)
        value, text = _value(text[name.end() :] if name else text)
        if name:
            keywords[name[1]] = value
        else:
            values.append(value)
        if text and not text.startswith(","):
            raise ValueError(text)
        text = text[1:].lstrip()
    return values, keywords


def _sweep(function: str, arguments: tuple[list[Any], dict[str, Any]], names: Sequence[str] | None) -> Sweep:
    """The values of ``choice(a,b)``, ``range(start,stop,step)`` or ``glob(pattern,exclude=pattern)``."""
    values, keywords = arguments
    if function == "choice" and not keywords:
        return Sweep(values)
    if function == "range" and 0 < len(values) < 4:
        places = ("start", "stop", "step") if len(values) > 1 or keywords else ("stop",)
        limits = {"start": 0, "step": 1} | dict(zip(places, values, strict=False)) | keywords
        if len(limits) == 3 and all(
            isinstance(limit, int | float) and math.isfinite(limit) for limit in limits.values()
        ):
            return Sweep(itertools.islice(_range(**limits), RUNS + 1))
    if function == "glob" and names is None:
        raise ConfigError("glob() works for keys that choose by name, like method.")
    if function == "glob" and len(values) == 1 and keywords.keys() <= {"exclude"}:
        included, excluded = ([p] if isinstance(p, str) else p for p in (values[0], keywords.get("exclude", [])))
        fits = lambda name, patterns: any(fnmatch(name, pattern) for pattern in patterns)  # noqa: E731
        return Sweep(name for name in names or () if fits(name, included) and not fits(name, excluded))
    raise ValueError(function)


def _range(start: float, stop: float, step: float) -> Iterator[float]:
    """The numbers from ``start`` up to ``stop``, which is left out; exact for decimal fractions."""
    kind = int if all(isinstance(number, int) for number in (start, stop, step)) else float
    if not step:
        raise ConfigError("the step of a range must not be zero.")
    first, last, by = (Decimal(repr(number)) for number in (start, stop, step))
    count = math.ceil((last - first) / by)
    return (kind(first + number * by) for number in range(count))


def combinations(overrides: Sequence[ParsedOverride]) -> Iterator[dict[Key, Any]]:
    """The product of all sweeps; the last sweep changes fastest.

    >>> both = [parse("method=fedavg,feddyn"), parse("seed=1,2"), parse("rounds=3")]
    >>> [list(one.values()) for one in combinations(both)]
    [['fedavg', 1, 3], ['fedavg', 2, 3], ['feddyn', 1, 3], ['feddyn', 2, 3]]
    """
    if (count := math.prod(len(override.values) for override in overrides)) > RUNS:
        raise ConfigError(f"these are {count:,} runs, but a sweep has at most {RUNS:,}; take fewer values.")
    for values in itertools.product(*(override.values for override in overrides)):
        yield dict(zip((override.key for override in overrides), values, strict=True))
