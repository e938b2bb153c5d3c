"""What a run with private uplinks has spent: ε for a δ by the accountants of ``dp-accounting``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from math import exp, inf, sqrt
from typing import Any

from fedloom.core.errors import ConfigError
from fedloom.experiment.experiment import Experiment
from fedloom.parts.uplink import ClipNoise

MISSING = "ε is not known: its accountant is in dp-accounting; pip install 'fedloom[privacy]'."


@dataclass(frozen=True)
class Accountant:
    """The privacy of a number of rounds with Gaussian noise on sums of clipped uploads.

    Three kinds of rounds, with neighbouring federations as each allows: ``poisson``, where every client comes with
    probability q by itself (one client more or less; privacy loss distributions); ``fixed``, where |S_t| of K clients
    are drawn without replacement (one client's data replaced, which moves a sum by 2C; Rényi divergences, or the exact
    Gaussian mechanism if all take part); and ``local``, where every client adds its own noise and may take part in all
    rounds (its data replaced; the exact Gaussian mechanism).

    Args:
        kind: of the rounds.
        noise: z > 0.
        clients: K.
        cohort: |S_t|, or the expected one.
        delta: δ.
    """

    kind: str
    noise: float
    clients: int
    cohort: float
    delta: float

    @property
    def neighbours(self) -> str:
        """How neighbouring federations differ."""
        return "one client more or less" if self.kind == "poisson" else "one client's data replaced"

    def epsilon(self, rounds: int) -> float:
        """ε of so many rounds."""
        if self.kind == "poisson":
            return self._poisson(rounds)
        dp: Any = import_module("dp_accounting")
        if self.kind == "local" or self.cohort == self.clients:
            return float(dp.get_epsilon_gaussian(self.noise / (2 * sqrt(rounds)), self.delta))
        accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        gaussian = dp.GaussianDpEvent(self.noise / 2)
        round_ = dp.SampledWithoutReplacementDpEvent(self.clients, int(self.cohort), gaussian)
        return float(accountant.compose(round_, rounds).get_epsilon(self.delta))

    def _poisson(self, rounds: int) -> float:
        """ε where an empty cohort is drawn anew: each round is within (1-q)^K of a Poisson sample in total variation.

        That costs (1 + e^ε) T (1-q)^K of δ.
        """
        composed = self._one_round.self_compose(rounds)
        redrawn = rounds * (1 - self.cohort / self.clients) ** self.clients
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
        distributions: Any = import_module("dp_accounting.pld.privacy_loss_distribution")
        return distributions.from_gaussian_mechanism(self.noise, sampling_prob=self.cohort / self.clients)


def private_uplink(experiment: Experiment) -> ClipNoise | None:
    """The uplink of an experiment that makes it private, if there is one.

    Raises:
        ConfigError: if there are two, whose noise nobody adds up.
    """
    found = [uplink for uplink in experiment.method.uplink if isinstance(uplink, ClipNoise) and uplink.is_private]
    if len(found) > 1:
        raise ConfigError("a method has two private uplinks; one clip_noise bounds everything that leaves a client.")
    return found[0] if found else None


def accountant(experiment: Experiment) -> Accountant | None:
    """The accountant of an experiment; None if it is not private, or the library is missing."""
    part = private_uplink(experiment)
    if part is None or find_spec("dp_accounting") is None:
        return None
    kind = "local" if part.noise_at == "client" else "fixed" if experiment.expected_cohort is None else "poisson"
    cohort = experiment.expected_cohort or experiment.cohort_size
    return Accountant(kind, part.noise, experiment.federation.seen, cohort, part.delta)


def calibrated(experiment: Experiment) -> Experiment:
    """The experiment with the least noise, to a thousandth, with which all rounds spend no more than a target ε.

    Raises:
        ConfigError: if there is a target, but no library that knows the noise for it.
    """
    part = private_uplink(experiment)
    if part is None or part.epsilon is None:
        return experiment
    known = accountant(experiment)
    if known is None:
        raise ConfigError(f"uplink 'clip_noise' cannot find the noise for epsilon = {part.epsilon:g}. {MISSING}")

    def spent(noise: float) -> float:
        return replace(known, noise=noise).epsilon(experiment.rounds)

    low, high = 0.0, 1.0
    while spent(high) > part.epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise ConfigError(f"uplink 'clip_noise': no noise reaches epsilon = {part.epsilon:g}; take more clients.")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0.05 and spent(middle) <= part.epsilon else (middle, high)
    uplink = tuple(replace(one, noise=high) if one is part else one for one in experiment.method.uplink)
    return replace(experiment, method=replace(experiment.method, uplink=uplink))
