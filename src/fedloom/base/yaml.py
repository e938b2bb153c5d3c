"""Reading untrusted YAML: size and depth are checked before anything is built, references are limited."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

from fedloom.base.files import readable_path

DEPTH = 40
NODES = 300_000
REFERENCES = 32
PARSER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # in C it is about ten times as fast
TIME, NUMBER = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float"
FLOAT = re.compile(
    r"[-+]?(?:\d+(?:_\d+)*\.[\d_]*(?:e[-+]?\d+)?|\d+(?:_\d+)*e[-+]?\d+|\.\d+(?:_\d+)*(?:e[-+]\d+)?)\Z"
    r"|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z",
    re.ASCII | re.IGNORECASE,
)
TRUTHS = ("y", "n", "yes", "no", "true", "false", "on", "off")
QUOTED = {form for word in TRUTHS for form in (word, word.title(), word.upper())}


class Loader(PARSER):  # pyright: ignore[reportGeneralTypeIssues]
    """Numbers need no point, dates are text, and no key comes twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:str":
                if key.value in keys:
                    twice = f"found duplicate key {key.value}"
                    raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != TIME]
    for first, resolvers in PARSER.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(NUMBER, FLOAT, list("-+0123456789."))


class Dumper(yaml.SafeDumper):
    """Text that might be read as a number or a truth value is quoted; nothing is an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always true, so that equal values are written out."""
        return True


def _text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    try:
        ambiguous = text in QUOTED or float(text) is not None
    except ValueError:
        ambiguous = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="'" if ambiguous else None)


Dumper.add_representer(str, _text)
Dumper.add_multi_representer(str, _text)  # an enumeration's values
PLAIN = re.compile(r"\$\{[\w.\[\]-]+\}")

YAMLProblem = (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError)
"""The errors of reading a malformed file, other than ``OSError``."""


def dump(tree: Mapping[str, Any]) -> str:
    """Plain data as YAML, in their order.

    >>> print(dump({"name": "on", "widths": (1, 2), "lr": 1e-5, "seed": None}), end="")
    name: 'on'
    widths:
    - 1
    - 2
    lr: 1.0e-05
    seed: null
    """
    return yaml.dump(tree, Dumper=Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def load(path: Path) -> Any:
    """The content of a YAML file as plain data; references like ``${seed}`` are not resolved.

    Raises:
        OSError: if the file cannot be read.
        YAMLError: (or another of ``YAMLProblem``) if it is malformed, nested too deeply, or would become too large.
    """
    text = readable_path(path).read_text(encoding="utf-8")
    _measure(text)
    content: Any = yaml.load(text, Loader) if text.strip() else {}
    if content is None or isinstance(content, str):
        content = {} if content is None else {content: None}
    elif not isinstance(content, dict | list):
        raise yaml.YAMLError("it holds one value alone")
    return _plain(content)


def _plain(value: Any) -> Any:
    """A copy, in which what has an alias is written out."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | bytes | None):
        return value
    raise yaml.YAMLError(f"a {type(value).__name__} is not a setting")


def _measure(text: str) -> None:
    """Check the number of nodes, with aliases expanded, and the depth before anything is built."""
    anchored: dict[str, int] = {}
    collections: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, Loader):
        if isinstance(event, AliasEvent):
            total += anchored.get(event.anchor, 1)
        elif isinstance(event, CollectionStartEvent):
            collections.append((event.anchor, total))
            total += 1
        elif isinstance(event, CollectionEndEvent):
            anchor, before = collections.pop()
            if anchor:
                anchored[anchor] = total - before
        elif isinstance(event, NodeEvent):
            total += 1
        if len(collections) > DEPTH:
            raise yaml.YAMLError(f"it is nested more than {DEPTH} levels deep")
        if total > NODES:
            raise yaml.YAMLError(f"it has more than {NODES:,} values, aliases written out")


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with references to other keys, like ``${seed}``, replaced by their values.

    >>> resolve({"seed": 3, "data": {"seed": "${seed}"}})
    {'seed': 3, 'data': {'seed': 3}}
    >>> resolve({"out": "${oc.env:HOME}"})
    Traceback (most recent call last):
    ...
    ValueError: '${oc.env:HOME}' is more than a reference to another key, like ${seed}

    Raises:
        ValueError: for anything else in ``${…}``, which could read the environment, for too many references, for
            circular ones, or if there is nothing at that key.
    """
    count = _references(tree)
    if count > REFERENCES:
        raise ValueError(f"there are {count} references, but there may be {REFERENCES}")
    return {str(key): _resolved(value, tree) for key, value in tree.items()} if count else dict(tree)


def _resolved(value: Any, tree: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """A value with its references replaced; ``within`` are those that are being replaced."""
    if isinstance(value, Mapping):
        return {key: _resolved(item, tree, within) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(item, tree, within) for item in value]
    if not isinstance(value, str):
        return value
    if PLAIN.fullmatch(value):
        return _at(value, tree, within)
    return PLAIN.sub(lambda reference: str(_at(reference[0], tree, within)), value)


def _at(reference: str, tree: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    """What a reference like ``${data.seed}`` or ``${views[0]}`` names."""
    if reference in within:
        raise ValueError(f"{reference} refers to itself")
    value: Any = tree
    for key in re.split(r"[.\[\]]+", reference[2:-1].rstrip("]")):
        items: Any = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
        place = int(key) if isinstance(value, list) and key.isdecimal() else key
        if place not in items:
            raise ValueError(f"there is nothing at {reference}")
        value = items[place]
    return _resolved(value, tree, (*within, reference))


def _references(value: Any) -> int:
    if isinstance(value, str):
        if "${" in PLAIN.sub("", value):
            raise ValueError(f"{value!r} is more than a reference to another key, like ${{seed}}")
        return len(PLAIN.findall(value))
    if isinstance(value, Mapping):
        return sum(map(_references, value.values())) + sum(map(_references, value))
    return sum(map(_references, value)) if isinstance(value, list | tuple) else 0
