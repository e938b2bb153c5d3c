"""Folding: uploads are summed as they arrive, block by block, in one order on all engines.

A cohort is cut into blocks of consecutive members. Each block is folded member by member, Σ_{i in block} p_i x_i, and
the folds are added up in the order of the cohort, ((b_1 + b_2) + b_3) + ..., so that an engine may hand over one fold a
block in place of every member's upload, and the bits do not depend on who did the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.client import Result
from fedloom.core.parts import Reduce
from fedloom.core.plan import Plan
from fedloom.core.submodels import shares
from fedloom.core.tree import Tree

LONGEST = 6  # members of a block: more of them would save little, and leave cores idle at the end of a round
SHARE = 16  # no block is more than this part of its cohort
LAST = 4  # nor more than this part of the members that are left


def blocks(members: int) -> list[range]:
    """How a cohort is cut, a function of its size alone; blocks grow short at the end, so that cores finish together.

    >>> blocks(3)
    [range(0, 1), range(1, 2), range(2, 3)]
    >>> [len(block) for block in blocks(100)] == 13 * [6] + [5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1]
    True
    """
    found: list[range] = []
    start = 0
    while start < members:
        size = max(min(LONGEST, members // SHARE, (members - start) // LAST), 1)
        found.append(range(start, start + size))
        start += size
    return found


@dataclass
class Traffic:
    """Parameters and bytes sent in one round, counted from the trees that were sent."""

    down_params: int = 0
    up_params: int = 0
    bytes: int = 0

    def down(self, trees: Iterable[Mapping[str, Tensor]], receivers: int) -> None:
        """Count one broadcast to a number of clients."""
        for t in trees:
            self.down_params += receivers * tree.count(t)
            self.bytes += receivers * tree.nbytes(t)

    def up(self, trees: Iterable[Mapping[str, Tensor]]) -> None:
        """Count one client's upload."""
        for t in trees:
            self.up_params += tree.count(t)
            self.bytes += tree.nbytes(t)

    def add(self, other: Traffic) -> None:
        """Count what another one has counted."""
        self.down_params += other.down_params
        self.up_params += other.up_params
        self.bytes += other.bytes


@dataclass
class Fold:
    """Consecutive members' results, reduced: one accumulator a slice, and single uploads only where a part needs all.

    Attributes:
        sums: weighted sums, by slice.
        kept: single uploads of those that arrived, in order, by slice.
        arrived: for each member whether its work counts; it does not if it failed.
        results: what remains of each result when its upload is folded: state, loss, failure, and the client's own
            displacement and buffers where the plan asks for them.
        sent: the uploads' traffic, each counted as it was sent.
    """

    sums: dict[str, Tree] = field(default_factory=dict)
    kept: dict[str, list[Tree]] = field(default_factory=dict)
    arrived: list[bool] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    sent: Traffic = field(default_factory=Traffic)

    def add(self, plan: Plan, result: Result, weight: float | None) -> None:
        """Fold in the next member's result; without a weight, which is then not known yet, its update is kept."""
        self.arrived.append(result.failure is None)
        remains = Result(
            result.client, state=result.state, loss=result.loss, steps=result.steps, failure=result.failure
        )
        self.results.append(remains)
        if result.failure is not None:
            return
        if plan.report_models:
            remains.moved, remains.buffers = result.moved, result.buffers
        update = {**result.update, "buffers": result.buffers}
        self.sent.up((update, *result.uploads.values()))
        slot = f"update/{plan.level[result.client]}" if plan.ladder else "update"  # one sum a level
        self._fold(slot, update, weight, keep=plan.method.needs("updates"))
        if plan.method.needs("update_share"):
            self._fold("update/share", result.update, 1.0)
        for place, upload in result.uploads.items():
            for name, how in plan.method.parts[place].uploads.items():
                factor = {Reduce.ALL: None, Reduce.MIX: weight}.get(how, 1.0)
                self._fold(f"{place}/{name}", {"": upload[name]}, factor)

    def _fold(self, slot: str, value: Tree, weight: float | None, keep: bool = False) -> None:
        if weight is None or keep:
            self.kept.setdefault(slot, []).append(tree.clone(value))
        if weight is None:
            return
        if slot in self.sums:
            tree.add_(self.sums[slot], value, weight)
        else:
            self.sums[slot] = tree.scale(value, weight)

    def merge(self, other: Fold) -> None:
        """Add the fold of the members that come next, whose tensors may be taken over; its results are not."""
        for slot, value in other.sums.items():
            if slot in self.sums:
                tree.add_(self.sums[slot], value)
            else:
                self.sums[slot] = value
        for slot, values in other.kept.items():
            self.kept.setdefault(slot, []).extend(values)
        self.arrived += other.arrived
        self.sent.add(other.sent)

    def mix(
        self, plan: Plan, weights: np.ndarray | None, p: np.ndarray, clients: np.ndarray | None = None
    ) -> tuple[Tree, Tensor, dict[str, dict]]:
        """The mixed update Δ, the mixed buffers, and every part's reduced uploads.

        Args:
            plan: with the parts, which declare how their uploads are reduced.
            weights: with which members were added, float64 [|S|], if they were known.
            p: the mixing coefficients over those that arrived.
            clients: who arrived, if they have levels.
        """
        total = 1.0 if weights is None else float(weights[self.arrived].sum())
        divisor = {Reduce.MIX: total, Reduce.MEAN: sum(self.arrived), Reduce.SHARE: len(plan.data)}

        def reduce(slot: str, how: Reduce) -> Tree:
            if slot in self.sums:
                return tree.scale(self.sums[slot], 1 / divisor[how])
            if how is Reduce.ALL:
                return {"": torch.stack([t[""] for t in self.kept[slot]])}
            mixed = tree.scale(self.kept[slot][0], float(p[0]))
            for weight, t in zip(p[1:], self.kept[slot][1:], strict=True):
                tree.add_(mixed, t, float(weight))
            return mixed

        reduced: dict[str, dict[str, Tree]] = {}
        for place, part in plan.method.parts.items():
            reduced[place] = {name: reduce(f"{place}/{name}", how) for name, how in part.uploads.items()}
            if part.needs.update_share:
                reduced[place]["update/share"] = reduce("update/share", Reduce.SHARE)
        if plan.ladder:
            assert weights is not None
            assert clients is not None
            return {"shared": self._regions(plan, weights[self.arrived], clients)}, torch.zeros(0), reduced
        update = reduce("update", Reduce.MIX)
        return update, update.pop("buffers"), reduced

    def _regions(self, plan: Plan, weights: np.ndarray, clients: np.ndarray) -> Tensor:
        """The mixed update [P] of clients of several levels: each parameter's mean over those that hold it."""
        level = plan.level[clients]
        mass = np.array([weights[level == number].sum() for number in range(len(plan.ladder))])
        total = torch.zeros_like(plan.theta0)
        for number, rung in enumerate(plan.ladder):
            if f"update/{number}" in self.sums:
                total[rung.index] += self.sums[f"update/{number}"]["shared"]
        return total * shares(plan.ladder, mass, total)


def fold(plan: Plan, results: Iterable[Result], weights: np.ndarray | None) -> Fold:
    """The fold of one block's results; ``weights`` are its members'."""
    folded = Fold()
    for position, result in enumerate(results):
        folded.add(plan, result, None if weights is None else float(weights[position]))
    return folded


def folds(plan: Plan, results: Iterator[Result], members: int, weights: np.ndarray | None) -> Iterator[Fold]:
    """The folds of a cohort's blocks, each made when it is asked for, from its members' results in order."""
    for block in blocks(members):
        part = None if weights is None else weights[block.start : block.stop]
        yield fold(plan, (next(results) for _ in block), part)
