"""Metrics by name from one forward pass, over all samples or over groups of them.

With one label per position of a sequence, every metric counts positions, not sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.federation import Index
from fedloom.core.targets import CLASSES, NUMBERS, TargetKind, aligned, kind_of, row_means
from fedloom.metrics.prediction import confidence_bins
from fedloom.metrics.registry import Array, cross_entropy, lookup, view

TestLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Predictions:
    """Sufficient statistics of predictions on n samples.

    Attributes:
        count: number of labels in each sample [n]: 1, or the positions of a sequence without padding.
        sums: for the loss and for metrics that are means, the sum over each sample's labels [n].
        kept: by view (see ``metric``), the data of the other metrics: predictions [Σ count, ...] and targets or
            outcomes [Σ count, ...] of all labels.
        whole: unchanged outputs [n, ...] and targets [n, ...], if the loss is a function of all samples at once.
        loss: that function.
    """

    count: Array
    sums: dict[str, Array]
    kept: dict[str, tuple[Array, Array]]
    whole: tuple[Array, Array] | None = None
    loss: TestLoss | None = None

    @staticmethod
    def joined(parts: Sequence[Predictions]) -> Predictions:
        """Concatenate several parts."""
        first = parts[0]
        return Predictions(
            np.concatenate([part.count for part in parts]),
            {k: np.concatenate([part.sums[k] for part in parts]) for k in first.sums},
            {k: _concatenated([part.kept[k] for part in parts]) for k in first.kept},
            None if first.whole is None else _concatenated([part.whole for part in parts if part.whole is not None]),
            first.loss,
        )

    def take(self, samples: Array) -> Predictions:
        """The predictions on these samples, int [m], in this order.

        >>> found = predictions(["accuracy"], torch.eye(3), torch.tensor([0, 1, 0]))
        >>> found.take(np.array([2, 0])).value("accuracy")
        0.5
        """
        places, kept = np.arange(len(self.count) + 1), {}
        for of, (first, second) in self.kept.items():
            ends = self._rows(places, len(first) if of == "confidence" else None)
            at = Index(np.arange(ends[-1]), ends).pick(samples).rows
            kept[of] = first[at], second[at]
        sums = {name: values[samples] for name, values in self.sums.items()}
        whole = None if self.whole is None else (self.whole[0][samples], self.whole[1][samples])
        return Predictions(self.count[samples], sums, kept, whole, self.loss)

    def split(self, count: int) -> list[Predictions]:
        """Predictions of several models on the same samples, model by model."""
        pairs = {k: list(zip(*(np.split(one, count) for one in pair), strict=True)) for k, pair in self.kept.items()}
        sums = {k: np.split(values, count) for k, values in self.sums.items()}
        whole = [None] * count
        if self.whole is not None:
            whole = list(zip(*(np.split(one, count) for one in self.whole), strict=True))
        return [
            Predictions(
                one, {k: v[n] for k, v in sums.items()}, {k: v[n] for k, v in pairs.items()}, whole[n], self.loss
            )
            for n, one in enumerate(np.split(self.count, count))
        ]

    def value(self, name: str) -> float:
        """The metric over all samples; NaN if undefined (accuracy of a regression, AUROC of one class)."""
        n = len(self.count)
        return float(self.by_group(name, np.array([0, n]))[0]) if n else float("nan")

    def by_group(self, name: str, offsets: Array) -> NDArray[np.float64]:
        """The metric of each group [G]; group g is the non-empty range of rows ``offsets[g]:offsets[g + 1]``."""
        finish = None if name == "loss" else lookup(name).finish
        if name in self.sums:
            total, n = (np.add.reduceat(a, offsets[:-1]) for a in (self.sums[name], self.count))
            mean = np.divide(total, n, out=np.full(len(n), np.nan), where=n > 0)
            return mean if finish is None else finish(mean)
        if name == "loss":
            assert self.whole is not None
            assert self.loss is not None
            out, y = map(torch.from_numpy, self.whole)
            return np.array([float(self.loss(out[a:b], y[a:b])) for a, b in pairwise(offsets.tolist())])
        one = lookup(name)
        if one.function is None or one.of not in self.kept:
            return np.full(len(offsets) - 1, np.nan)  # not defined for these targets
        first, second = self.kept[one.of]
        ends = self._rows(offsets, len(first)) if one.of == "confidence" else self._rows(offsets)
        return np.array([one.value(first[a:b], second[a:b]) for a, b in pairwise(ends.tolist())])

    def bins(self, offsets: Array) -> NDArray[np.float64]:
        """Sums in bins of confidence for each group [G, 15, 3]; see ``confidence_bins``. A metric must have kept it."""
        confidence, correct = self.kept["confidence"]
        return confidence_bins(confidence, correct, self._rows(offsets, len(confidence)))

    def _rows(self, offsets: Array, total: int | None = None) -> NDArray[np.int64]:
        """Kept rows at which groups begin and end; there are ``total``, if a sample has several labels."""
        ends = np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)
        return ends[offsets] * (1 if total is None else total // max(int(ends[-1]), 1))


def predictions(
    names: Sequence[str],
    out: Tensor,
    y: Tensor,
    padding: int | None = None,
    *,
    loss: TestLoss | None = None,
    declared: TargetKind | None = None,
) -> Predictions:
    """The statistics of one batch.

    Args:
        names: metrics to compute, in addition to the loss.
        out: outputs: logits [B, C], or [B, T, C] for sequences; for truth values and numbers one per target.
        y: class numbers [B] or [B, T]; truth values or numbers [B, ...].
        padding: label of positions that do not count.
        loss: the loss (outputs, targets) -> values per sample [B] or position [B, T], or one for all samples, []; by
            default cross entropy for classes, binary cross entropy for truth values and ½‖out - y‖² for numbers.
        declared: the kind of targets that the objective declares; see ``fedloom.core.targets``.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> found = predictions(["accuracy", "top2"], logits, torch.tensor([0, 1]))
        >>> found.value("accuracy"), found.value("top2")
        (0.5, 1.0)
    """
    kind = kind_of(out, y, declared)
    classes = kind == CLASSES
    counted = y != padding if classes and padding is not None else None
    count = np.ones(len(y)) if not classes else _numpy(_per_sample(torch.ones_like(y) if counted is None else counted))
    values = (loss or _usual(kind))(out, y)
    whole = (out.cpu().numpy(), y.cpu().numpy()) if values.ndim == 0 else None
    a, b = aligned(out, y, kind) if out[:1].numel() == y[:1].numel() or classes else (out, y)
    columns: dict[str, Tensor] = {} if whole else {"loss": values}
    views: dict[str, tuple[Array, Array]] = {}
    sums: dict[str, Array] = {}
    for name in names:
        one = lookup(name)
        if kind not in one.suits:
            sums[name] = np.full(len(y), np.nan)
        elif one.column is not None:
            columns[name] = one.column(a, b, kind)
        elif one.of not in views:
            rows = (a, b) if not classes else (a.flatten(0, -2), b.flatten())
            rows = rows if counted is None else tuple(t[counted.flatten()] for t in rows)
            first, second = view(one.of, *rows, kind)
            views[one.of] = first.cpu().numpy(), second.cpu().numpy()
    for name, column in columns.items():
        if classes and column.shape == y.shape:
            sums[name] = _numpy(_per_sample(column if counted is None else torch.where(counted, column, 0)))
        else:  # one value per sample, of however many positions
            sums[name] = _numpy(row_means(column.double())) * count
    return Predictions(count, sums, views, whole, loss if whole else None)


def _usual(kind: TargetKind) -> TestLoss:
    """The default loss for a kind of targets, if the objective has none of its own."""
    if kind == NUMBERS:
        return lambda out, y: 0.5 * (out.reshape(len(out), -1) - y.reshape(len(y), -1)).square().sum(1)
    return lambda out, y: cross_entropy(out, y, kind)


def _concatenated(pairs: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    first, second = zip(*pairs, strict=True)
    return np.concatenate(first), np.concatenate(second)


def _per_sample(values: Tensor) -> Tensor:
    return values.double().flatten(1).sum(1) if values.ndim > 1 else values


def _numpy(values: Tensor) -> Array:
    return values.double().cpu().numpy()
