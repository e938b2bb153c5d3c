"""Selects the test cases that run when there is no time for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def first_quick(cases: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """The first case as it is, the others marked slow; a mapping's keys are ids."""
    pairs = list(cases.items()) if isinstance(cases, Mapping) else [(None, case) for case in cases]
    return [pytest.param(c, id=i, marks=[pytest.mark.slow] if n else []) for n, (i, c) in enumerate(pairs)]
