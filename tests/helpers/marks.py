"""Selects the test cases that run when there is no time for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from fedloom.methods import methods

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
KINDS = (  # one method for every kind of message, state, pair, level, buffer and single update
    "fedavg", "scaffold", "feddc", "fedsplit", "fednova", "moon", "fedproto", "fedmgda", "afl", "fedssa", "krum",
    "per_fedavg", "fedrep", "apfl", "superfed_mm", "fedhen", "heterofl", "ifca", "fedevg",
)  # fmt: skip


def first_quick(cases: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """The first case as it is, the others marked slow; a mapping's keys are ids."""
    pairs = list(cases.items()) if isinstance(cases, Mapping) else [(None, case) for case in cases]
    return [pytest.param(c, id=i, marks=[slow] if n else []) for n, (i, c) in enumerate(pairs)]


def kinds(names: Iterable[str] = (), among: Collection[str] = KINDS) -> list[Any]:
    """All methods, or ``names``: those ``among`` the representatives as they are, the others exhaustive."""
    return [name if name in among else pytest.param(name, marks=exhaustive) for name in names or methods.names()]
