"""Reading untrusted YAML: size and depth are checked before anything is built, references are limited."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

DEPTH = 40
NODES = 300_000
REFERENCES = 32
LOADER = get_yaml_loader()
if yaml.__with_libyaml__:  # whose parser is about ten times as fast as the one written in Python
    LOADER = type("Loader", (yaml.CSafeLoader, LOADER), {})
PLAIN = re.compile(r"\$\{[\w.\[\]-]+\}")

YAMLProblem = (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, ValueError, RecursionError)
"""The errors of reading a malformed file, other than ``OSError``."""


def load(path: Path) -> Any:
    """The content of a YAML file as plain data; references like ``${seed}`` are not resolved.

    Raises:
        OSError: if the file cannot be read.
        YAMLError: (or another of ``YAMLProblem``) if it is malformed, nested too deeply, or would become too large.
    """
    text = path.read_text(encoding="utf-8")
    _measure(text)
    found: Any = yaml.load(text, LOADER) if text.strip() else {}
    if found is None or isinstance(found, str):
        found = {} if found is None else {found: None}
    elif not isinstance(found, dict | list):
        raise yaml.YAMLError("it holds one value alone")
    try:
        return _plain(found)
    except TypeError:
        return OmegaConf.to_container(OmegaConf.create(found), resolve=False)


def _plain(value: Any) -> Any:
    """A copy of what OmegaConf, which is slow, would leave as it is; for anything else a ``TypeError``."""
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if type(value) in (int, float, bool, type(None)) or (type(value) is str and "${" not in value):
        return value
    raise TypeError


def _measure(text: str) -> None:
    """Check the number of nodes, with aliases expanded, and the depth before anything is built."""
    anchored: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, LOADER):
        if isinstance(event, AliasEvent):
            total += anchored.get(event.anchor, 1)
        elif isinstance(event, CollectionStartEvent):
            opened.append((event.anchor, total))
            total += 1
        elif isinstance(event, CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                anchored[anchor] = total - before
        elif isinstance(event, NodeEvent):
            total += 1
        if len(opened) > DEPTH:
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
        ValueError: for anything else in ``${…}``, which could read the environment, or for too many references.
        OmegaConfBaseException: if there is nothing at that key, or references are circular.
    """
    count = _references(tree)
    if not count:
        return dict(tree)
    if count > REFERENCES:
        raise ValueError(f"there are {count} references, but there may be {REFERENCES}")
    found = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _references(value: Any) -> int:
    if isinstance(value, str):
        if "${" in PLAIN.sub("", value):
            raise ValueError(f"{value!r} is more than a reference to another key, like ${{seed}}")
        return len(PLAIN.findall(value))
    if isinstance(value, Mapping):
        return sum(map(_references, value.values())) + sum(map(_references, value))
    return sum(map(_references, value)) if isinstance(value, list | tuple) else 0
