"""Selects the test cases that run when there is no time for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

from fedloom.methods import methods

exhaustive = pytest.mark.exhaustive
KINDS = (  # one method for every kind of message, state, pair, level, buffer and single update
    "fedavg", "scaffold", "feddc", "fedsplit", "fednova", "moon", "fedproto", "fedmgda", "afl", "fedssa", "krum",
    "per_fedavg", "fedrep", "apfl", "superfed_mm", "fedhen", "heterofl", "ifca", "fedevg",
)  # fmt: skip


def kinds(names: Iterable[Any] = (), among: Collection[Any] = KINDS) -> list[Any]:
    """All methods, or ``names``: those ``among`` the representatives as they are, the others exhaustive.

    A tuple has the values of several arguments.
    """
    rows = [(name, name if isinstance(name, tuple) else (name,)) for name in names or methods.names()]
    return [pytest.param(*row, marks=[] if name in among else exhaustive) for name, row in rows]


def beyond_once(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests with several parametrisations, the combinations beyond each value once.

    Of K lists of values as many combinations are left as the longest has values: the n-th has of list j the value
    n + j·⌊n / L_j⌋ modulo its length L_j, so that short lists do not step together.
    """
    functions: dict[str, list[Any]] = {}
    for item in items:
        if getattr(item, "callspec", None):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        lists = []
        for mark in cases[0].iter_markers("parametrize"):
            first = mark.args[0].partition(",")[0].strip() if isinstance(mark.args[0], str) else mark.args[0][0]
            places: dict[int, int] = {}
            lists.append([places.setdefault(id(case.callspec.params[first]), len(places)) for case in cases])
        sizes = [max(place) + 1 for place in lists]
        once = {
            tuple((n + j * (n // size)) % size for j, size in enumerate(sizes)) for n in range(max(sizes, default=0))
        }
        if len(sizes) > 1:
            yield from (case for case, at in zip(cases, zip(*lists, strict=True), strict=True) if at not in once)
