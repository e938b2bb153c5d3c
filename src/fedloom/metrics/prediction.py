"""Metrics of predictions beyond accuracy: ranking (AUROC, top-k) and calibration (ECE, MCE)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedloom.core.errors import ConfigError

BINS = 15
NAN = float("nan")


def _rows(scores: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    s, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.int64).reshape(-1)
    if len(s) != len(y):
        raise ConfigError(f"there are {len(s)} rows of scores but {len(y)} labels.")
    return s, y


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve, by scikit-learn; with C > 2 columns, the mean of one-vs-rest over the classes present.

    It is NaN if all labels are equal or a score is NaN.

    Args:
        scores: of the positive class [n], or of every class [n, C]; any increasing function of the probability.
        labels: class numbers [n].

    Example:
        >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        0.75
        >>> auroc([[0.9, 0.1], [0.2, 0.8]], [0, 1])
        1.0
        >>> auroc([0.5, 0.6], [1, 1])
        nan
    """
    from sklearn.metrics import roc_auc_score  # slow to import

    s, y = _rows(scores, labels)
    if s.ndim == 2 and s.shape[1] == 2:
        s = s[:, 1] - s[:, 0]
    pairs = [(y == 1, s)] if s.ndim == 1 else [(y == c, s[:, c]) for c in np.unique(y)]
    pairs = [(positive, score) for positive, score in pairs if positive.any() and not positive.all()]
    if not pairs or np.isnan(s).any():
        return NAN
    top = np.finfo(np.float64).max  # replaces infinite scores, which scikit-learn rejects
    return float(np.mean([roc_auc_score(positive, score.clip(-top, top)) for positive, score in pairs]))


def top_k(scores: ArrayLike, labels: ArrayLike, k: int = 5) -> float:
    """Fraction of samples whose label is among the k classes with the highest scores.

    Args:
        scores: of every class [n, C].
        labels: class numbers [n].
        k: number of guesses.

    Example:
        >>> top_k([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], [1, 2], k=2)
        0.5
    """
    s, y = _rows(scores, labels)
    if k < 1:
        raise ConfigError(f"top-k needs at least 1 guess, not {k}.")
    best = np.argsort(-s, axis=1, kind="stable")[:, :k]
    return float((best == y[:, None]).any(1).mean()) if len(y) else NAN


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
    c, r = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if c.shape != r.shape:
        raise ConfigError(f"there are {c.size} confidences but {r.size} outcomes.")
    at = np.clip(np.ceil(c * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(at, minlength=bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = [np.bincount(at, weights=v, minlength=bins) / counts for v in (c, r)]
        return np.stack([counts / max(len(c), 1), *means], 1)


def ece(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error Σ_b (|b|/n) |accuracy(b) - confidence(b)|, with the bins of ``reliability``.

    Example:
        >>> ece([0.75, 0.75, 0.75, 0.75], [1, 1, 1, 0])
        0.0
        >>> ece([0.5, 1.0], [0, 1], bins=2)
        0.25
    """
    share, sure, right = reliability(confidence, correct, bins).T
    return float(np.nansum(share * np.abs(right - sure))) if share.any() else NAN


def mce(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Maximum calibration error: the largest |accuracy(b) - confidence(b)| over non-empty bins of ``reliability``.

    Example:
        >>> mce([0.5, 1.0], [0, 1], bins=2)
        0.5
    """
    share, sure, right = reliability(confidence, correct, bins).T
    return float(np.nanmax(np.abs(right - sure))) if share.any() else NAN
