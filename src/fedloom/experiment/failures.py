"""The clients left out of a run, as checkpoints hold them: every reason once, and three numbers for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core.client import Failure
from fedloom.core.tree import Tree

REASON = ("kind", "reason", "stage", "trace")


def packed(failures: Sequence[Failure]) -> tuple[list[dict[str, str]], Tree]:
    """The different reasons, and a table of all failures: ``round``, ``client`` and ``reason``, int64 [failures].

    Drop-outs of a long run are many, and every checkpoint has all of them.

    >>> from fedloom.core.client import FailureKind
    >>> failures = [Failure(round, 7, FailureKind.ABSENT, "dropped out") for round in range(3)]
    >>> reasons, table = packed(failures)
    >>> len(reasons), table["round"].tolist(), unpacked(reasons, table) == failures
    (1, [0, 1, 2], True)
    """
    numbers: dict[tuple[str, ...], int] = {}
    rows = [
        (f.round, f.client, numbers.setdefault((f.kind.value, f.reason, f.stage, f.trace), len(numbers)))
        for f in failures
    ]
    columns = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).T
    names = ("round", "client", "reason")
    return [dict(zip(REASON, key, strict=True)) for key in numbers], dict(zip(names, columns, strict=True))


def unpacked(reasons: Sequence[Mapping[str, Any]], table: Mapping[str, Tensor] | None) -> list[Failure]:
    """The failures: the inverse of ``packed``; without a table, each reason has its round and client, as it once had.

    Raises:
        LookupError: if the table names reasons that there are not (TypeError or ValueError: other damage).
    """
    if table is None:
        return [Failure(**reason) for reason in reasons]
    rows = zip(*(table[name].tolist() for name in ("round", "client", "reason")), strict=True)
    return [Failure(round, client, **reasons[number]) for round, client, number in rows]
