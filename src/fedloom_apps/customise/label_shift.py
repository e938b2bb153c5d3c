"""Class shares of unlabelled inputs under label shift: p_U(x) = Σ_c π_c p(x | c), with p(x | c) as at the clients."""

from __future__ import annotations

from dataclasses import dataclass
from math import copysign, inf, sqrt

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError

HALVINGS = 40  # of the interval in which an upper end lies
ROUGH = 1e-7  # the accuracy of a resample's shares
AT_ONCE = 20  # resamples that are estimated together, which bounds the memory to 20 N numbers
FAR = 0.5  # a mean distance that is larger by this many standard deviations contradicts label shift


@dataclass(frozen=True)
class TargetPrior:
    """Estimated class shares of unlabelled inputs.

    Attributes:
        shares: π, float64 [C], on the simplex.
        low: lower ends of the intervals, [C]; NaN without resamples.
        high: their upper ends, [C], likewise.
        coverage: coverage of each interval, in (0, 1), over draws of the inputs; it ignores errors of the class models.
    """

    shares: np.ndarray
    low: np.ndarray
    high: np.ndarray
    coverage: float


def target_prior(scores: Tensor, resamples: int = 200, coverage: float = 0.95, seed: int = 0) -> TargetPrior:
    """Estimate class shares by maximum likelihood, with percentile intervals of the bootstrap over inputs.

    Inputs without a class do not say that its share is 0, though all their resamples do. An upper end is therefore at
    least the share up to which the class can be mixed into the estimate before 2 log of the likelihood has fallen by
    the quantile of χ²₁: of a class that n inputs, told apart for certain, do not contain, 1.9/n at 95 %.

    Args:
        scores: log p(x | c) up to a constant for each input, [N, C]; -inf for a class that is not modelled. A
            classifier's logits are such scores once log of its training shares is subtracted.
        resamples: number of bootstrap samples; with 0 there are no intervals.
        coverage: coverage of the intervals.
        seed: seed of the bootstrap.

    >>> apart = torch.tensor([[0.0, -50.0], [0.0, -50.0], [0.0, -50.0], [-50.0, 0.0]])
    >>> target_prior(apart).shares.round(6).tolist()
    [0.75, 0.25]

    Raises:
        ConfigError: if there are no inputs, a score is NaN, or an input has no possible class.
    """
    scores = scores.double().cpu()
    if not len(scores) or not bool(torch.isfinite(scores.max(-1).values).all()):
        raise ConfigError("class shares need at least one input, and for each of them a finite score of some class.")
    likelihood = (scores - scores.max(-1, keepdim=True).values).exp()
    n = len(scores)
    pi = fitted(likelihood, torch.ones(1, n, dtype=torch.float64))[0]
    draw, estimates = np.random.default_rng(seed), []
    for begin in range(0, resamples, AT_ONCE):
        counts = draw.multinomial(n, np.full(n, 1 / n), min(AT_ONCE, resamples - begin))
        estimates.append(fitted(likelihood, torch.from_numpy(counts).double(), tol=ROUGH))
    if not estimates:
        nothing = np.full(len(pi), np.nan)
        return TargetPrior(pi.numpy(), nothing, nothing, coverage)
    tails = torch.tensor([(1 - coverage) / 2, (1 + coverage) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat([*estimates, pi[None]]), tails, 0)
    high = torch.maximum(high, _most(likelihood, pi, coverage))
    return TargetPrior(pi.numpy(), torch.minimum(low, pi).numpy(), high.numpy(), coverage)


def _most(likelihood: Tensor, pi: Tensor, coverage: float) -> Tensor:
    """The largest shares (1 - t)π_c + t, [C], at which mixing in class c alone does not contradict the inputs."""
    from scipy.stats import chi2  # slow to import

    mixture, least = likelihood @ pi, -float(chi2.ppf(coverage, 1)) / 2
    ratio = likelihood / mixture[:, None]
    low, high = torch.zeros_like(pi), (likelihood > 0).any(0).to(pi)
    for _ in range(HALVINGS):
        t = (low + high) / 2
        kept = torch.log1p(t * (ratio - 1)).sum(0) >= least
        low, high = torch.where(kept, t, low), torch.where(kept, high, t)
    return (1 - low) * pi + low


def fitted(likelihood: Tensor, counts: Tensor, tol: float = 1e-9, most: int = 5000) -> Tensor:
    """Class shares of maximum likelihood, by EM from equal shares: π_c ← Σ_x n_x π_c p_xc / Σ_c' π_c' p_xc' / Σ_x n_x.

    The log-likelihood is concave in π and never falls. Saerens, Latinne & Decaestecker, Neural Computation 14, 2002,
    for likelihoods instead of posteriors.

    Args:
        likelihood: p_xc up to a factor for each input, [N, C].
        counts: how often each input counts, [B, N], in each of B samples.
        tol: the largest change of a share at which to stop.
        most: number of iterations after which to stop in any case.

    Returns:
        π, [B, C].
    """
    modelled = (likelihood > 0).any(0).to(likelihood.dtype)
    pi = (modelled / modelled.sum()).expand(len(counts), -1)
    weights = counts / counts.sum(1, keepdim=True)
    for _ in range(most):
        ratio = torch.where(weights > 0, weights / (pi @ likelihood.T), 0.0)  # not 0 / 0 for inputs of a class left out
        new = pi * (ratio @ likelihood)
        step, pi = float((new - pi).abs().max()), new
        if step < tol:
            break
    return pi / pi.sum(1, keepdim=True)


@dataclass(frozen=True)
class LabelShiftCheck:
    """How far the target's inputs lie from the clients' classes, compared with the clients' own inputs.

    Under label shift, an input of the target is as far from the nearest class as the clients' inputs of its class are.

    Attributes:
        distance: mean distance of the target's inputs to the nearest class.
        expected: the clients' mean, each sample left out of the classes that it is compared with; classes are weighted
            by the estimated shares.
        spread: the standard deviation of a single input's distance, likewise.
        inputs: number of the target's inputs.
    """

    distance: float
    expected: float
    spread: float
    inputs: int

    @property
    def effect(self) -> float:
        """(distance - expected) / spread; without a spread infinite, unless both are equal."""
        farther = self.distance - self.expected
        return farther / self.spread if self.spread > 0 else copysign(inf, farther) if farther else 0.0

    @property
    def holds(self) -> bool:
        """Whether the inputs do not contradict label shift: nearer than half a spread, or within three standard errors.

        It cannot prove label shift: inputs of one class that look like another's pass.
        """
        return self.effect <= max(FAR, 3 / sqrt(self.inputs))

    def __str__(self) -> str:
        """The figures, and a warning if label shift is contradicted.

        >>> print(LabelShiftCheck(2.0, 1.0, 0.5, 100))
        distance to the nearest class: 2, the clients' own 1 ± 0.5 (2.0 standard deviations farther)
        WARNING: label shift does not hold: these inputs look unlike the clients' data.
        """
        where = "farther" if self.effect > 0 else "nearer"
        text = (
            f"distance to the nearest class: {self.distance:.3g}, the clients' own {self.expected:.3g} ± "
            f"{self.spread:.3g} ({abs(self.effect):.1f} standard deviations {where})"
        )
        if self.holds:
            return text
        return f"{text}\nWARNING: label shift does not hold: these inputs look unlike the clients' data."
