"""Metrics of predictions beyond accuracy: ranking, precision and recall, calibration, regression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Index
from fedloom.core.samples import moved
from fedloom.core.targets import CLASSES, NUMBERS, STRUCTURES, TRUTHS, TargetKind, aligned, kind_of, row_means
from fedloom.metrics.registry import DISCRETE, UNIT, Array, cross_entropy, lookup, metric, view, within_top

BINS = 15
NAN = float("nan")


def _rows(scores: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    s, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    y = y.reshape(-1) if y.ndim < 2 else y
    if y.ndim > 2:  # truth values of the pixels of a mask
        s, y = s.reshape(len(s), -1), y.reshape(len(y), -1)
    if len(s) != len(y):  # one could be broadcast, or left unread
        raise ConfigError(f"there are {len(s)} rows of scores but {len(y)} labels.")
    if y.ndim == 2 and y.size == len(y):  # one truth value
        s, y = s.reshape(len(y)), y.reshape(len(y))
    return s, y


def _one_against_rest(compute: Callable[..., float], scores: ArrayLike, labels: ArrayLike) -> float:
    """The mean of a ranking metric over classes or labels, of those that some but not all samples have."""
    s, y = _rows(scores, labels)
    if y.ndim == 2:
        pairs = [(y[:, c] == 1, s[:, c]) for c in range(y.shape[1])]
    else:
        s = s[:, 1] - s[:, 0] if s.ndim == 2 and s.shape[1] == 2 else s
        pairs = [(y == 1, s)] if s.ndim == 1 else [(y == c, s[:, c]) for c in np.unique(y)]
    pairs = [(positive, score) for positive, score in pairs if positive.any() and not positive.all()]
    if not pairs or np.isnan(s).any():
        return NAN
    return float(np.mean([compute(positive, score) for positive, score in pairs]))


@metric(of="scores", suits=DISCRETE, range=UNIT)
def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve; with C > 2 columns, the mean of one-vs-rest over the classes present.

    It is U / (n₊ n₋) of the Mann-Whitney statistic, U = Σ_{positive} rank - n₊(n₊ + 1)/2, where tied scores share their
    mean rank. It is NaN if all labels are equal or a score is NaN.

    Args:
        scores: scores of the positive class [n], or of every class [n, C]; any increasing function of the probability.
        labels: class numbers [n], or truth values [n, L].

    Example:
        >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        0.75
        >>> auroc([[0.9, 0.1], [0.2, 0.8]], [0, 1])
        1.0
        >>> auroc([0.5, 0.6], [1, 1])
        nan
    """
    return _one_against_rest(_area, scores, labels)


def _area(positive: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    from scipy.stats import rankdata  # slow to import

    n = int(positive.sum())
    return float((rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


@metric(of="scores", suits=DISCRETE, range=UNIT)
def auprc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Average precision Σ_k (r_k - r_{k-1}) p_k, the area under the precision-recall curve; classes as in ``auroc``.

    p_k and r_k are precision and recall of the k-th of the distinct scores as a threshold, from the highest down.

    Args:
        scores: as for ``auroc``.
        labels: class numbers [n], or truth values [n, L].

    Example:
        >>> round(auprc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 3)
        0.833
    """
    return _one_against_rest(_average_precision, scores, labels)


def _average_precision(positive: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    order = np.argsort(-scores, kind="stable")
    last = np.append(scores[order][1:] != scores[order][:-1], True)  # of the samples that share a score
    hits = np.cumsum(positive[order])[last]
    return float(np.sum(np.diff(hits, prepend=0) * hits / (np.flatnonzero(last) + 1)) / hits[-1])


@metric(of="probabilities", suits=DISCRETE, range=UNIT)
def f1(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """F1 score of class 1, 2TP / (2TP + FP + FN); with several classes or labels, the unweighted mean over them.

    A class with no sample and no prediction does not count; NaN if that holds for all, or a probability is NaN.

    Args:
        probabilities: probabilities of class 1 [n], or of every class [n, C] or label [n, L].
        labels: class numbers [n], or truth values [n, L].

    Example:
        >>> f1([0.9, 0.8, 0.2], [1, 0, 0]), f1([[0.9, 0.1, 0.0], [0.0, 0.0, 1.0]], [0, 1])
        (0.6666666666666666, 0.3333333333333333)
    """
    p, y = _rows(probabilities, labels)
    if not len(y) or np.isnan(p).any():
        return NAN
    if p.ndim == 2 and y.ndim == 1:
        guess, classes = p.argmax(1), p.shape[1]
        hits = np.bincount(y[y == guess], minlength=classes)
        sizes = np.bincount(y, minlength=classes) + np.bincount(guess, minlength=classes)
    else:
        guess, truth = p > 0.5, y == 1
        hits, sizes = np.atleast_1d((guess & truth).sum(0)), np.atleast_1d(guess.sum(0) + truth.sum(0))
    return float(np.mean(2 * hits[sizes > 0] / sizes[sizes > 0])) if sizes.any() else NAN


@metric(of="labels", suits=(CLASSES,), range=UNIT)
def balanced_accuracy(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Mean over the classes present of the fraction of their samples that is recognised.

    Args:
        predicted: class numbers [n].
        labels: class numbers [n].

    Example:
        >>> balanced_accuracy([0, 0, 0, 1], [0, 0, 1, 1])
        0.75
    """
    if not np.size(labels) or np.isnan(predicted).any():
        return NAN
    _, label = np.unique(np.asarray(labels), return_inverse=True)
    return float(np.mean(np.bincount(label, np.equal(predicted, labels)) / np.bincount(label)))


@metric(of="labels", suits=(TRUTHS,), range=UNIT)
def exact_match(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Fraction of samples whose truth values are all predicted.

    Args:
        predicted: truth values [n, L].
        labels: truth values [n, L].

    Example:
        >>> exact_match([[1, 0], [1, 1]], [[1, 0], [1, 0]])
        0.5
    """
    if np.isnan(predicted).any():
        return NAN
    same = np.asarray(predicted) == (np.asarray(labels) > 0.5)
    return float(same.reshape(len(same), -1).all(1).mean()) if len(same) else NAN


@metric(suits=(NUMBERS,), range=(-float("inf"), 1.0))
def r2(outputs: ArrayLike, targets: ArrayLike) -> float:
    """Coefficient of determination R² = 1 - Σ(y - ŷ)² / Σ(y - ȳ)²; the mean over several numbers.

    It is NaN for fewer than 2 samples; a number that is constant counts 1 if all outputs equal it, else 0.

    Args:
        outputs: [n] or [n, ...].
        targets: [n] or [n, ...].

    Example:
        >>> r2([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])
        0.7857142857142857
    """
    out, y = np.asarray(outputs, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    if len(out) < 2 or not np.isfinite(out).all():
        return NAN
    out, y = out.reshape(len(out), -1), y.reshape(len(y), -1)
    left, total = ((y - out) ** 2).sum(0), ((y - y.mean(0)) ** 2).sum(0)
    is_constant = (y == y[0]).all(0)  # its mean may differ from it by rounding
    return float(np.mean(1 - np.where(is_constant, left > 0, left / np.where(is_constant, 1, total))))


def top_k(scores: ArrayLike, labels: ArrayLike, k: int = 5) -> float:
    """Fraction of samples whose label is among the k classes with the highest scores.

    Args:
        scores: scores of every class [n, C].
        labels: class numbers [n].
        k: number of guesses.

    Example:
        >>> top_k([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], [1, 2], k=2)
        0.5
    """
    s, y = _rows(scores, labels)
    return float(within_top(torch.from_numpy(s), torch.from_numpy(y), k).double().mean()) if len(y) else NAN


def reliability(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> NDArray[np.float64]:
    """Reliability diagram: fraction of samples, mean confidence and accuracy of bins of equal width, [bins, 3].

    Bins are closed above, as in Guo et al. (2017); an empty bin has fraction 0 and NaN otherwise.

    Args:
        confidence: probability of the predicted class [n].
        correct: whether the prediction was right [n].
        bins: number of bins.

    Example:
        >>> reliability([0.2, 0.9, 1.0], [0, 1, 0], bins=2).round(2)
        array([[0.33, 0.2 , 0.  ],
               [0.67, 0.95, 0.5 ]])
    """
    return reliability_of(confidence_bins(confidence, correct, [0, np.size(confidence)], bins)[0])


def confidence_bins(
    confidence: ArrayLike, correct: ArrayLike, offsets: ArrayLike, bins: int = BINS
) -> NDArray[np.float64]:
    """Number of samples, sum of confidences and number right in the bins of ``reliability``, by group [G, bins, 3].

    Group g is the range of samples ``offsets[g]:offsets[g + 1]``; the sums of several groups add up. A NaN
    goes to the first bin, whose sum of confidences it makes NaN.
    """
    c, r = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    sizes = np.diff(np.asarray(offsets, dtype=np.int64))
    at = np.repeat(np.arange(len(sizes)) * bins, sizes)
    at += np.clip(np.ceil(np.nan_to_num(c) * bins).astype(np.int64) - 1, 0, bins - 1)
    sums = [np.bincount(at, weights=v, minlength=len(sizes) * bins) for v in (np.ones_like(c), c, r)]
    return np.stack(sums, -1).astype(np.float64).reshape(len(sizes), bins, 3)


def reliability_of(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The diagram of ``reliability`` [bins, 3] from sums in bins [bins, 3]."""
    counts = sums[:, :1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.concatenate([counts / max(counts.sum(), 1), sums[:, 1:] / counts], 1)


def _gaps(confidence: ArrayLike, correct: ArrayLike, bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """|b|/n and |accuracy(b) - confidence(b)| of the bins of ``reliability``; 0 in empty bins, so NaN is a sample's."""
    share, sure, right = reliability(confidence, correct, bins).T
    return share, np.where(share > 0, np.abs(right - sure), 0.0)


@metric(direction="min", of="confidence", suits=DISCRETE, range=UNIT)
def ece(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error Σ_b (|b|/n) |accuracy(b) - confidence(b)|, with the bins of ``reliability``.

    Example:
        >>> ece([0.75, 0.75, 0.75, 0.75], [1, 1, 1, 0])
        0.0
        >>> ece([0.5, 1.0], [0, 1], bins=2)
        0.25
    """
    share, gap = _gaps(confidence, correct, bins)
    return float((share * gap).sum()) if share.any() else NAN


@metric(direction="min", of="confidence", suits=DISCRETE, range=UNIT)
def mce(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Maximum calibration error: the largest |accuracy(b) - confidence(b)| over non-empty bins of ``reliability``.

    Example:
        >>> mce([0.5, 1.0], [0, 1], bins=2)
        0.5
    """
    share, gap = _gaps(confidence, correct, bins)
    return float(gap.max()) if share.any() else NAN


TestLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Predictions:
    """Sufficient statistics of predictions on n samples.

    Attributes:
        count: number of labels in each sample [n]: 1, or the positions of a sequence without padding.
        sums: for the loss and for metrics that are means, the sum over each sample's labels [n].
        views: by view (see ``metric``), the data of the other metrics: predictions [Σ count, ...] and targets or
            outcomes [Σ count, ...] of all labels.
        full_batch: unchanged outputs [n, ...] and targets [n, ...], if the loss is a function of all samples at once.
        loss: that function.
    """

    count: Array
    sums: dict[str, Array]
    views: dict[str, tuple[Array, Array]]
    full_batch: tuple[Array, Array] | None = None
    loss: TestLoss | None = None

    @staticmethod
    def concatenate(parts: Sequence[Predictions]) -> Predictions:
        """Concatenate several parts."""
        first = parts[0]
        return Predictions(
            np.concatenate([part.count for part in parts]),
            {k: np.concatenate([part.sums[k] for part in parts]) for k in first.sums},
            {k: _concatenated([part.views[k] for part in parts]) for k in first.views},
            None
            if first.full_batch is None
            else _concatenated([part.full_batch for part in parts if part.full_batch is not None]),
            first.loss,
        )

    def take(self, samples: Array) -> Predictions:
        """The predictions on these samples, int [m], in this order.

        >>> batch = predictions(["accuracy"], torch.eye(3), torch.tensor([0, 1, 0]))
        >>> batch.take(np.array([2, 0])).value("accuracy")
        0.5
        """
        places, views = np.arange(len(self.count) + 1), {}
        for of, (first, second) in self.views.items():
            ends = self._rows(places, len(first) if of == "confidence" else None)
            at = Index(np.arange(ends[-1]), ends).pick(samples).rows
            views[of] = first[at], second[at]
        sums = {name: values[samples] for name, values in self.sums.items()}
        full_batch = None if self.full_batch is None else (self.full_batch[0][samples], self.full_batch[1][samples])
        return Predictions(self.count[samples], sums, views, full_batch, self.loss)

    def split(self, count: int) -> list[Predictions]:
        """Predictions of several models on the same samples, model by model."""
        pairs = {
            k: list(zip(*(np.split(column, count) for column in pair), strict=True)) for k, pair in self.views.items()
        }
        sums = {k: np.split(values, count) for k, values in self.sums.items()}
        full_batches = [None] * count
        if self.full_batch is not None:
            full_batches = list(zip(*(np.split(column, count) for column in self.full_batch), strict=True))
        return [
            Predictions(
                column,
                {k: v[n] for k, v in sums.items()},
                {k: v[n] for k, v in pairs.items()},
                full_batches[n],
                self.loss,
            )
            for n, column in enumerate(np.split(self.count, count))
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
            assert self.full_batch is not None
            assert self.loss is not None
            out, y = map(torch.from_numpy, self.full_batch)
            return np.array([float(self.loss(out[a:b], y[a:b])) for a, b in pairwise(offsets.tolist())])
        metric = lookup(name)
        if metric.function is None or metric.of not in self.views:
            return np.full(len(offsets) - 1, np.nan)  # not defined for these targets
        first, second = self.views[metric.of]
        ends = self._rows(offsets, len(first)) if metric.of == "confidence" else self._rows(offsets)
        return np.array([metric.value(first[a:b], second[a:b]) for a, b in pairwise(ends.tolist())])

    def bins(self, offsets: Array) -> NDArray[np.float64]:
        """Sums in bins of confidence for each group [G, 15, 3]; see ``confidence_bins``.

        One of the metrics must be a function of ``confidence``.
        """
        confidence, correct = self.views["confidence"]
        return confidence_bins(confidence, correct, self._rows(offsets, len(confidence)))

    def _rows(self, offsets: Array, total: int | None = None) -> NDArray[np.int64]:
        """Rows of a view at which groups begin and end; ``total`` is their number if a sample has several labels."""
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
        >>> batch = predictions(["accuracy", "top2"], logits, torch.tensor([0, 1]))
        >>> batch.value("accuracy"), batch.value("top2")
        (0.5, 1.0)
    """
    kind = kind_of(out, y, declared)
    if kind == STRUCTURES:
        return _structure_predictions(names, out, y, loss)
    classes = kind == CLASSES
    mask = y != padding if classes and padding is not None else None
    count = np.ones(len(y)) if not classes else _numpy(_per_sample(torch.ones_like(y) if mask is None else mask))
    values = (loss or _default_loss(kind))(out, y)
    full_batch = (out.cpu().numpy(), y.cpu().numpy()) if values.ndim == 0 else None
    a, b = aligned(out, y, kind) if out[:1].numel() == y[:1].numel() or classes else (out, y)
    columns: dict[str, Tensor] = {} if full_batch else {"loss": values}
    views: dict[str, tuple[Array, Array]] = {}
    sums: dict[str, Array] = {}
    for name in names:
        metric = lookup(name)
        if kind not in metric.suits:
            sums[name] = np.full(len(y), np.nan)
        elif metric.column is not None:
            columns[name] = metric.column(a, b, kind)
        elif metric.of not in views:
            rows = (a, b) if not classes else (a.flatten(0, -2), b.flatten())
            rows = rows if mask is None else tuple(t[mask.flatten()] for t in rows)
            first, second = view(metric.of, *rows, kind)
            views[metric.of] = first.cpu().numpy(), second.cpu().numpy()
    for name, column in columns.items():
        if classes and column.shape == y.shape:
            sums[name] = _numpy(_per_sample(column if mask is None else torch.where(mask, column, 0)))
        else:  # one value per sample, of however many positions
            sums[name] = _numpy(row_means(column.double())) * count
    return Predictions(count, sums, views, full_batch, loss if full_batch else None)


def _structure_predictions(names: Sequence[str], out: Any, y: Any, loss: TestLoss | None) -> Predictions:
    """The predictions on one sample whose output and targets are structures, which are kept whole."""
    value = float("nan") if loss is None else float(loss(out, y).double().mean())
    pair = np.empty(1, object), np.empty(1, object)
    pair[0][0], pair[1][0] = (moved(v, "cpu") for v in (out, y))
    sums = {"loss": np.array([value])} | {n: np.array([NAN]) for n in names if STRUCTURES not in lookup(n).suits}
    return Predictions(np.ones(1), sums, {"outputs": pair})


def _default_loss(kind: TargetKind) -> TestLoss:
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
