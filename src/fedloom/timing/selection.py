"""Selections: which clients are invited, with probabilities that depend on what is known from the past alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from fedloom.base import rng
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.ranges import NonNegative, Positive, Probability
from fedloom.base.registry import Ranged, Registry
from fedloom.timing.devices import columns

selections: Registry[Selection] = Registry("selection")


class Past(NamedTuple):
    """What is known of the clients before a round, [K] each.

    Attributes:
        t: the round.
        size: the number of clients to invite.
        sizes: n_i.
        losses: the training loss of each client's last local work, float64; NaN if there was none.
        last: the round of that work, int64; -1 if there was none.
        seconds: expected durations on the clients' devices, float64; 0 without devices.
        seed: the run's seed.
    """

    t: int
    size: int
    sizes: np.ndarray
    losses: np.ndarray
    last: np.ndarray
    seconds: np.ndarray
    seed: int


class SelectedClients(NamedTuple):
    """The clients of a round, sorted, int64 [n], and the probability with which each was included, float64 [n]."""

    clients: np.ndarray
    probabilities: np.ndarray


@dataclass(frozen=True)
class Selection(Ranged):
    """Base class of selections: each client i is included with probability π_i, Σ π_i being the size of the cohort.

    Attributes:
        adaptive: whether it goes by losses, so that invitations depend on training.
    """

    adaptive: ClassVar[bool] = False

    def scores(self, past: Past) -> np.ndarray:
        """Return numbers ≥ 0 to which probabilities are proportional as far as they stay at most 1, float64 [K]."""
        return np.ones(len(past.sizes))

    def draw(self, past: Past) -> SelectedClients:
        """The clients of a round."""
        return systematic(inclusion(self.scores(past), past.size), rng.stream(past.seed, "selection", past.t))


@selections.register
@dataclass(frozen=True)
class Uniform(Selection):
    """Every client with the same probability, without replacement."""


@selections.register
@dataclass(frozen=True)
class Weighted(Selection):
    """Clients with many samples more often: π_i ∝ n_i^power.

    Args:
        power: 1 for probabilities in proportion to samples, 0 for uniform ones.
    """

    power: float = 1.0

    def scores(self, past: Past) -> np.ndarray:
        return past.sizes.astype(np.float64) ** self.power


@selections.register
@dataclass(frozen=True)
class Listed(Selection):
    """The clients of each round from a file with the columns ``round`` (from 1) and ``client``; after the last, again.

    Args:
        path: a CSV or Parquet file.
    """

    path: Path = field(kw_only=True)

    def draw(self, past: Past) -> SelectedClients:
        table = columns(self.path, ("round", "client"))
        rounds = np.unique(table["round"])
        if (rounds != np.arange(1, len(rounds) + 1)).any():
            raise DataError(f"{self.path} does not have every round from 1.")
        clients = np.unique(table["client"][table["round"] == 1 + past.t % len(rounds)]).astype(np.int64)
        if clients.min() < 0 or clients.max() >= len(past.sizes):
            raise DataError(f"{self.path} names clients that do not exist; they are 0 to {len(past.sizes) - 1}.")
        return SelectedClients(clients, np.ones(len(clients)))


@selections.register(name="by_loss")
@dataclass(frozen=True)
class ByLoss(Selection):
    """Clients with large losses more often: π_i ∝ F_i, the training loss of their last local work.

    Clients that have not taken part yet count with the largest loss.
    """

    adaptive: ClassVar[bool] = True

    def scores(self, past: Past) -> np.ndarray:
        return filled_losses(past.losses)


@selections.register(name="power_of_choice")
@dataclass(frozen=True)
class PowerOfChoice(Selection):
    """d candidates, uniformly, of whom those with the largest losses are invited (Cho et al. 2020, π_rpow-d).

    Losses are those of the clients' last local work, so that nothing is asked of the candidates; with them
    π_i = (d/K) P(fewer than n of the other d - 1 candidates are among the r_i clients of larger loss). Clients of small
    loss may have π_i = 0, a bias that no weighting takes away.

    Args:
        candidates: d, relative to the size n of the cohort.
    """

    adaptive: ClassVar[bool] = True

    candidates: Positive = 2.0

    def draw(self, past: Past) -> SelectedClients:
        from scipy.stats import hypergeom  # slow to import

        count = len(past.sizes)
        d = min(max(round(self.candidates * past.size), past.size), count)
        draw = rng.stream(past.seed, "selection", past.t)
        losses, ties = filled_losses(past.losses), draw.random(count)
        rank = np.empty(count, dtype=np.int64)
        rank[np.lexsort((ties, -losses))] = np.arange(count)  # number of clients of larger loss
        candidates = draw.choice(count, d, replace=False)
        clients = np.sort(candidates[np.argsort(rank[candidates])[: past.size]])
        probabilities = hypergeom.cdf(past.size - 1, count - 1, rank[clients], d - 1) if count > 1 else np.ones(1)
        return SelectedClients(clients, d / count * np.asarray(probabilities))


@selections.register
@dataclass(frozen=True)
class Oort(Selection):
    """Clients of high utility for their time: π_i ∝ n_i F_i · min(1, T/T_i)^α, as in Oort (Lai et al., OSDI 2021, §4).

    T_i is the expected duration of a client and T a quantile of all of them, so that only slow clients are held back.
    Deviations: the loss of the last local work stands for the root mean square of single samples' losses, clients that
    have not taken part yet count with the largest utility, and there is neither a pacer nor a list of blocked clients.

    Args:
        alpha: the exponent of time.
        quantile: the quantile of durations that is T.
        exploration: share of the probability that is spread uniformly.
    """

    adaptive: ClassVar[bool] = True

    alpha: NonNegative = 2.0
    quantile: Probability = 0.5
    exploration: Probability = 0.1

    def scores(self, past: Past) -> np.ndarray:
        utility = filled_losses(past.sizes * past.losses)
        if past.seconds.any():
            utility = utility * np.minimum(1.0, np.quantile(past.seconds, self.quantile) / past.seconds) ** self.alpha
        total = utility.sum()
        return self.exploration / len(utility) + (1 - self.exploration) * utility / (total if total > 0 else 1.0)


@selections.register
@dataclass(frozen=True)
class Clustered(Selection):
    """One client from each of n groups of clients, in proportion to samples (Fraboni et al., ICML 2021, algorithm 1).

    Groups hold equal shares of all samples, in the order of ``by``; a large client may stand in several, and is then
    drawn once. π_i is the probability of being drawn at all.

    Args:
        by: ``size``, or ``number`` for the order in which clients are numbered.
    """

    by: Literal["size", "number"] = "size"

    def draw(self, past: Past) -> SelectedClients:
        order = np.argsort(-past.sizes, kind="stable") if self.by == "size" else np.arange(len(past.sizes))
        share = past.sizes[order] * past.size / past.sizes.sum()  # in units of a group
        end = np.cumsum(share)
        groups = np.arange(past.size)[:, None]
        inside = np.clip(np.minimum(end, groups + 1) - np.maximum(end - share, groups), 0, None)  # [n, K]
        inside /= inside.sum(1, keepdims=True)
        draw = rng.stream(past.seed, "selection", past.t)
        members = {int(order[draw.choice(len(order), p=row)]) for row in inside}
        clients = np.array(sorted(members), dtype=np.int64)
        probabilities = np.empty(len(order))
        probabilities[order] = 1 - np.prod(1 - inside, axis=0)
        return SelectedClients(clients, probabilities[clients])


def filled_losses(losses: np.ndarray) -> np.ndarray:
    """Losses ≥ 0, float64 [K], with the largest one for clients that have none; ones if none has any.

    >>> filled_losses(np.array([2.0, np.nan, -1.0]))
    array([2., 2., 0.])
    """
    finite = np.isfinite(losses)
    return np.maximum(np.where(finite, losses, losses[finite].max() if finite.any() else 1.0), 0.0)


def inclusion(scores: np.ndarray, size: int) -> np.ndarray:
    """Probabilities π = min(1, c · scores) with the sum ``size``, float64 [K].

    >>> inclusion(np.array([8.0, 1.0, 1.0]), 2)
    array([1. , 0.5, 0.5])

    Raises:
        ConfigError: for scores that are negative or not finite.
    """
    if not (np.isfinite(scores).all() and (scores >= 0).all()):
        raise ConfigError("a selection's scores must be finite numbers of at least 0.")
    pi = np.zeros(len(scores))
    sure = np.zeros(len(scores), dtype=bool)
    while True:
        rest, left = ~sure, size - int(sure.sum())
        total = scores[rest].sum()
        pi[rest] = scores[rest] * (left / total) if total > 0 else left / max(int(rest.sum()), 1)
        over = rest & (pi >= 1)
        if not over.any():
            return pi
        sure |= over
        pi[sure] = 1.0


def systematic(pi: np.ndarray, draw: np.random.Generator) -> SelectedClients:
    """Σ π clients, each with exactly its probability: points at distance 1 on the sums of π in a random order (Madow).

    >>> systematic(np.array([1.0, 0.5, 0.5]), rng.stream(0, "doc")).clients[0]
    np.int64(0)
    """
    order = draw.permutation(len(pi))
    ends = np.cumsum(pi[order])
    ends *= np.rint(ends[-1]) / ends[-1]
    points = draw.random() + np.arange(int(np.rint(ends[-1])))
    clients = np.sort(order[np.searchsorted(ends, points, side="right")])
    return SelectedClients(clients, pi[clients])
