"""Aggregation: uploads are summed as they arrive, block by block, in one order on all engines.

A cohort is cut into blocks of consecutive members. Each block is folded member by member, Σ_{i in block} p_i x_i, and
the folds are added up in the order of the cohort, ((b_1 + b_2) + b_3) + ..., so that an engine may hand over one fold a
block in place of every member's upload, and the bits do not depend on who did the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Result
from fedloom.core.parts import Reduce
from fedloom.core.plan import ClientPlan
from fedloom.core.tree import Tree

LONGEST = 6  # members of a block by default: more would save little, and leave cores idle at the end of a round
SHARE = 16  # no block is more than this part of its cohort
LAST = 4  # nor more than this part of the members that are left
UPDATE, BUFFERS = "update", "buffers"


def blocks(members: int, longest: int = LONGEST, shortest: int = 1) -> list[range]:
    """The blocks of a cohort, a function of its size alone; they get shorter at the end, so cores finish together.

    They have no fewer than the ``shortest`` number of members, where that leaves four blocks.

    >>> blocks(3)
    [range(0, 1), range(1, 2), range(2, 3)]
    >>> [len(block) for block in blocks(100)] == 13 * [6] + [5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1]
    True
    >>> [len(block) for block in blocks(50, 25, 4)], [len(block) for block in blocks(10, 25, 4)]
    ([4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2])
    """
    cut: list[range] = []
    start = 0
    while start < members:
        least = min(shortest, members // LAST, members - start)
        size = max(min(longest, members // SHARE, (members - start) // LAST), least, 1)
        cut.append(range(start, start + size))
        start += size
    return cut


@dataclass
class Traffic:
    """Parameters and bytes sent in one round, counted from the tensors that were sent."""

    down_params: int = 0
    up_params: int = 0
    bytes: int = 0

    def down(self, tensors: Iterable[Tensor], receivers: int) -> None:
        """Count one broadcast to a number of clients."""
        for t in tensors:
            self.down_params += receivers * t.numel()
            self.bytes += receivers * t.numel() * t.element_size()

    def up(self, tensors: Iterable[Tensor]) -> None:
        """Count one client's upload."""
        for t in tensors:
            self.up_params += t.numel()
            self.bytes += t.numel() * t.element_size()

    def add(self, other: Traffic) -> None:
        """Count what another one has counted."""
        self.down_params += other.down_params
        self.up_params += other.up_params
        self.bytes += other.bytes


@dataclass
class Fold:
    """Consecutive members' results, reduced: one sum a slice, and single uploads only where a part needs all.

    Attributes:
        sums: weighted sums, by slice: ``update`` [P], ``buffers``, ``<place>/<name>``.
        kept: single uploads of those that arrived, in order, by slice.
        arrived: for each member whether its work counts; it does not if it failed.
        results: what remains of each result when its upload is folded: state, loss, failure, and the client's own
            displacement and buffers where the plan asks for them.
        sent: the uploads' traffic, each counted as it was sent.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    arrived: list[bool] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    sent: Traffic = field(default_factory=Traffic)

    def add(self, plan: ClientPlan, result: Result, weight: float | None) -> None:
        """Fold in the next member's result; without a weight, which is then not known yet, its update is kept."""
        self.arrived.append(result.failure is None)
        reported = plan.report_models and result.failure is None
        self.results.append(
            replace(
                result, update=result.update[:0], uploads={}, moved=result.moved if reported else None,
                buffers=result.buffers if reported else result.buffers[:0],
            )
        )  # fmt: skip
        if result.failure is not None:
            return
        self.sent.up((result.update, result.buffers, *(t for tree in result.uploads.values() for t in tree.values())))
        all_updates = plan.method.needs("updates")
        self._fold(UPDATE, result.update, weight, all_updates)
        if len(result.buffers) or all_updates:
            self._fold(BUFFERS, result.buffers, weight, all_updates)
        for place, part in plan.method.uploading:
            for name, how in part.uploads.items():
                value = result.update if name == UPDATE else result.uploads[place][name]
                factor = {Reduce.ALL: None, Reduce.MIX: weight}.get(how, 1.0)
                self._fold(f"{place}/{name}", value, factor)

    def _fold(self, slot: str, value: Tensor, weight: float | None, keep: bool = False) -> None:
        if weight is None or keep:
            self.kept.setdefault(slot, []).append(value.clone())
        if weight is None:
            return
        if slot in self.sums:
            self.sums[slot].add_(value, alpha=weight)
        else:
            self.sums[slot] = weight * value

    def merge(self, other: Fold) -> None:
        """Add the fold of the members that come next, whose tensors may be taken over; its results are not."""
        for slot, value in other.sums.items():
            if slot in self.sums:
                self.sums[slot].add_(value)
            else:
                self.sums[slot] = value
        for slot, values in other.kept.items():
            self.kept.setdefault(slot, []).extend(values)
        self.arrived += other.arrived
        self.sent.add(other.sent)

    def mean(self, slot: str, divisor: float, p: np.ndarray, how: Reduce = Reduce.MIX) -> Tensor:
        """A slice, reduced: its sum over ``divisor``, or where members were kept Σ p_i x_i or all of them, stacked."""
        if slot in self.sums:
            return self.sums[slot] * (1 / divisor)
        if how is Reduce.ALL:
            return torch.stack(self.kept[slot])
        mixed = float(p[0]) * self.kept[slot][0]
        for weight, value in zip(p[1:], self.kept[slot][1:], strict=True):
            mixed.add_(value, alpha=float(weight))
        return mixed

    def uploads(self, plan: ClientPlan, total: float, p: np.ndarray) -> dict[str, Tree]:
        """Every part's slices by place and name, reduced as declared; ``total`` is Σ p_i with which they were added."""
        divisor = {Reduce.MIX: total, Reduce.MEAN: sum(self.arrived), Reduce.SHARE: len(plan.data), Reduce.ALL: 1}
        return {
            place: {name: self.mean(f"{place}/{name}", divisor[how], p, how) for name, how in part.uploads.items()}
            for place, part in plan.method.uploading
        }


def fold(plan: ClientPlan, results: Iterable[Result], weights: np.ndarray | None) -> Fold:
    """The fold of one block's results; ``weights`` are its members'."""
    folded = Fold()
    for position, result in enumerate(results):
        folded.add(plan, result, None if weights is None else float(weights[position]))
    return folded
