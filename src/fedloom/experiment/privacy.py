"""Privacy accounting for runs with private uplinks: ε for a given δ, by the accountants of ``dp-accounting``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from importlib import import_module
from importlib.util import find_spec
from math import ceil, exp, inf, isinf, sqrt
from typing import TYPE_CHECKING, Any

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.parts import Uplink
from fedloom.experiment.experiment import Experiment

if TYPE_CHECKING:
    from fedloom.parts.uplink import ClipNoise

MISSING = "ε is not known: its accountant is in dp-accounting; pip install 'fedloom[privacy]'."


def is_installed() -> bool:
    """Whether ``dp-accounting``, the library of the accountants, is installed."""
    return find_spec("dp_accounting") is not None


def gaussian(noise: float, share: float = 1.0) -> Any:
    """The privacy loss distribution of a Gaussian mechanism on a Poisson sample with this share."""
    distributions: Any = import_module("dp_accounting.pld.privacy_loss_distribution")
    return distributions.from_gaussian_mechanism(noise, sampling_prob=share)


@dataclass(frozen=True)
class Accountant:
    """The privacy of a number of rounds with Gaussian noise on sums of clipped uploads.

    Three kinds of rounds, with the neighbouring relation that each allows: ``poisson``, where every client participates
    independently with probability q (add or remove one client; privacy loss distributions); ``fixed``, where |S_t| of K
    clients are drawn without replacement (replace one client's data, which changes a sum by up to 2C; Rényi
    divergences, or the exact Gaussian mechanism with full participation); and ``local``, where every client adds its
    own noise and may participate in all rounds (replace its data; the exact Gaussian mechanism).

    Args:
        kind: the kind of rounds.
        noise: z > 0, the noise multiplier.
        clients: K.
        cohort: |S_t|, or its expectation.
        delta: δ.
    """

    kind: str
    noise: float
    clients: int
    cohort: float
    delta: float

    @property
    def neighbours(self) -> str:
        """The neighbouring relation, in words."""
        return "one client more or less" if self.kind == "poisson" else "one client's data replaced"

    @lru_cache(maxsize=10_000)  # noqa: B019 - it may take a second, and the runs of a sweep share it
    def epsilon(self, rounds: int, sums: float = 0.0) -> float:
        """ε after the given number of rounds and ``sums`` additional sums over all clients.

        Sums with other noise z' count (z/z')² times: together they are one Gaussian mechanism.
        """
        if self.kind == "poisson":
            return self._poisson(rounds, sums)
        dp: Any = import_module("dp_accounting")
        if self.kind == "local" or self.cohort == self.clients:
            return float(dp.get_epsilon_gaussian(self.noise / (2 * sqrt(rounds + sums)), self.delta))
        accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        gaussian = dp.GaussianDpEvent(self.noise / 2)
        accountant.compose(dp.SampledWithoutReplacementDpEvent(self.clients, int(self.cohort), gaussian), rounds)
        if sums:
            accountant.compose(dp.GaussianDpEvent(self.noise / (2 * sqrt(sums))))
        return float(accountant.get_epsilon(self.delta))

    def _poisson(self, rounds: int, sums: float) -> float:
        """ε if empty cohorts are redrawn: each round is within (1-q)^(K-1) of a Poisson sample in total variation.

        That is the bound for K - 1 clients, the smaller of two neighbours. It costs (1 + e^ε) T (1-q)^(K-1) of δ.
        """
        composed = self._one_round.self_compose(rounds)
        if sums:
            composed = composed.compose(gaussian(self.noise / sqrt(sums)))
        redrawn = rounds * (1 - self.cohort / self.clients) ** (self.clients - 1)
        epsilon = composed.get_epsilon_for_delta(self.delta)
        for _ in range(100):
            left = self.delta - (1 + exp(min(epsilon, 700))) * redrawn
            if left <= 0:
                return inf
            more = composed.get_epsilon_for_delta(left)
            if more - epsilon < 1e-9:
                return float(more)
            epsilon = more
        return inf

    @cached_property
    def _one_round(self) -> Any:
        return gaussian(self.noise, self.cohort / self.clients)


@dataclass(frozen=True)
class ExampleAccountant:
    """The privacy of one sample of a client under DP-SGD, over the rounds in which that client participates.

    Two kinds of mini-batches, with the neighbouring relation that each allows: ``poisson``, where every step takes each
    sample independently with probability q (add or remove one sample; privacy loss distributions); and ``shuffled``,
    where a pass over the data uses each sample in exactly one batch of given size (replace one sample, which changes
    that batch's sum by up to 2C; the exact Gaussian mechanism, once per pass, without amplification).

    Args:
        kind: the kind of mini-batches.
        noise: z > 0, the noise multiplier.
        times: steps (``poisson``) or passes over the data (``shuffled``) in a round.
        share: q of the client with the fewest samples, for which ε is largest; 1 for ``shuffled``.
        delta: δ.
    """

    kind: str
    noise: float
    times: int
    share: float
    delta: float

    @classmethod
    def of(cls, local: Local, samples: int, delta: float) -> ExampleAccountant | None:
        """The accountant of a client with n_i samples; None if local training adds no noise."""
        if local.dp_clip is None or not local.dp_noise:
            return None
        steps = local.steps_for(samples)
        if local.poisson:
            return cls("poisson", local.dp_noise, steps, local.expected_batch(samples) / samples, delta)
        passes = ceil(steps / local.batches_per_epoch(samples))
        return cls("shuffled", local.dp_noise, passes, 1.0, delta)

    @property
    def neighbours(self) -> str:
        """The neighbouring relation, in words."""
        return "one sample more or less" if self.kind == "poisson" else "one sample replaced"

    @lru_cache(maxsize=10_000)  # noqa: B019 - as above
    def epsilon(self, rounds: int) -> float:
        """ε of a client that has participated in the given number of rounds."""
        return total_epsilon({self: rounds}, self.delta)

    @cached_property
    def one_step(self) -> Any:
        """The privacy loss distribution of a step with a Poisson sample."""
        return gaussian(self.noise, self.share)


def total_epsilon(rounds: Mapping[ExampleAccountant, int], delta: float) -> float:
    """ε of one sample after a number of rounds of each of several accountants, which have the same mini-batches."""
    counts = {mechanism: mechanism.times * number for mechanism, number in rounds.items() if number}
    if not counts:
        return 0.0
    if all(mechanism.kind == "poisson" for mechanism in counts):
        composed = [mechanism.one_step.self_compose(times) for mechanism, times in counts.items()]
        return float(reduce(lambda first, second: first.compose(second), composed).get_epsilon_for_delta(delta))
    dp: Any = import_module("dp_accounting")
    return float(
        dp.get_epsilon_gaussian(1 / (2 * sqrt(sum(t / mechanism.noise**2 for mechanism, t in counts.items()))), delta)
    )


def record_value(epsilon: float) -> float | str:
    """ε for a record, whose file has no infinite numbers: ``infinite`` if the run gives no guarantee."""
    return "infinite" if isinf(epsilon) else epsilon


@dataclass(frozen=True)
class PrivacySpent:
    """The privacy spent by a run together with the sums that were requested from its clients afterwards.

    Attributes:
        epsilon: ε; infinite if sums were sent without noise.
        delta: δ.
        neighbours: the neighbouring relation, as text.
    """

    epsilon: float
    delta: float
    neighbours: str

    def __str__(self) -> str:
        return (
            f"ε = {self.epsilon:.3g} for δ = {self.delta:g}, {self.neighbours}; the run and its clients' sums together"
        )


def privacy_spent(summary: Mapping[str, Any], rounds: int, sums: int, uplinks: Sequence[Uplink]) -> PrivacySpent | None:
    """The privacy that a finished run has spent, with ``sums`` later sums over all its clients.

    None if the run is not private, or its accountant was not installed: then there is nothing to add to.

    Args:
        summary: the run's summary.
        rounds: number of rounds of the run.
        sums: number of sums.
        uplinks: the uplinks through which the sums are sent.
    """
    if "privacy" not in summary or not is_installed():
        return None
    run_accountant = Accountant(**{key: value for key, value in summary["privacy"].items() if key != "neighbours"})
    noises = [part.noise for part in private(uplinks)]
    epsilon = run_accountant.epsilon(rounds, sums * (run_accountant.noise / noises[0]) ** 2) if noises else inf
    return PrivacySpent(epsilon, run_accountant.delta, run_accountant.neighbours)


def example_accountant(experiment: Experiment, federation: Federation) -> ExampleAccountant | None:
    """The accountant of local training; None if it adds no noise, or the library is not installed."""
    if not is_installed():
        return None
    fewest = int(federation.train.index.sizes[: federation.seen].min())
    return ExampleAccountant.of(experiment.local, fewest, experiment.local.dp_delta)


def private(uplinks: Sequence[Uplink]) -> list[ClipNoise]:
    """The uplinks that add noise."""
    noisy = [part for part in uplinks if "noise" in part.guarantees]
    if not noisy:
        return []
    from fedloom.parts.uplink import ClipNoise

    return [part for part in noisy if isinstance(part, ClipNoise)]


def private_uplink(experiment: Experiment) -> ClipNoise | None:
    """The private uplink of an experiment, or None."""
    uplinks = private(experiment.method.uplink)
    if len(uplinks) > 1:
        raise ConfigError("a method has two private uplinks; one clip_noise bounds everything that leaves a client.")
    return uplinks[0] if uplinks else None


def accountant(experiment: Experiment) -> Accountant | None:
    """The accountant of an experiment; None if it is not private, or the library is not installed."""
    part = private_uplink(experiment)
    if part is None or not is_installed():
        return None
    kind = "local" if part.noise_at == "client" else "fixed" if experiment.expected_cohort is None else "poisson"
    cohort = experiment.expected_cohort or experiment.cohort_size
    return Accountant(kind, part.noise, experiment.federation.seen, cohort, part.delta)


def calibrate(experiment: Experiment) -> Experiment:
    """The experiment with the smallest noise (to a thousandth) for which all rounds stay within the target ε."""
    part = private_uplink(experiment)
    if part is None or part.epsilon is None:
        return experiment
    run_accountant = accountant(experiment)
    if run_accountant is None:
        raise ConfigError(f"uplink 'clip_noise' cannot find the noise for epsilon = {part.epsilon:g}. {MISSING}")

    def epsilon(noise: float) -> float:
        return replace(run_accountant, noise=noise).epsilon(experiment.rounds)

    low, high = 0.0, 1.0
    while epsilon(high) > part.epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise ConfigError(f"uplink 'clip_noise': no noise reaches epsilon = {part.epsilon:g}; take more clients.")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0.05 and epsilon(middle) <= part.epsilon else (middle, high)
    uplink = tuple(replace(other, noise=high) if other is part else other for other in experiment.method.uplink)
    return replace(experiment, method=replace(experiment.method, uplink=uplink))
