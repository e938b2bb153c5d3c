"""Metrics by name from one forward pass, over all samples or over groups of them.

With one label per position of a sequence, every metric counts positions, not sequences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.errors import ConfigError, nearest
from fedloom.metrics.curves import Direction
from fedloom.metrics.prediction import auroc, ece, mce

Array = NDArray[Any]
NAMED = ("accuracy", "auroc", "ece", "mce")
_OF_GROUPS: dict[str, Callable[[Array, Array], float]] = {"auroc": auroc, "ece": ece, "mce": mce}
_LOWER = {"ece", "mce", "std", "gini", "gap"}


def check(names: Sequence[str]) -> None:
    """Raise a ``ConfigError`` for an unknown name of a metric.

    >>> check(["accuracy", "top5", "auc"])
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: unknown metric 'auc'; did you mean 'auroc'? There are: accuracy, auroc, ...
    """
    for name in names:
        if name not in NAMED and not re.fullmatch(r"top[1-9]\d*", name):
            raise ConfigError(f"unknown metric {name!r}; {nearest(name, (*NAMED, 'topK'))}")


def direction(key: str) -> Direction:
    """Whether higher or lower values of this key of a run's records are better.

    >>> direction("global/accuracy"), direction("clients/loss/mean"), direction("clients/ece/worst10")
    ('max', 'min', 'min')
    """
    words = [word.removeprefix("train_") for word in key.split("/")]
    return "min" if any(word in _LOWER or word.endswith("loss") for word in words) else "max"


@dataclass(frozen=True)
class Predictions:
    """Sufficient statistics of predictions on n samples.

    Attributes:
        count: number of labels in each sample [n]: 1, or the positions of a sequence without padding.
        sums: for ``loss``, ``accuracy`` and ``topK``, the sum over each sample's labels [n].
        kept: for ``auroc``, ``ece`` and ``mce``, the scores or confidences [Σ count, ...] and the labels or outcomes
            [Σ count] of all labels.
    """

    count: Array
    sums: dict[str, Array]
    kept: dict[str, tuple[Array, Array]]

    @staticmethod
    def joined(parts: Sequence[Predictions]) -> Predictions:
        """Concatenate several parts."""
        return Predictions(
            np.concatenate([part.count for part in parts]),
            {k: np.concatenate([part.sums[k] for part in parts]) for k in parts[0].sums},
            {
                k: (np.concatenate([p.kept[k][0] for p in parts]), np.concatenate([p.kept[k][1] for p in parts]))
                for k in parts[0].kept
            },
        )

    def value(self, name: str) -> float:
        """The metric over all samples; NaN if undefined (accuracy of a regression, AUROC of one class)."""
        n = len(self.count)
        return float(self.by_group(name, np.array([0, n]))[0]) if n else float("nan")

    def by_group(self, name: str, offsets: Array) -> NDArray[np.float64]:
        """The metric of each group [G]; group g is the non-empty range of rows ``offsets[g]:offsets[g + 1]``."""
        if name in self.sums:
            total, n = (np.add.reduceat(a, offsets[:-1]) for a in (self.sums[name], self.count))
            return np.divide(total, n, out=np.full(len(n), np.nan), where=n > 0)
        ends = np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)[offsets]
        scores, outcome = self.kept[name]
        compute = _OF_GROUPS[name]
        return np.array([compute(scores[a:b], outcome[a:b]) for a, b in pairwise(ends)])


def predictions(names: Sequence[str], out: Tensor, y: Tensor, padding: int | None = None) -> Predictions:
    """The statistics of one batch.

    Args:
        names: metrics to compute, in addition to the loss.
        out: logits [B, C], or [B, T, C] for sequences; predictions [B, ...] for a regression.
        y: class numbers [B] or [B, T]; targets [B, ...] for a regression, with the loss ½‖out - y‖².
        padding: label of positions that do not count.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> found = predictions(["accuracy", "top2"], logits, torch.tensor([0, 1]))
        >>> found.value("accuracy"), found.value("top2")
        (0.5, 1.0)
    """
    if y.is_floating_point():
        count = np.ones(len(y))
        loss = 0.5 * (out.flatten(1) - y.reshape(len(y), -1)).square().sum(1)
        none = np.full(len(y), np.nan)
        return Predictions(
            count,
            {"loss": _numpy(loss)} | {n: none for n in names if n not in _OF_GROUPS},
            {n: (none[:0], none[:0]) for n in names if n in _OF_GROUPS},
        )
    counted = torch.ones_like(y, dtype=torch.bool) if padding is None else y != padding
    guess = out.argmax(-1)
    right = guess == y
    columns: dict[str, Tensor] = {"loss": F.cross_entropy(out.movedim(-1, 1), y, reduction="none")}
    for name in names:
        if name == "accuracy":
            columns[name] = right
        elif name.startswith("top"):
            best = out.topk(min(int(name[3:]), out.shape[-1]), -1).indices
            columns[name] = (best == y[..., None]).any(-1)
    kept: dict[str, tuple[Array, Array]] = {}
    if any(name in _OF_GROUPS for name in names):
        p = out.double().softmax(-1)
        sure = _numpy(p.amax(-1)[counted]), _numpy(right[counted])
        kept |= {name: sure for name in names if name in ("ece", "mce")}
        if "auroc" in names:
            # log odds order samples like probabilities, without ties where those round to 0 or 1
            scores = (out[..., 1] - out[..., 0]).double() if out.shape[-1] == 2 else p
            kept["auroc"] = (_numpy(scores[counted]), y[counted].cpu().numpy())
    sums = {name: _numpy(_per_sample(torch.where(counted, v, 0))) for name, v in columns.items()}
    return Predictions(_numpy(_per_sample(counted)), sums, kept)


def _per_sample(values: Tensor) -> Tensor:
    return values.double().flatten(1).sum(1) if values.ndim > 1 else values


def _numpy(values: Tensor) -> Array:
    return values.double().cpu().numpy()
