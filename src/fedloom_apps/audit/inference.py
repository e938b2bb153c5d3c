"""Membership inference: can one tell from a model whether a sample was trained on?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedloom.base.errors import ConfigError
from fedloom.metrics.prediction import auroc


class Inference(NamedTuple):
    """How well scores separate members from others.

    Attributes:
        auc: probability that a member's score exceeds another sample's; .5 for guessing.
        advantage: max over thresholds of true minus false positive rate; 0 for guessing.
        tpr: true positive rate at the given false positive rate.
    """

    auc: float
    advantage: float
    tpr: float


def inference(scores: np.ndarray, member: np.ndarray, fpr: float = 0.01) -> Inference:
    """Evaluate scores [N], high for suspected members, against the true membership, bool [N].

    Yeom, Giacomelli, Fredrikson & Jha, CSF 2018, definition 4 (advantage); Carlini et al., S&P 2022, section III (true
    positives at a low false positive rate, here at thresholds that let at most that fraction of the others pass).

    >>> inference(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False]))
    Inference(auc=1.0, advantage=1.0, tpr=1.0)
    """
    if not member.any() or member.all():
        raise ConfigError("membership inference compares members with non-members; give both.")
    if np.isnan(scores).any():
        raise ConfigError("membership inference orders samples by their scores, but some are NaN; leave these out.")
    thresholds = np.unique(scores)
    true, false = ((of.sum() - np.searchsorted(np.sort(scores[of]), thresholds)) / of.sum() for of in (member, ~member))
    allowed = false <= fpr
    return Inference(
        auroc(scores, member.astype(int)),
        float((true - false).max().clip(0)),
        float(true[allowed].max()) if allowed.any() else 0.0,
    )


def loss_threshold(losses: np.ndarray) -> np.ndarray:
    """Loss-attack scores [N]: -loss, since members tend to have small ones. Yeom et al., CSF 2018, adversary 2."""
    return -losses


def logit_confidence(probability: np.ndarray) -> np.ndarray:
    """φ = log(p/(1 - p)) of the probability p of the true class, whose distribution over models is nearly normal.

    Carlini et al., S&P 2022, section V.A.

    >>> logit_confidence(np.array([0.5, 0.9])).round(3)
    array([0.   , 2.197])
    """
    p = np.clip(probability.astype(float), 1e-12, 1 - 1e-12)
    return np.log(p) - np.log1p(-p)


def lira(target: np.ndarray, shadows: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Scores [N] of the likelihood ratio attack: log N(φ; μ_in, σ_in²) - log N(φ; μ_out, σ_out²), sample by sample.

    Means are those of the shadow models that were, and were not, trained on the sample; with few shadows a variance per
    sample is too noisy, so σ_in and σ_out are common to all samples. Carlini, Chien, Nasr, Song, Terzis & Tramèr, S&P
    2022, algorithm 1 and section VI.C.

    Args:
        target: φ of the model under attack [N].
        shadows: φ of the shadow models [S, N].
        inside: whether a shadow model was trained on a sample, bool [S, N].
    """
    if not (inside.any(0) & ~inside.all(0)).all():
        raise ConfigError("lira needs, for every sample, a shadow model with it and one without it; take more shadows.")
    if min(inside.sum(), (~inside).sum()) <= inside.shape[1]:
        raise ConfigError("lira needs several shadow models with some sample, and several without; take more shadows.")
    score = np.zeros(len(target))
    for of, sign in ((inside, 1), (~inside, -1)):
        mean = (shadows * of).sum(0) / of.sum(0)
        centred = np.where(of, shadows - mean, 0.0)
        variance = (centred**2).sum() / max(of.sum() - of.shape[1], 1)
        score += sign * (-((target - mean) ** 2) / (2 * variance) - 0.5 * np.log(variance))
    return score
