"""Which samples each client of a block sees in which step, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """The mini-batches of a block of clients in a round.

    Clients lie in the order of their numbers of steps, those with the most first, so that whoever still works are the
    first c of them.

    Attributes:
        order: which client of the block each row is.
        rows: the samples that each client sees, as rows of the data set, int64 [C, n]; filled up with its first one.
        places: of every step, which of those samples make the batch, int64 [c, B].
        weights: of every step, what a row counts in its client's mean, float64 [c, B]: one over the size of the
            client's batch, or zero for a row that fills up.
        steps: of every client, int64 [C].
    """

    order: np.ndarray
    rows: Tensor
    places: list[Tensor]
    weights: list[Tensor]
    steps: np.ndarray

    @classmethod
    def of(cls, batches: Sequence[Sequence[np.ndarray]]) -> Schedule:
        """The schedule of the clients' mini-batches, each with at least one.

        >>> schedule = Schedule.of([[np.array([5, 3])], [np.array([7]), np.array([8])]])
        >>> schedule.order.tolist(), schedule.rows.tolist(), [p.tolist() for p in schedule.places]
        ([1, 0], [[7, 8], [3, 5]], [[[0, 0], [1, 0]], [[1]]])
        """
        steps = np.array([len(each) for each in batches])
        order = np.argsort(-steps, kind="stable")
        ordered = [batches[i] for i in order]
        found = [np.unique(np.concatenate(each), return_inverse=True) for each in ordered]
        rows = _filled([samples for samples, _ in found], "first")
        lengths = [[len(batch) for batch in each] for each in ordered]
        cut = [np.split(at, np.cumsum(sizes)[:-1]) for (_, at), sizes in zip(found, lengths, strict=True)]
        places, weights = [], []
        for number in range(int(steps.max())):
            working = [each[number] for each in cut if len(each) > number]
            at = _filled(working, "zero")
            sizes = np.array([len(each) for each in working])[:, None]
            places.append(torch.from_numpy(at))
            weights.append(torch.from_numpy((np.arange(at.shape[1]) < sizes) / sizes))
        return cls(order, torch.from_numpy(rows), places, weights, steps[order])


def _filled(rows: Sequence[np.ndarray], by: str) -> np.ndarray:
    """Arrays of several lengths as one, int64 [C, longest], filled up with each one's ``first``, or with ``zero``."""
    width = max(map(len, rows))
    made = np.zeros((len(rows), width), dtype=np.int64)
    for line, each in zip(made, rows, strict=True):
        line[: len(each)] = each
        if by == "first":
            line[len(each) :] = each[0]
    return made
