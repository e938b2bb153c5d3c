"""Checks that a run directory still holds everything a run recorded, before the run is resumed there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

Record = Mapping[str, Any]


def missing(records: Sequence[Record], tables: Mapping[str, Mapping[str, np.ndarray]], round: int) -> str | None:
    """What is missing or altered among the records up to a round, as text; None if everything is there.

    Args:
        records: the lines of ``metrics.jsonl``, in file order.
        tables: the columns of each parquet file; empty if there is no file.
        round: number of completed rounds.

    >>> missing([{"round": 1, "seconds": 1.0}, {"round": 4, "seconds": 1.0}], {}, 4)
    'metrics.jsonl lacks rounds 2 to 3'
    >>> records = [{"round": 1, "seconds": 1.0, "train/loss": loss} for loss in (0.5, 0.4)]
    >>> missing(records, {}, 1)
    'metrics.jsonl has two different records of round 1'
    """
    past = [record for record in records if record["round"] <= round]
    by_round: dict[int, Record] = {}
    for record in past:
        if not isinstance(record.get("seconds"), int | float):
            return f"metrics.jsonl has a damaged record of round {record['round']}"
        if _numbers(by_round.setdefault(record["round"], record)) != _numbers(record):
            return f"metrics.jsonl has two different records of round {record['round']}"
    if gaps := set(range(1, round + 1)) - by_round.keys():
        return f"metrics.jsonl lacks {spans(gaps)}"
    for name, needed in (("mixing", _mixed), ("clients", _evaluated)):
        there = np.unique(tables.get(name, {}).get("round", np.zeros(0))).tolist()
        if gaps := {at for at, record in by_round.items() if needed(record)} - set(there):
            return f"{name}.parquet lacks {spans(gaps)}"
    return None


def _mixed(record: Record) -> bool:
    return bool(record.get("cohort"))


def _evaluated(record: Record) -> bool:
    return any(key.startswith("clients/") for key in record)


def _numbers(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def spans(rounds: Iterable[int]) -> str:
    """Rounds as text, with at most three intervals.

    >>> spans({4, 2, 3, 9}), spans({7}), spans(range(1, 20, 2))
    ('rounds 2 to 4, 9', 'round 7', 'rounds 1, 3, 5, …')
    """
    ordered = sorted(rounds)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b > a + 1), ordered[-1]]
    stretches = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    return f"round{'s' * (len(ordered) > 1)} {', '.join(stretches[:3])}{', …' if len(stretches) > 3 else ''}"
