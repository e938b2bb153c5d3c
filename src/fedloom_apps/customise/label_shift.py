"""Class shares of unlabelled inputs under label shift: p_U(x) = Σ_c π_c p(x | c), with p(x | c) as at the clients.

A linear discriminant on a model's features, from sums over clients: no client's own label counts are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import copysign, inf, sqrt

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError

TEMPERATURES = tuple(2.0**k for k in range(-1, 8))


@dataclass(frozen=True)
class ClassSums:
    """A client's upload: n_c, S_c = Σ_{y=c} φ(x) and Q = Σ φφᵀ over its samples. The server only needs their sum.

    Attributes:
        n: samples of each class, float64 [C].
        first: S, float64 [C, d].
        second: the upper triangle of Q with its diagonal, row by row, float64 [d (d + 1) / 2].
    """

    n: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, features: Tensor, y: Tensor, classes: int) -> ClassSums:
        """The sums over samples with features [N, d] and class numbers [N]."""
        phi = features.double()
        one_hot = torch.nn.functional.one_hot(y.long(), classes).double()
        row, column = torch.triu_indices(phi.shape[1], phi.shape[1])
        return cls(one_hot.sum(0), one_hot.T @ phi, (phi.T @ phi)[row, column])

    def __add__(self, other: ClassSums) -> ClassSums:
        return ClassSums(self.n + other.n, self.first + other.first, self.second + other.second)

    def discriminant(self, shrinkage: float = 0.01) -> Discriminant:
        """Class means and the pooled covariance W = (Q - Σ n_c μ_c μ_cᵀ) / N + s tr(W₀)/d I, where W₀ has s = 0."""
        n = self.n.clamp(min=0)  # noise may bring a count below 0
        total = float(n.sum())
        if not total > 0:
            raise ConfigError("class statistics count no sample: there are none, or noise hides them.")
        means = self.first / torch.where(n > 0, n, 1.0)[:, None]
        d = self.first.shape[1]
        row, column = torch.triu_indices(d, d)
        second = self.first.new_empty(d, d)
        second[row, column] = second[column, row] = self.second
        within = (second - (n[:, None] * means).T @ means) / total
        within = within + shrinkage * within.trace() / d * torch.eye(d, dtype=within.dtype, device=within.device)
        factor, wrong = torch.linalg.cholesky_ex((within + within.T) / 2)
        if int(wrong) or not bool(torch.isfinite(factor).all()):
            raise ConfigError(
                "the features' covariance within classes is singular, or hidden by noise; raise the shrinkage, "
                "ClassModels(run, shrinkage=…), or take more clients where uplinks add noise."
            )
        return Discriminant(means, factor, n, shrinkage)


@dataclass(frozen=True)
class Discriminant:
    """l_c(x) = (μ_cᵀ W⁻¹ φ(x) - ½ μ_cᵀ W⁻¹ μ_c) / T + β_c: log p(φ(x) | c) up to a constant for each x, calibrated.

    Weights and offsets are centred at the samples' mean μ̄ = Σ n_c μ_c / Σ n, which changes the constant alone and keeps
    both small.

    Attributes:
        means: μ, [C, d].
        factor: the Cholesky factor L of W = L Lᵀ, [d, d].
        n: samples of each class, [C]; classes without one have the score -inf.
        shrinkage: s, the shrinkage of W.
        temperature: T > 0.
        beta: β [C], or 0.
    """

    means: Tensor
    factor: Tensor
    n: Tensor
    shrinkage: float = 0.0
    temperature: float = 1.0
    beta: Tensor | float = 0.0

    @cached_property
    def centre(self) -> Tensor:
        """μ̄, the mean of all samples, [d]."""
        return self.n @ self.means / self.n.sum()

    @cached_property
    def weights(self) -> Tensor:
        """W⁻¹ (μ_c - μ̄) / T, [C, d]."""
        return torch.cholesky_solve((self.means - self.centre).T, self.factor).T / self.temperature

    @cached_property
    def offsets(self) -> Tensor:
        """β_c - ½ (μ_cᵀ W⁻¹ μ_c - μ̄ᵀ W⁻¹ μ̄) / T, [C]; -inf for classes without samples."""
        middle = (self.means + self.centre) / 2
        return torch.where(self.n > 0, self.beta - (middle * self.weights).sum(1), -torch.inf)

    def scores(self, features: Tensor) -> Tensor:
        """l [N, C] from features [N, d]."""
        return features.double() @ self.weights.T + self.offsets

    def distances(self, features: Tensor) -> Tensor:
        """(φ - μ_c)ᵀ W⁻¹ (φ - μ_c) / d to the nearest class that has samples, [N]; about 1 for samples of a class.

        >>> ClassSums.of(torch.eye(2), torch.tensor([0, 1]), 3).n.tolist()
        [1.0, 1.0, 0.0]
        """
        phi, means = (torch.linalg.solve_triangular(self.factor, t.double().T, upper=False).T
                      for t in (features, self.means[self.n > 0]))  # fmt: skip
        return (phi.square().sum(1) + (means.square().sum(1) - 2 * phi @ means.T).min(1).values) / phi.shape[1]

    def leave_one_out(self, features: Tensor, y: Tensor) -> Tensor:
        """``distances`` [N] of samples of the fit, each to the discriminant of all other samples, in closed form.

        Without a sample of class y, with e = φ - μ_y and a = n_y / (n_y - 1), its class is at φ - a e and the
        covariance is W' = (B - a e eᵀ) / (N - 1), where B = N W - (s a |e|² / d) I, so that for v_c = φ - μ_c, of
        class y a e, ::

            v_cᵀ W'⁻¹ v_c = (N - 1) (v_cᵀ B⁻¹ v_c + a (v_cᵀ B⁻¹ e)² / (1 - a eᵀ B⁻¹ e))

        B is diagonal in the axes of W for all samples. A class's only sample is compared with the other classes. If
        samples were compared with a fit that contains them, all other data would seem to lie farther away, the more so
        the less N exceeds d.
        """
        variances, axes = torch.linalg.eigh(self.factor @ self.factor.T)
        total, d = self.n.sum(), len(variances)
        phi, means = ((t.double() - self.centre) @ axes for t in (features, self.means))
        counts, y = self.n[y.long()], y.long()
        a = torch.where(counts > 1, counts / (counts - 1), 1.0)
        e = phi - means[y]
        inverse = 1 / (total * variances - (self.shrinkage / d * a * e.square().sum(1))[:, None])  # B⁻¹, [N, d]
        leverage = (inverse * e.square()).sum(1)
        squares = (inverse * phi.square()).sum(1, keepdim=True) - 2 * (inverse * phi) @ means.T
        squares = squares + inverse @ means.square().T  # v_cᵀ B⁻¹ v_c, [N, C]
        products = (inverse * phi * e).sum(1, keepdim=True) - (inverse * e) @ means.T  # v_cᵀ B⁻¹ e
        squares[torch.arange(len(y)), y], products[torch.arange(len(y)), y] = a.square() * leverage, a * leverage
        distances = (total - 1) / d * (squares + products.square() * (a / (1 - a * leverage))[:, None])
        one_hot = torch.nn.functional.one_hot(y, len(self.n))
        return distances.where(self.n - one_hot > 0, torch.inf).min(1).values

    def distance_sums(self, features: Tensor, y: Tensor) -> Tensor:
        """Number, sum and sum of squares of the distances of a client's samples, by class, [3, C].

        Each distance is that of ``leave_one_out``, unless noise or clipping has changed the counts: a sample's share in
        the fit is then unknown.
        """
        has_true_counts = bool((self.n == self.n.round()).all())
        away = self.leave_one_out(features, y) if has_true_counts else self.distances(features)
        one_hot = torch.nn.functional.one_hot(y.long(), len(self.n)).double()
        return torch.stack([one_hot.sum(0), away @ one_hot, away.square() @ one_hot])

    def calibration_sums(self, features: Tensor, y: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """A client's contribution to the sums from which T and β are determined.

        Args:
            features: [N, d] of its samples.
            y: their class numbers [N].
            beta: β for each of ``TEMPERATURES``, [9, C].

        Returns:
            With the posteriors q = softmax(log n_c + l_c(x)) at each of ``TEMPERATURES``: Σ -log q_y, [9], and Σ q,
            [9, C].
        """
        plain, losses, posteriors = replace(self, temperature=1.0, beta=0.0).scores(features), [], []
        for t, shift in zip(TEMPERATURES, beta, strict=True):
            log_q = torch.log_softmax(plain / t + shift + self.n.log(), -1)
            losses.append(-log_q.gather(1, y.long()[:, None]).sum())
            posteriors.append(log_q.exp().sum(0))
        return torch.stack(losses), torch.stack(posteriors)

    def calibrated(self, ask: Callable[[Tensor], tuple[Tensor, Tensor]], exchanges: int = 20) -> Discriminant:
        """The discriminant at the T and β with the smallest loss on the clients' samples.

        At that β the mean posterior of the clients' samples is their class shares, so that EM finds these shares again:
        β_c ← β_c + log(n_c / Σ n) - log(Σ q_c / Σ q), starting from 0. A temperature alone would be chosen for the loss
        at the clients' shares, and leave the estimated shares of a target wrong (Alexandari, Kundaje & Shrikumar, ICML
        2020).

        Args:
            ask: maps β [9, C] to the sum of all clients' ``calibration_sums``.
            exchanges: number of steps for β; with 0 only the temperature is fitted.
        """
        beta = torch.zeros(len(TEMPERATURES), len(self.n), dtype=torch.float64)
        for _ in range(exchanges):
            _, posteriors = ask(beta)
            share, posterior = (t.clamp(min=1e-12) / t.sum(-1, keepdim=True) for t in (self.n, posteriors))
            beta = beta + torch.where(self.n > 0, (share / posterior).log(), 0.0)
        losses = ask(beta)[0]
        if not bool(torch.isfinite(losses).all()):
            raise ConfigError(
                "class statistics count no sample of a class that clients have: noise hides them; take more clients, "
                "or uplinks with less noise."
            )
        best = int(losses.argmin())
        return replace(self, temperature=TEMPERATURES[best], beta=beta[best])


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
    """
    scores = scores.double().cpu()
    if not len(scores) or not bool(torch.isfinite(scores.max(-1).values).all()):
        raise ConfigError("class shares need at least one input, and for each of them a finite score of some class.")
    likelihood = (scores - scores.max(-1, keepdim=True).values).exp()
    n = len(scores)
    pi = em_shares(likelihood, torch.ones(1, n, dtype=torch.float64))[0]
    draw, estimates = rng.stream(seed, "bootstrap"), []
    for begin in range(0, resamples, AT_ONCE):
        counts = draw.multinomial(n, np.full(n, 1 / n), min(AT_ONCE, resamples - begin))
        estimates.append(em_shares(likelihood, torch.from_numpy(counts).double(), tol=ROUGH))
    if not estimates:
        nothing = np.full(len(pi), np.nan)
        return TargetPrior(pi.numpy(), nothing, nothing, coverage)
    tails = torch.tensor([(1 - coverage) / 2, (1 + coverage) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat([*estimates, pi[None]]), tails, 0)
    high = torch.maximum(high, _largest_shares(likelihood, pi, coverage))
    return TargetPrior(pi.numpy(), torch.minimum(low, pi).numpy(), high.numpy(), coverage)


def _largest_shares(likelihood: Tensor, pi: Tensor, coverage: float) -> Tensor:
    """The largest shares (1 - t)π_c + t, [C], at which mixing in class c alone does not contradict the inputs."""
    from scipy.stats import chi2  # slow to import

    mixture, least = likelihood @ pi, -float(chi2.ppf(coverage, 1)) / 2
    ratio = likelihood / mixture[:, None]
    low, high = torch.zeros_like(pi), (likelihood > 0).any(0).to(pi)
    for _ in range(HALVINGS):
        t = (low + high) / 2
        is_possible = torch.log1p(t * (ratio - 1)).sum(0) >= least
        low, high = torch.where(is_possible, t, low), torch.where(is_possible, high, t)
    return (1 - low) * pi + low


def em_shares(likelihood: Tensor, counts: Tensor, tol: float = 1e-9, most: int = 5000) -> Tensor:
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
