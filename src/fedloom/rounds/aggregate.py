"""Aggregation: uploads are summed as they arrive, block by block, in the same order on every engine.

A cohort is cut into blocks of consecutive members. Within a block, Σ_{i in block} p_i x_i is accumulated member by
member (a *fold*); folds are then added in cohort order, ((b_1 + b_2) + b_3) + .... An engine can therefore return one
fold per block instead of one upload per client, and the result is bitwise independent of which worker computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import ClientError
from fedloom.base.tree import Float, Tree
from fedloom.core.parts import UPDATE, Reduce
from fedloom.core.submodels import mean_over_holders
from fedloom.rounds.exchange import BUFFERS, Failure, FailureKind, Result
from fedloom.rounds.plan import ClientPlan

LONGEST = 6  # default block size: larger blocks save little and leave cores idle at the end of a round
SHARE = 16  # a block holds at most 1/16 of its cohort
LAST = 4  # and at most 1/4 of the members not yet assigned
EQUAL = f"{BUFFERS}/equal"  # the slot of the buffers in which all members agree
EVEN = 4  # the number of even blocks is a multiple of this, so that all cores get equally many


def blocks(members: int) -> list[range]:
    """Cut a cohort into short blocks, which shrink towards the end so that all cores finish at about the same time."""
    cut: list[range] = []
    start = 0
    while start < members:
        size = max(min(LONGEST, members // SHARE, (members - start) // LAST), 1)
        cut.append(range(start, start + size))
        start += size
    return cut


def even_blocks(members: int, longest: int, shares: int = EVEN) -> list[range]:
    """Cut a cohort into blocks whose sizes differ by at most one: a multiple of ``shares`` of them, or one a member."""
    count = min(shares * -(-members // (shares * longest)), members)
    short, longer = divmod(members, max(count, 1))
    ends = [number * short + min(number, longer) for number in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


@dataclass
class Traffic:
    """Parameters (scalars) and bytes sent in one round, counted from the tensors themselves.

    A loss of the received model, if a part needs it, is one scalar of the model's type, which no uplink encodes.
    """

    down_params: int = 0
    up_params: int = 0
    bytes: int = 0

    def down(self, tensors: Iterable[Tensor], receivers: int) -> None:
        """Count one broadcast to ``receivers`` clients."""
        for t in tensors:
            self.down_params += receivers * t.numel()
            self.bytes += receivers * t.nbytes

    def up(self, tensors: Iterable[Tensor]) -> None:
        """Count one client's upload."""
        for t in tensors:
            self.count(t.numel(), t.nbytes)

    def count(self, numbers: int, nbytes: int) -> None:
        """Count an upload of ``numbers`` scalars in ``nbytes`` bytes."""
        self.up_params += numbers
        self.bytes += nbytes

    def add(self, other: Traffic) -> None:
        """Add the counts of ``other``."""
        self.down_params += other.down_params
        self.up_params += other.up_params
        self.bytes += other.bytes


@dataclass
class Fold:
    """The reduced results of consecutive cohort members.

    Every slice is summed as it arrives; single uploads are kept only where a part needs all of them.

    Attributes:
        sums: weighted sums by slice: ``update`` [P], ``buffers`` [buffers], ``<place>/<name>`` in the slice's own
            shape; and as ``buffers/equal`` the buffers in which all members agree.
        single_uploads: by slice, the uploads of the members that arrived, in order; shapes as in ``sums``.
        arrived: for each member, whether its result counts (False if it failed).
        results: each member's result without its uploads: state, loss, failure, and its displacement and buffers if the
            plan has ``report_models``.
        traffic: of the uploads.
        by_model: the folds of several models whose receivers share a block, instead of sums, kept uploads and traffic.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    single_uploads: dict[str, list[Tensor]] = field(default_factory=dict)
    arrived: list[bool] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    by_model: list[Fold] = field(default_factory=list)

    def add(self, plan: ClientPlan, result: Result, weight: float | None) -> None:
        """Add the next member's result; with ``weight=None`` (p is not known yet) its update is kept."""
        if result.failure is None and (reason := self._misfit(plan, result)):
            result = Result(result.client, failure=Failure(-1, result.client, FailureKind.MALFORMED, reason))
        self.arrived.append(result.failure is None)
        reported = plan.report_models and result.failure is None
        self.results.append(
            replace(
                result, update=result.update.new_empty(0), uploads={}, moved=result.moved if reported else None,
                buffers=result.buffers if reported else result.buffers.new_empty(0),
            )
        )  # fmt: skip
        if result.failure is not None:
            return
        if result.traffic is None:
            uploads = (t for tree in result.uploads.values() for t in tree.values())
            self.traffic.up((result.update, result.buffers, *uploads))
        else:
            self.traffic.count(*result.traffic)
        all_updates = plan.method.needs("updates")
        self._fold(UPDATE, result.update, weight, all_updates)
        if len(result.buffers) or all_updates:
            self._fold(BUFFERS, result.buffers, weight, all_updates)
            if weight is not None:
                self.sums[EQUAL] = agreement(self.sums.get(EQUAL, result.buffers), result.buffers)
        for place, part in plan.method.uploading:
            for name, how in part.uploads.items():
                value = result.update if name == UPDATE else result.uploads[place][name]
                if how is not Reduce.ALL and not (value.is_floating_point() or plan.method.only_sums):
                    value = value.to(plan.layout.dtype)  # the mean of whole numbers is not a whole number
                factor = {Reduce.ALL: None, Reduce.MIX: weight}.get(how, None if plan.keeps_uploads else 1.0)
                self._fold(f"{place}/{name}", value, factor)

    def _misfit(self, plan: ClientPlan, result: Result) -> str | None:
        """The reason why a result cannot be summed with the others; a sum would silently broadcast a smaller tensor."""
        layout, ring = plan.layout, plan.method.only_sums
        shapes: dict[str, tuple[int, ...]] = {UPDATE: (layout.shared_size,), BUFFERS: (layout.shared_buffers,)}
        sent: dict[str, Tensor | None] = {UPDATE: result.update, BUFFERS: result.buffers}
        for place, part in plan.method.uploading:
            for name in part.uploads:
                if name != UPDATE:
                    slot = f"{place}/{name}"
                    sent[slot] = result.uploads.get(place, {}).get(name)
                    before = self.sums.get(slot, next(iter(self.single_uploads.get(slot, ())), sent[slot]))
                    shapes[slot] = tuple(before.shape) if isinstance(before, Tensor) else ()
        for slot, value in sent.items():
            if not isinstance(value, Tensor):
                return f"it did not send {slot!r}"
            if tuple(value.shape) != shapes[slot]:
                return f"its {slot!r} has the shape {list(value.shape)} instead of {list(shapes[slot])}"
            fits_type = not value.numel() or value.dtype == layout.dtype or (ring and value.dtype == torch.int64)
            if slot in (UPDATE, BUFFERS) and not fits_type:
                return f"its {slot!r} is of type {value.dtype} instead of {layout.dtype}"
        for place, tree in result.uploads.items():
            for name in tree:
                if place not in plan.method.parts:
                    slot = f"{place}/{name}".removeprefix("/")
                    return f"it sent {slot!r}, but slots are called <place>/<name>, like 'uplink.0/scale'"
                if name not in plan.method.parts[place].uploads:
                    return f"it sent {f'{place}/{name}'!r}, which the part does not declare in its uploads"
        return None

    def _fold(self, slot: str, value: Tensor, weight: float | None, keep: bool = False) -> None:
        if weight is None or keep:
            self.single_uploads.setdefault(slot, []).append(value.clone())
        if weight is None:
            return
        if not value.is_floating_point():
            weight = 1  # elements of a ring: the uplink takes plain sums and reduces them itself
        if slot in self.sums:
            self.sums[slot].add_(value, alpha=weight)
        else:
            self.sums[slot] = weight * value

    def merge(self, other: Fold) -> None:
        """Add the fold of the next members, reusing its tensors; ``results`` are not taken over."""
        for slot, value in other.sums.items():
            if slot in self.sums:
                _same_shapes(slot, self.sums[slot], value)
            if slot == EQUAL:
                self.sums[slot] = agreement(self.sums.get(slot, value), value)
            elif slot in self.sums:
                self.sums[slot].add_(value)
            else:
                self.sums[slot] = value
        for slot, values in other.single_uploads.items():
            uploads = self.single_uploads.setdefault(slot, [])
            if uploads and values:
                _same_shapes(slot, uploads[0], values[0])
            uploads.extend(values)
        self.arrived += other.arrived
        self.traffic.add(other.traffic)

    def reduced(self, slot: str, divisor: float, p: np.ndarray, how: Reduce = Reduce.MIX) -> Tensor:
        """The reduced slice: its sum over ``divisor``; of kept uploads likewise, or (``ALL``) a stack."""
        if slot in self.sums:
            total = self.sums[slot]
            return total * (1 / divisor) if total.is_floating_point() else total
        if how is Reduce.ALL:
            return torch.stack(self.single_uploads[slot])
        if how is not Reduce.MIX:
            p = np.full(len(self.single_uploads[slot]), 1 / divisor)
        mixed = float(p[0]) * self.single_uploads[slot][0]
        for weight, value in zip(p[1:], self.single_uploads[slot][1:], strict=True):
            mixed.add_(value, alpha=float(weight))
        return mixed

    def buffers(self, divisor: float, p: np.ndarray) -> Tensor:
        """The mean of the buffers; what is equal at all clients, such as a mask, stays as it is, infinite or not."""
        equal = self.sums[EQUAL] if EQUAL in self.sums else reduce(agreement, self.single_uploads[BUFFERS])
        return torch.where(equal.isnan(), self.reduced(BUFFERS, divisor, p), equal)

    def of(self, places: Sequence[str]) -> Fold:
        """The slices of some parts alone."""
        slots = [slot for slot in {**self.sums, **self.single_uploads} if slot.rpartition("/")[0] in places]
        sums = {slot: self.sums[slot] for slot in slots if slot in self.sums}
        single_uploads = {slot: self.single_uploads[slot] for slot in slots if slot in self.single_uploads}
        return Fold(sums, single_uploads, self.arrived)

    def uploads(
        self, plan: ClientPlan, total: float, p: np.ndarray, clients: int, places: Sequence[str] | None = None
    ) -> dict[str, Tree]:
        """The uploads by place and name, reduced as declared, of every part or of the parts at some places.

        ``total`` is the Σ p_i with which they were summed, and ``clients`` the number that receive the model.
        """
        divisor = {Reduce.MIX: total, Reduce.MEAN: sum(self.arrived), Reduce.SHARE: clients} | dict.fromkeys(
            (Reduce.SUM, Reduce.ALL), 1
        )
        return {
            place: {name: self.reduced(f"{place}/{name}", divisor[how], p, how) for name, how in part.uploads.items()}
            for place, part in plan.method.uploading
            if places is None or place in places
        }


def _same_shapes(slot: str, a: Tensor, b: Tensor) -> None:
    """Raise a ``ClientError`` if two clients' slices differ in shape."""
    if a.shape != b.shape:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise ClientError(f"clients sent {slot!r} in the shapes {shapes}; a part must upload equal shapes.")


def agreement(a: Tensor, b: Tensor) -> Tensor:
    """The values in which two tensors agree, NaN elsewhere: a weighted mean of equal numbers need not be that number.

    >>> agreement(torch.tensor([1.0, 2.0, -torch.inf]), torch.tensor([1.0, 3.0, -torch.inf]))
    tensor([1., nan, -inf])
    """
    return torch.where(a == b, a, torch.nan)


def buffers_over_holders(
    levels: Sequence[Tensor], totals: Sequence[Fold], mass: Sequence[float], received: Float[Tensor, "buffers"]
) -> Float[Tensor, "buffers"]:
    """The mean of the buffers of clients of several levels over those that hold them; as received if none does.

    Args:
        levels: the positions of each level's buffers.
        totals: the sums over the clients of each level.
        mass: Σ p_i over the clients of each level.
        received: the buffers before the round.
    """
    equal, has_holder = torch.full_like(received, torch.nan), torch.zeros_like(received, dtype=torch.bool)
    for index, total in zip(levels, totals, strict=True):
        if EQUAL in total.sums:
            shared_values = total.sums[EQUAL]
            equal[index] = torch.where(has_holder[index], agreement(equal[index], shared_values), shared_values)
            has_holder[index] = True
    mean = mean_over_holders(levels, [total.sums.get(BUFFERS) for total in totals], mass, received)
    return torch.where(equal.isnan(), mean, equal)


def mixture(weights: Float[Tensor, "K"], values: Float[Tensor, "K B"]) -> Float[Tensor, "B"]:
    """Σ w_k x_k of values with weights that sum to 1; what is equal for all k stays as it is.

    Differentiable in the weights, which do not matter for what is equal.

    >>> mixture(torch.tensor([0.0, 1.0]), torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 3.0, -torch.inf]]))
    tensor([1., 3., -inf])
    """
    equal = (values == values[0]).all(0)
    return weights @ values.masked_fill(equal, 0.0) + values[0].where(equal, torch.zeros_like(values[0]))


def fold(
    plan: ClientPlan, results: Iterable[Result], weights: np.ndarray | None, places: Sequence[int] | None = None
) -> Fold:
    """Fold the results of one block.

    Args:
        plan: the client plan.
        results: the members' results, in order.
        weights: the members' mixing coefficients, float64 [members], if known.
        places: which of several models each member has received; None for one model.
    """
    folds = [Fold() for _ in range(1 if places is None else max(places) + 1)]
    position = 0
    for result in results:
        model_fold = folds[0 if places is None else places[position]]
        model_fold.add(plan, result, None if weights is None else float(weights[position]))
        position += 1  # noqa: SIM113
        del result  # the next member's vectors take its memory, which is in the caches
    if places is None:
        return folds[0]
    return Fold(results=[result for part in folds for result in part.results], by_model=folds)
