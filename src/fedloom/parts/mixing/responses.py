"""Bounded responses to unbounded losses: cumulative distribution functions of the loss relative to the mean loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import numpy as np

from fedloom.base.errors import ClientError, ConfigError
from fedloom.base.ranges import NonNegative, Positive
from fedloom.base.registry import title_of
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs
from fedloom.core.simplex import Vector

Cdf = Callable[[Vector, float, float], Vector]


def _special(name: str) -> Callable[[Vector], Vector]:
    """A function of ``scipy.special``, which is slow to import."""
    return getattr(import_module("scipy.special"), name)


Name = Literal["weibull", "frechet", "gumbel", "exponential", "logistic", "normal"]

CDFS: Mapping[Name, Cdf] = {
    "weibull": lambda x, a, b: -np.expm1(-((x / a) ** b)),
    "frechet": lambda x, a, b: np.exp(-((x / a) ** -b)),
    "gumbel": lambda x, a, b: np.exp(-np.exp(-(x - a) / b)),
    "exponential": lambda x, a, b: -np.expm1(-a * x),
    "logistic": lambda x, a, b: _special("expit")((x - a) / b),
    "normal": lambda x, a, b: _special("ndtr")((x - a) / b),
}
"""Increasing functions of x [n] ≥ 0, scale α and shape β with values in [0, 1] (Hahn 2024, chapter III, §5.1)."""

SHAPES = {"weibull": 2.0}
"""Default shapes other than 1."""


Samples = Literal["train", "validation"]
"""The samples on which a policy may take the losses F_i."""

Prior = Literal["samples", "uniform"]
"""Coefficients before responses: n_i/n, or equal ones."""


@dataclass(frozen=True)
class Responding(Mixing):
    """Base class of policies that act on bounded responses to losses.

    Args:
        cdf: ``weibull``, ``frechet``, ``gumbel``, ``exponential``, ``logistic`` or ``normal``.
        scale: scale parameter of the distribution.
        shape: shape parameter of the distribution; 0 means its default (2 for Weibull, else 1).
        c1: C1 ≥ 0, lower bound of the responses.
        response: samples on which the losses F_i are taken: ``train`` or ``validation``, which local work never sees.
        prior: the coefficients before tilting: ``uniform``, as published, or ``samples``, n_i/n, with which equal
            responses give FedAvg.
    """

    cdf: Name = "normal"
    scale: Positive = 1.0
    shape: NonNegative = 0.0
    c1: NonNegative = 0.0
    c2: NonNegative = 0.0
    response: Samples = "train"
    prior: Literal["uniform", "samples"] = "uniform"

    citation = "hahn2024aaggff"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c2 and self.c1 >= self.c2:
            raise ConfigError(f"{title_of(type(self))} needs 0 <= c1 < c2, not {self.c1:g} and {self.c2:g}.")

    @property
    def weighs_losses(self) -> bool:
        return True

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Losses on the samples of ``response``."""
        return Needs(losses=self.response)


def of_cohort(prior: Prior, info: RoundInfo) -> Vector:
    """n_i or 1, float64 [|S|]: the cohort's coefficients before responses, up to a factor.

    >>> info = RoundInfo.of_cohort([0, 2], [10, 30], clients=3)
    >>> of_cohort("samples", info).tolist(), of_cohort("uniform", info).tolist()
    ([10.0, 30.0], [1.0, 1.0])
    """
    return info.samples.astype(np.float64) if prior == "samples" else np.ones(len(info.samples))


def transformed(x: Vector, cdf: Name, scale: float = 1.0, shape: float = 0.0) -> Vector:
    """CDF(x) [n] for x ≥ 0; shape 0 means the distribution's default.

    >>> transformed(np.array([0.23, 2.31, 0.46]), "normal").round(2)
    array([0.22, 0.9 , 0.29])
    """
    with np.errstate(divide="ignore", over="ignore"):
        return CDFS[cdf](x, scale, shape or SHAPES.get(cdf, 1.0))


def nonnegative(policy: str, losses: Vector) -> Vector:
    """Return the losses F_i [n] if none is negative, as policies with ratios or powers of losses require."""
    if (losses < 0).any():
        raise ClientError(
            f"mixing {policy!r} weights clients by losses of at least 0, but one is {losses.min():.3g}; choose an "
            "objective that is never negative, like cross_entropy, or another mixing."
        )
    return losses


def respond(losses: Vector, cdf: Name, scale: float, shape: float, low: float, high: float) -> Vector:
    """r_i = C1 + (C2 - C1)·CDF(F_i/F̄) [n] with F̄ the mean loss; if all losses are zero, F_i/F̄ = 1.

    Args:
        losses: F_i [n], finite; negative ones count as zero.
        cdf: name of the distribution.
        scale: its scale α.
        shape: its shape β, 0 for the default.
        low: C1.
        high: C2.
    """
    f = np.maximum(losses, 0.0)
    largest = f.max()
    f = f / largest if largest > 0 else np.ones_like(f)  # scaled so that no sum overflows
    return low + (high - low) * transformed(f / f.mean(), cdf, scale, shape)
