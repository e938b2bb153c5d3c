"""The theory of AAggFF on actual decisions: regret bounds, and unbiasedness over all cohorts.

Adversaries choose losses after seeing the decision; the parts turn them into responses by themselves. Under the Weibull
distribution one loss among zeros becomes a response of nearly C2 among zeros, so that no sequence is out of reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fair import doubly_robust, linearised_gradient
from helpers.marks import kinds
from helpers.rounds import round_info
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing
from fedloom.core.simplex import exponentiated
from fedloom.metrics.regret import best_fixed, decision_losses, device_bound, lipschitz, regret, silo_bound
from fedloom.parts.mixing import AAggFFD, AAggFFS
from fedloom.parts.mixing.aaggff_s import growth_gradient
from fedloom.parts.mixing.responses import CDFS, respond

Draw = np.random.Generator
Adversary = Callable[[int, np.ndarray, Draw], np.ndarray]
CLIENTS = (2, 3, 5, 8, 13, 20)


def corner(i: int, k: int) -> np.ndarray:
    """The corner e_i of the simplex, [K]."""
    return np.eye(k)[i % k]


def correlated(t: int, p: np.ndarray, draw: Draw) -> np.ndarray:
    """All clients rise and fall together, and the halves a little against each other."""
    halves = np.where(np.arange(len(p)) % 2, 1, -1)
    return np.exp(np.sin(t / 5) + 0.3 * np.cos(t / 7) * halves + 0.1 * draw.normal(size=len(p)))


ADVERSARIES: dict[str, Adversary] = {
    "random": lambda t, p, draw: draw.random(len(p)),
    "heavy tails": lambda t, p, draw: draw.pareto(1.0, len(p)),
    "one at random": lambda t, p, draw: corner(int(draw.integers(len(p))), len(p)),
    "always the same one": lambda t, p, draw: corner(0, len(p)),
    "two in turn": lambda t, p, draw: corner(t % 2, len(p)),
    "one more often": lambda t, p, draw: corner(int(draw.random() < 0.4), len(p)),
    "switching": lambda t, p, draw: corner(t // 10, len(p)),
    "switching once": lambda t, p, draw: corner(int(t >= 20), len(p)),
    "against the largest p": lambda t, p, draw: 1 - corner(int(p.argmax()), len(p)),
    "for the smallest p": lambda t, p, draw: corner(int(p.argmin()), len(p)),
    "for the smaller half": lambda t, p, draw: (p <= np.median(p)).astype(float),
    "for what was just lowered": lambda t, p, draw: np.maximum(1 / len(p) - p, 0),
    "correlated": correlated,
    "constant": lambda t, p, draw: np.arange(1.0, len(p) + 1),
    "extreme": lambda t, p, draw: 10.0 ** draw.integers(-30, 31, len(p)),
    "equal": lambda t, p, draw: np.ones(len(p)),
}
SOME = ("random", "switching", "against the largest p", "extreme")


def one_against_all(t: int, p: np.ndarray, draw: Draw) -> np.ndarray:
    """Client 0 alone in 45 % of the rounds, all others in the rest."""
    alone = np.floor(0.45 * (t + 1)) > np.floor(0.45 * t)
    return corner(0, len(p)) if alone else 1 - corner(0, len(p))


def slightly_more_often(t: int, p: np.ndarray, draw: Draw) -> np.ndarray:
    """Client 0 in 51 % of the rounds, client 1 in the others."""
    return corner(int(np.floor(0.51 * (t + 1)) == np.floor(0.51 * t)), len(p))


@dataclass(frozen=True)
class ExactLeader(Mixing):
    """What theorem 3.2 is proved for: the regularised leader with the gradient itself and the L of lemma 3.1."""

    cdf: str = "weibull"
    c1: float = 0.0
    c2: float = 1.0

    def coefficients(self, state: Any, info: RoundInfo) -> tuple[Any, np.ndarray]:
        assert info.losses is not None
        k = info.facts.clients
        r = respond(info.losses, self.cdf, 1.0, 0.0, self.c1, self.c2)
        rounds, total, p = state.get("all", (0, np.zeros(k), np.full(k, 1 / k)))
        total = total + growth_gradient(p, r)
        p = exponentiated(np.ones(k), -total, lipschitz(self.c1, self.c2) * sqrt(rounds + 2) / sqrt(log(k)))
        return {"all": (rounds + 1, total, p)}, p


@dataclass(frozen=True)
class Leader(ExactLeader):
    """Without a regulariser: everything on the client that responded most so far."""

    def coefficients(self, state: Any, info: RoundInfo) -> tuple[Any, np.ndarray]:
        assert info.losses is not None
        total = state.get("all", 0) + respond(info.losses, self.cdf, 1.0, 0.0, self.c1, self.c2)
        return {"all": total}, corner(int(total.argmax()), info.facts.clients)


@dataclass(frozen=True)
class Stubborn(ExactLeader):
    """Everything on the last client, for ever."""

    def coefficients(self, state: Any, info: RoundInfo) -> tuple[Any, np.ndarray]:
        return state, corner(-1, info.facts.clients)


def play(
    policy: Any, adversary: Adversary, k: int, rounds: int, seed: int = 0, high: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Decisions p^t [T, K], each made before the responses r^t [T, K] to it, with all clients in all rounds."""
    draw, state, p = np.random.default_rng(seed), {}, np.full(k, 1 / k)
    samples = np.ones(k, dtype=np.int64)
    decisions, responses = np.empty((rounds, k)), np.empty((rounds, k))
    for t in range(rounds):
        losses = adversary(t, p, draw)
        decisions[t], responses[t] = p, respond(losses, policy.cdf, 1.0, 0.0, policy.c1, high)
        state, p = policy.coefficients(state, round_info(samples, losses))
    assert np.isfinite(decisions).all()
    np.testing.assert_allclose(decisions.sum(1), 1, atol=1e-12)
    return decisions, responses


def excess(decisions: np.ndarray, responses: np.ndarray, bound: Callable[[int], float]) -> float:
    """The largest regret over its bound, at four lengths of the sequence."""
    ends = sorted({len(responses) * n // 4 for n in (1, 2, 3, 4)} - {0})
    return max(regret(decisions[:t], responses[:t])[-1] / bound(t) for t in ends)


def silo(k: int, high: float) -> Callable[[int], float]:
    return lambda t: silo_bound(t, k, lipschitz(0.0, high))


def device(k: int, high: float) -> Callable[[int], float]:
    return lambda t: device_bound(t, k, lipschitz(0.0, high))


def many(count: int) -> list[tuple[int, int, int]]:
    """Clients, rounds and seed of that many short sequences."""
    draw = np.random.default_rng(count)
    return [(int(draw.choice(CLIENTS)), int(draw.integers(1, 41)), seed) for seed in range(count)]


@pytest.mark.parametrize("adversary", kinds(ADVERSARIES, SOME))
def test_theorem_for_silos_on_many_short_sequences(adversary: str) -> None:
    names = list(CDFS)
    for k, rounds, seed in many(32):
        high = 1.0 if seed % 4 == 0 else 1 / k
        policy = AAggFFS(names[seed % len(names)], c2=high)
        game = play(policy, ADVERSARIES[adversary], k, rounds, seed, high)
        assert excess(*game, silo(k, high)) <= 1


@pytest.mark.parametrize("adversary", kinds(ADVERSARIES, SOME))
@pytest.mark.parametrize("k", [2, 5, 20])
def test_theorem_for_silos_over_two_hundred_rounds(adversary: str, k: int) -> None:
    game = play(AAggFFS("weibull"), ADVERSARIES[adversary], k, 200, seed=1, high=1 / k)
    assert excess(*game, silo(k, 1 / k)) <= 1


@pytest.mark.parametrize("adversary", kinds(ADVERSARIES, SOME))
def test_theorem_for_devices_with_the_gradient_itself(adversary: str) -> None:
    names = list(CDFS)
    for k, rounds, seed in many(32):
        game = play(ExactLeader(names[seed % len(names)]), ADVERSARIES[adversary], k, rounds, seed)
        assert excess(*game, device(k, 1.0)) <= 1
    for k in (2, 5, 20):
        assert excess(*play(ExactLeader(), ADVERSARIES[adversary], k, 200), device(k, 1.0)) <= 1


@pytest.mark.parametrize("adversary", kinds(ADVERSARIES, SOME))
def test_devices_with_all_clients(adversary: str) -> None:
    """The losses ⟨p, g̃⟩ that the part works on obey 2Ľ√(T log K) always; decision losses 2L√(T log K) at these T."""
    names = list(CDFS)
    for k, rounds, seed in [*many(24), (2, 200, 0), (5, 200, 0), (20, 200, 0)]:
        policy = AAggFFD(names[seed % len(names)])
        decisions, responses = play(policy, ADVERSARIES[adversary], k, rounds, seed)
        gradients = [linearised_gradient(p, r, r.mean()) for p, r in zip(decisions, responses, strict=True)]
        linear = (decisions * gradients).sum() - np.sum(gradients, 0).min()
        assert linear <= device_bound(rounds, k, 3.0)
        assert excess(decisions, responses, device(k, 1.0)) <= 1


@pytest.mark.parametrize(
    ("policy", "adversary"), [(Leader(), "against the largest p"), (Stubborn(), "always the same one")], ids=str
)
@pytest.mark.parametrize("k", [2, 5])
def test_a_bad_policy_exceeds_both_bounds(policy: Any, adversary: str, k: int) -> None:
    game = play(policy, ADVERSARIES[adversary], k, 200)
    assert excess(*game, device(k, 1.0)) > 1
    small = game[0], game[1] / k
    assert excess(*small, silo(k, 1 / k)) > 1


@pytest.mark.exhaustive
def test_where_the_proof_for_silos_holds_and_where_its_bound_fails() -> None:
    """ℓ(q) ≥ ℓ(p) + ⟨g, q - p⟩ + (β/2)⟨g, q - p⟩² with β = 1/(4L): for L = 1/K it takes K ≤ 3."""

    def holds(k: int, level: float) -> bool:
        u = np.linspace(-level, 0.99 * level, 4001)  # ⟨g, q - p⟩; ℓ(q) - ℓ(p) = -log(1 - u)
        return bool((-np.log1p(-u) >= u + u**2 / (8 * level) - 1e-15).all())

    assert [holds(k, 1 / k) for k in (1, 2, 3, 4, 5, 20)] == [True, True, True, False, False, False]
    bounds = {high: silo(2, high) for high in (0.5, 1e-4)}
    over = {
        high: excess(*play(AAggFFS("weibull", c2=high), slightly_more_often, 2, 5000, high=high), bound)
        for high, bound in bounds.items()
    }
    assert over[0.5] < 0.5, "where the proof holds"
    assert over[1e-4] > 1, "almost linear losses: no such policy can keep a logarithmic bound"


@pytest.mark.exhaustive
def test_devices_forget_that_the_gradient_depends_on_the_decision() -> None:
    """The linearised gradient leads to a vertex where the best fixed decision is inside: linear regret."""
    k, rounds = 5, 20_000
    part, exact = (play(p, one_against_all, k, rounds) for p in (AAggFFD("weibull"), ExactLeader()))
    assert excess(*part, device(k, 1.0)) > 1
    assert excess(*exact, device(k, 1.0)) < 0.5
    curve = regret(*part)
    late = (curve[-1] - curve[-2001]) / 2000  # a round, at the end
    best = best_fixed(part[1])
    assert 0.05 < best[0] < 0.95
    vertex = part[0][-1].round()[None]
    lost = (decision_losses(vertex, part[1]) - decision_losses(best[None], part[1])).mean()
    assert late > 0.5 * lost > 0.01


def decision(state: Any, k: int, high: float, share: float) -> np.ndarray:
    """p^{t+1} of all K clients from the part's state."""
    if not state:
        return np.full(k, 1 / k)
    bound = high + 2 * high / share
    step = bound * sqrt(int(state["rounds"]) + 1) / sqrt(log(k))
    return exponentiated(np.ones(k), -state["total"].numpy(), step)


def expected_regret(policy: AAggFFD, losses: np.ndarray, size: int) -> float:
    """E[Σ ℓ_t(p^t)] - min Σ ℓ_t(p) over all sequences of cohorts; equal states are counted together."""
    rounds, k = losses.shape
    share = size / k
    cohorts = [np.array(c) for c in combinations(range(k), size)]
    responses = np.array([respond(f, policy.cdf, 1.0, 0.0, 0.0, share) for f in losses])
    states: dict[tuple[float, ...], list[Any]] = {(): [1.0, {}]}
    suffered = 0.0
    for t in range(rounds):
        following: dict[tuple[float, ...], list[Any]] = {}
        for chance, state in states.values():
            p = decision(state, k, share, share)
            suffered += chance * decision_losses(p[None], responses[t : t + 1])[0]
            for c in cohorts:
                new, mixed = policy.coefficients(state, round_info([1] * size, losses[t, c], cohort=c, clients=k))
                weights = decision(new, k, share, share)[c]
                np.testing.assert_allclose(mixed, weights / weights.sum(), rtol=1e-9)
                key = tuple(new["total"].numpy().round(9))
                following.setdefault(key, [0.0, new])[0] += chance / len(cohorts)
        states = following
    assert sum(chance for chance, _ in states.values()) == pytest.approx(1)
    return suffered - decision_losses(best_fixed(responses)[None], responses).sum()


SEQUENCES = {
    "always the same one": (np.tile([1.0, 0.0, 0.0], (24, 1)), 2),
    "constant": (np.tile([1.0, 2.0, 4.0], (24, 1)), 2),
    "two in turn": (np.array([corner(t % 2, 3) for t in range(10)]), 2),
    "random": (np.random.default_rng(0).random((6, 3)), 2),
    "switching": (np.array([corner(t // 2, 4) for t in range(4)]), 2),
    "four clients, three here": (np.random.default_rng(1).random((4, 4)), 3),
    "everyone": (np.random.default_rng(2).random((30, 4)), 4),
}


@pytest.mark.parametrize("name", kinds(SEQUENCES, ["random", "four clients, three here"]))
def test_devices_in_expectation_over_all_sequences_of_cohorts(name: str) -> None:
    losses, size = SEQUENCES[name]
    (rounds, k), share = losses.shape, size / losses.shape[1]
    assert expected_regret(AAggFFD("weibull"), losses, size) <= device_bound(rounds, k, lipschitz(0.0, share))


def test_a_bad_policy_exceeds_the_bound_of_the_expectation() -> None:
    losses, _ = SEQUENCES["always the same one"]
    decisions, responses = play(Stubborn(), lambda t, p, draw: losses[t], 3, len(losses), high=2 / 3)
    assert regret(decisions, responses)[-1] > device_bound(24, 3, lipschitz(0.0, 2 / 3))


@given(st.integers(0, 10_000), st.integers(2, 6), st.data())
def test_responses_and_gradients_over_all_cohorts(seed: int, k: int, data: st.DataObject) -> None:
    """For any fixed level both are unbiased; at the cohort's own mean both shrink towards their mean, exactly so."""
    size = data.draw(st.integers(1, k))
    draw = np.random.default_rng(seed)
    r, p, level = draw.random(k), draw.dirichlet(np.ones(k)), float(draw.random())
    cohorts = [np.array(c) for c in combinations(range(k), size)]
    fixed = [doubly_robust(r[c], c, k, level) for c in cohorts]
    np.testing.assert_allclose(np.mean(fixed, 0), r, atol=1e-12)
    gradients = [linearised_gradient(p, estimate, level) for estimate in fixed]
    np.testing.assert_allclose(np.mean(gradients, 0), linearised_gradient(p, r, level), atol=1e-12)
    mean_response = np.mean([doubly_robust(r[c], c, k) for c in cohorts], 0)
    shrinkage = 1 - (k - size) / (size * (k - 1))
    np.testing.assert_allclose(mean_response, r.mean() + shrinkage * (r - r.mean()), atol=1e-12)


def test_unbiased_gradients_have_the_expected_linear_regret_of_full_ones() -> None:
    """Corollary 3.1, its step by lemma 3.3: E Σ⟨ğ_t, p^t - q⟩ = E Σ⟨g̃_t, p^t - q⟩ ≤ 2Ľ√(T log K), on all paths."""
    k, size, rounds, level = 4, 2, 4, 0.2
    share = size / k
    bound = share + 2
    cohorts = [np.array(c) for c in combinations(range(k), size)]
    responses = share * np.random.default_rng(3).random((rounds, k))
    paths = [(np.zeros(k), 0.0, 0.0)]
    for t, r in enumerate(responses):
        longer = []
        for total, estimated, exact in paths:
            p = exponentiated(np.ones(k), -total, bound * sqrt(t + 1) / sqrt(log(k)))
            away = p - corner(0, k)
            full = linearised_gradient(p, r, level) @ away
            for c in cohorts:
                g = linearised_gradient(p, doubly_robust(r[c], c, k, level), level)
                assert np.abs(g).max() <= bound
                longer.append((total + g, estimated + g @ away, exact + full))
        paths = longer
    estimated, exact = np.mean([path[1] for path in paths]), np.mean([path[2] for path in paths])
    assert len(paths) == len(cohorts) ** rounds
    assert estimated == pytest.approx(exact, abs=1e-12)
    assert estimated <= device_bound(rounds, k, bound)


def test_a_cohort_of_one_moves_nothing() -> None:
    """Its loss over the mean loss is 1 whatever it is."""
    policy, state = AAggFFD("gumbel"), {}
    for client, loss in ((0, 9.0), (2, 0.1), (0, 7.0)):
        state, p = policy.coefficients(state, round_info([5], [loss], cohort=[client], clients=3))
        np.testing.assert_array_equal(p, [1.0])
    assert not state["total"].any()


def test_silo_decisions_carry_a_certificate() -> None:
    """max_i ⟨∇, p - e_i⟩ bounds the value's excess, and with strong convexity the distance: below 1e-6 at K = 30."""
    k, policy = 30, AAggFFS("weibull")
    draw, state, history = np.random.default_rng(0), {}, []
    p, smallest = np.full(k, 1 / k), 1.0
    for _ in range(150):
        losses = draw.pareto(1.5, k) * np.linspace(0.2, 2, k)
        r = respond(losses, "weibull", 1.0, 0.0, 0.0, 1 / k)
        history.append((growth_gradient(p, r), p))
        state, p = policy.coefficients(state, round_info([1] * k, losses))
        slope = 4 * p + sum(g + k / 4 * g * (g @ (p - q)) for g, q in history)  # α = 4, β = K/4
        gap = (slope @ p - slope).max()
        assert sqrt(2 * max(gap, 0) / 4) < 1e-6
        smallest = min(smallest, p.min())
    assert smallest == 0, "some decision must have reached the simplex' border"
    assert isinstance(state["p"], torch.Tensor)
