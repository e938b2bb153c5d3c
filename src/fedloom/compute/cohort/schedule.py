"""The mini-batches of a block of clients in a round, as index arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedloom.base.tree import Int, Shaped
from fedloom.core.federation import Split

Change = Callable[[Tensor, range], Tensor]
"""Maps the inputs [N, ...] of the given steps, in the order of the steps and then of the clients, to new inputs."""

AHEAD = 1 << 29  # bytes


@dataclass(frozen=True)
class Rows:
    """Samples of clients that stay in their data set until a step needs them, since a copy may be large.

    Attributes:
        data: the data set [N, ...].
        rows: the samples of each client, as rows of the data set, int64 [C, n].
    """

    data: Tensor
    rows: Tensor

    @property
    def like(self) -> Tensor:
        """A view of the data set with a row for each client, [C, N, ...], which has the device and the type."""
        return self.data.expand(len(self.rows), *self.data.shape)

    @cached_property
    def samples(self) -> Shaped[Tensor, "C n ..."]:
        """The samples of each client."""
        return self.data[self.rows]

    def __getitem__(self, places: Int[Tensor, "c B"]) -> Shaped[Tensor, "c B ..."]:
        """The first c clients' samples at the given positions."""
        at = self.rows[: len(places)].gather(1, places)
        return self.data.index_select(0, at.flatten()).unflatten(0, at.shape)


@dataclass(frozen=True)
class BatchSchedule:
    """The mini-batches of a block of clients in a round.

    Clients are sorted by decreasing number of steps, so that those still working are always the first c.

    Attributes:
        order: the client of the block in each row, int64 [C].
        rows: the samples of each client, as rows of the data set, int64 [C, n], padded with its first one.
        places: for each step, the positions of the batch among those samples, int64 [c, B].
        weights: for each step, the weight of each row in its client's mean, float64 [c, B]: the inverse of the client's
            batch size, or 0 for padding.
        sizes: for each step, the batch sizes [c].
        steps: number of steps of each client, int64 [C].
    """

    order: np.ndarray
    rows: Tensor
    places: list[Tensor]
    weights: list[Tensor]
    sizes: list[list[int]]
    steps: np.ndarray

    @classmethod
    def of(cls, batches: Sequence[Sequence[np.ndarray]]) -> BatchSchedule:
        """The schedule of the clients' mini-batches, at least one per client.

        >>> schedule = BatchSchedule.of([[np.array([5, 3])], [np.array([7]), np.array([8])]])
        >>> schedule.order.tolist(), schedule.rows.tolist(), [p.tolist() for p in schedule.places]
        ([1, 0], [[7, 8], [3, 5]], [[[0, 0], [1, 0]], [[1]]])
        """
        steps = np.array([len(client_batches) for client_batches in batches])
        order = np.argsort(-steps, kind="stable")
        ordered = [batches[i] for i in order]
        unique = [np.unique(np.concatenate(client_batches), return_inverse=True) for client_batches in ordered]
        rows = _padded_array([samples for samples, _ in unique], "first")
        lengths = [[len(batch) for batch in client_batches] for client_batches in ordered]
        positions = [np.split(at, np.cumsum(sizes)[:-1]) for (_, at), sizes in zip(unique, lengths, strict=True)]
        places, weights, counts = [], [], []
        for number in range(int(steps.max())):
            active = [cuts[number] for cuts in positions if len(cuts) > number]
            at = _padded_array(active, "zero")
            sizes = np.array([len(batch) for batch in active])[:, None]
            places.append(torch.from_numpy(at))
            weights.append(torch.from_numpy((np.arange(at.shape[1]) < sizes) / sizes))
            counts.append(sizes[:, 0].tolist())
        return cls(order, torch.from_numpy(rows), places, weights, counts, steps[order])

    def labels(self, data: Split, clients: Sequence[int]) -> Shaped[Tensor, "C n ..."]:
        """The clients' own labels of their samples; clients are in the order of the rows."""
        owners = torch.tensor(clients, device=self.rows.device).repeat_interleave(self.rows.shape[1])
        return data.labels(self.rows.flatten(), owners).unflatten(0, self.rows.shape)

    def to(self, device: torch.device | str) -> BatchSchedule:
        """The schedule with its tensors on a device; they travel together, in three transfers."""
        if torch.device(device).type == "cpu":
            return self
        places, weights = _on_device(self.places, device), _on_device(self.weights, device)
        return replace(self, rows=self.rows.to(device), places=places, weights=weights)


def inputs(
    schedule: BatchSchedule, x: Shaped[Tensor, "C n ..."] | Rows, change: Change | None = None
) -> Iterator[Tensor]:
    """The inputs [c, B, ...] of every step, from the clients' samples.

    ``change`` may replace them, as random augmentation does, by others of any shape; it never sees padding. On a GPU it
    gets as many steps at a time as ``AHEAD`` bytes hold, since each call makes the host send random numbers.
    """
    if change is None:
        yield from (values_at(x, places) for places in schedule.places)
        return
    length = steps_ahead(x.like if isinstance(x, Rows) else x, schedule.places[0])
    for start in range(0, len(schedule.places), length):
        numbers = range(start, min(start + length, len(schedule.places)))
        batches = [values_at(x, schedule.places[number]) for number in numbers]
        real_rows = [_real(places, schedule.sizes[number]) for places, number in zip(batches, numbers, strict=True)]
        flat = [batch.flatten(0, 1) for batch in batches]
        samples = [batch if rows is None else batch[rows] for batch, rows in zip(flat, real_rows, strict=True)]
        changed = change(torch.cat(samples), numbers).split([len(batch) for batch in samples])
        for number, part, rows in zip(numbers, changed, real_rows, strict=True):
            padded = part if rows is None else part[_with_padding(schedule.sizes[number]).to(part.device)]
            yield padded.unflatten(0, schedule.places[number].shape)


def steps_ahead(x: Tensor, places: Tensor) -> int:
    """How many steps' inputs are changed in one call: on a CPU one step's, which are still in the caches."""
    return 1 if x.device.type == "cpu" else max(AHEAD // max(places.numel() * x[0, 0].nbytes, 1), 1)


def _real(x: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """The rows of [c · B, ...] that are not padding; None if all are."""
    width = x.shape[1]
    if all(size == width for size in sizes):
        return None
    rows = np.concatenate([np.arange(row * width, row * width + size) for row, size in enumerate(sizes)])
    return torch.from_numpy(rows).to(x.device)


def _with_padding(sizes: Sequence[int]) -> Tensor:
    """Where each of [c · B] rows is among those that are not padding; padding is its client's first row.

    >>> _with_padding([3, 1]).tolist()
    [0, 1, 2, 3, 3, 3]
    """
    starts, width = np.cumsum([0, *sizes[:-1]]), np.arange(max(sizes))
    at = starts[:, None] + np.where(width < np.array(sizes)[:, None], width, 0)
    return torch.from_numpy(at.reshape(-1))


def values_at(values: Shaped[Tensor, "C n ..."] | Rows, places: Int[Tensor, "c B"]) -> Shaped[Tensor, "c B ..."]:
    """Every client's values at the given positions."""
    if isinstance(values, Rows):
        return values[places]
    count, width = places.shape
    at = places + values.shape[1] * torch.arange(count, device=places.device)[:, None]
    return values.flatten(0, 1).index_select(0, at.flatten()).view(count, width, *values.shape[2:])


def _on_device(tensors: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """The tensors on another device, in one transfer."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _padded_array(rows: Sequence[np.ndarray], by: str) -> np.ndarray:
    """Arrays of different lengths as one, int64 [C, longest], padded with each one's ``first`` value or ``zero``."""
    width = max(map(len, rows))
    result = np.zeros((len(rows), width), dtype=np.int64)
    for line, row in zip(result, rows, strict=True):
        line[: len(row)] = row
        if by == "first":
            line[len(row) :] = row[0]
    return result
