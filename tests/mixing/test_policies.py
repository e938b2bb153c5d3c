"""Mixing policies: published tables, limits, extreme losses, and independent derivations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.fair import doubly_robust, linearised_gradient
from helpers.federations import SIZES
from helpers.rounds import round_info
from helpers.runs import assert_same_state, experiment, go, theta
from scipy.optimize import minimize

from fedloom.base.errors import ConfigError
from fedloom.compute.live import Live
from fedloom.core.context import RoundInfo
from fedloom.core.local import Local, draw_cohort
from fedloom.core.method import Method
from fedloom.core.parts import Mixing
from fedloom.core.simplex import exponentiated
from fedloom.experiment.federated import run
from fedloom.methods import fedavg, make
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.mixing import (
    AFL,
    QFFL,
    TERM,
    AAggFFD,
    AAggFFS,
    FedMGDA,
    Fixed,
    Proportional,
)
from fedloom.parts.mixing.aaggff_s import growth_gradient
from fedloom.parts.mixing.responses import CDFS, respond, transformed
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.server import SGD

N = np.array([10, 30, 20, 40])
F = np.array([0.5, 1.5, 0.1, 1.0])


def cohort(losses: Any = F, samples: np.ndarray = N, members: Any = None, total: int = 0) -> RoundInfo:
    return round_info(samples[: len(losses)], losses, cohort=members, clients=total)


def p_of(policy: Mixing, *cohorts: RoundInfo) -> np.ndarray:
    """The last decision after a number of rounds."""
    state: Any = {}
    p = np.zeros(0)
    for info in cohorts:
        state, p = policy.coefficients(state, info)
        assert (p >= 0).all()
        assert abs(p.sum() - 1) < 1e-12
    return p


PRINTED = {  # Hahn 2024, table 3.3: losses .01, .10, .02, over their mean as printed there: .23, 2.31, .46
    "weibull": [0.05, 1.00, 0.19],
    "frechet": [0.01, 0.65, 0.11],
    "gumbel": [0.12, 0.76, 0.18],
    "exponential": [0.21, 0.90, 0.37],
    "logistic": [0.32, 0.79, 0.37],
    "normal": [0.22, 0.90, 0.29],
}


@pytest.mark.parametrize("cdf", CDFS)
def test_table_of_response_transformations_to_its_printed_digits(cdf: str) -> None:
    np.testing.assert_array_equal(transformed(np.array([0.23, 2.31, 0.46]), cdf).round(2), PRINTED[cdf])
    exact = respond(np.array([0.01, 0.10, 0.02]), cdf, 1.0, 0.0, 0.0, 1.0)
    np.testing.assert_allclose(exact, PRINTED[cdf], atol=0.0061)  # not rounded in between


@pytest.mark.parametrize("cdf", CDFS)
def test_responses_increase_and_stay_in_their_range(cdf: str) -> None:
    losses = np.array([0.0, 1e-30, 0.3, 1.0, 1.0, 7.0, 1e30])
    for scale, shape in ((1.0, 0.0), (0.5, 3.0), (2.0, 0.7)):
        r = respond(losses, cdf, scale, shape, 0.2, 0.9)
        assert np.isfinite(r).all()
        assert (np.diff(r) >= 0).all()
        assert ((r >= 0.2) & (r <= 0.9)).all()
    assert len(np.unique(respond(np.zeros(3), cdf, 1.0, 0.0, 0.0, 1.0))) == 1


LOSSES = {"q-FedAvg": lambda f: 2.0 * np.log(f), "TERM": lambda f: f, "PropFair": lambda f: -np.log(3.0 - f)}
DIRECT = {
    "q-FedAvg": (QFFL(2.0), N * F**2, 1.0),
    "TERM": (TERM(0.7), N * np.exp(0.7 * F), 1 / 0.7),
    "PropFair": (Proportional(3.0), N / (3.0 - F), 1.0),
}


@pytest.mark.parametrize("name", DIRECT)
def test_static_family_is_one_step_of_exponentiated_gradient(name: str) -> None:
    policy, direct, step = DIRECT[name]
    np.testing.assert_allclose(p_of(policy, cohort()), direct / direct.sum(), rtol=1e-12)
    np.testing.assert_allclose(exponentiated(N / 100, LOSSES[name](F), step), direct / direct.sum(), rtol=1e-12)


@pytest.mark.parametrize(
    "policy", [QFFL(0.0), TERM(0.0), TERM(1e-12), Proportional(1e13), AFL(0.0)], ids=lambda p: str(p)
)
def test_limits_are_by_samples(policy: Mixing) -> None:
    np.testing.assert_allclose(p_of(policy, cohort(), cohort()), N / 100, rtol=1e-11)


@pytest.mark.parametrize("policy", [QFFL(400.0), TERM(400.0), AFL(400.0)], ids=lambda p: str(p))
def test_the_other_limits_are_the_worst_client_alone(policy: Mixing) -> None:
    np.testing.assert_allclose(p_of(policy, cohort()), [0, 1, 0, 0], atol=1e-12)


POLICIES = [
    QFFL(1.0), QFFL(5.0), TERM(10.0), TERM(-1.0), Proportional(2.0), AFL(1.0),
    *(kind(cdf) for kind in (AAggFFS, AAggFFD) for cdf in CDFS),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: str(p))
@pytest.mark.parametrize("extreme", [0.0, 1e-30, 1e30, 1e300])
def test_extreme_losses_never_give_nan(policy: Mixing, extreme: float) -> None:
    info = cohort([0.5, extreme, 0.1, 1.0])
    p_of(policy, info, cohort(), info, cohort([extreme] * 4))


@pytest.mark.parametrize(
    "method",
    [
        *("q_ffl", "term", "afl", "aaggff_s", "aaggff_d"),
        *(Method("mine", (CrossEntropy(),), mixing=part) for part in (Proportional(), TERM(-2.0))),
    ],
    ids=lambda method: method if isinstance(method, str) else str(method.mixing),
)
def test_a_loss_that_is_not_finite_is_named_and_left_out(method: Method | str, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = Live._loss_of_received
    lost = {1: float("nan"), 2: float("inf")}
    monkeypatch.setattr(Live, "_loss_of_received", lambda self, d, c, h: lost.get(c, original(self, d, c, h)))
    result = go(method, rounds=2)
    assert {str(f).split(": ")[0] for f in result.failures} == {
        f"round {t}, client {c}" for t in (1, 2) for c in (1, 2)
    }
    assert all("its loss of the received model is not finite" in str(f) for f in result.failures)
    assert np.isfinite(theta(result)).all()


def test_agnostic_is_projected_ascent_and_remembers() -> None:
    p = p_of(AFL(0.1), cohort())
    raw = N / 100 + 0.1 * F  # inside: the projection takes the same from all
    np.testing.assert_allclose(p, raw - (raw.sum() - 1) / 4, rtol=1e-12)
    np.testing.assert_allclose(p_of(AFL(0.1), cohort(), cohort()), p + 0.1 * (F - F.mean()), rtol=1e-12)


def newton(responses: np.ndarray, low: float = 0.0, high: float = 0.0) -> np.ndarray:
    """All decisions of AAggFF-S, with the whole history kept and a general convex solver."""
    k = responses.shape[1]
    high = high or 1 / k
    bound = high / (1 + low)
    alpha, beta = 4 * k * bound, 1 / (4 * bound)
    decisions, gradients = [np.full(k, 1 / k)], []
    for r in responses:
        gradients.append(-r / (1 + decisions[-1] @ r))

        def value(p: np.ndarray) -> float:
            parts = [g @ p + beta / 2 * (g @ (p - q)) ** 2 for g, q in zip(gradients, decisions, strict=True)]
            return sum(parts) + alpha / 2 * p @ p

        def slope(p: np.ndarray) -> np.ndarray:
            pairs = zip(gradients, decisions, strict=True)
            return sum(g + beta * g * (g @ (p - q)) for g, q in pairs) + alpha * p

        sums = {"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(k)}
        options = {"ftol": 1e-16, "maxiter": 500}
        optimum = minimize(
            value, decisions[-1], jac=slope, bounds=[(0, 1)] * k, constraints=sums, method="SLSQP", options=options
        )
        decisions.append(optimum.x)
    return np.array(decisions)


@pytest.mark.parametrize("cdf", ["weibull", "normal", "frechet"])
def test_silo_aggregation_against_a_convex_solver(cdf: str) -> None:
    draw = np.random.default_rng(0)
    losses = draw.random((40, 5)) * [0.1, 1, 1, 2, 6]
    responses = np.array([respond(f, cdf, 1.0, 0.0, 0.0, 0.2) for f in losses])
    expected = newton(responses)
    state: Any = {}
    for t, f in enumerate(losses):
        state, p = AAggFFS(cdf).coefficients(state, cohort(f, np.ones(5, dtype=int)))
        np.testing.assert_allclose(p, expected[t + 1], atol=1e-6)
    assert expected[-1].max() > 0.25
    assert {tuple(v.shape) for v in state.values()} == {(5, 5), (5,)}, "the state must not grow with the rounds"


def test_device_aggregation_is_its_closed_form_with_full_gradients() -> None:
    """The equations as printed, with all K entries, against the part, which moves the sampled ones only."""
    draw = np.random.default_rng(1)
    k, size = 12, 4
    share, policy = size / k, AAggFFD("gumbel")
    state: Any = {}
    p, total = np.full(k, 1 / k), np.zeros(k)
    for t in range(1, 30):
        members = np.sort(draw.choice(k, size, replace=False))
        losses = draw.random(size) * (1 + members)
        r = respond(losses, "gumbel", 1.0, 0.0, 0.0, share)
        total += linearised_gradient(p, doubly_robust(r, members, k), r.mean())
        p = np.exp(-np.sqrt(np.log(k)) * total / ((share + 2) * np.sqrt(t + 1)))
        p /= p.sum()
        state, mixed = policy.coefficients(state, cohort(losses, np.ones(size, dtype=int), members, k))
        np.testing.assert_allclose(mixed, p[members] / p[members].sum(), rtol=1e-10)
    assert mixed.max() > 1.05 / size


def test_device_closed_form_minimises_its_objective() -> None:
    """Σ⟨ğ, p⟩ + η Σ p log p with η = Ľ√(t+1)/√(log K), numerically."""
    draw = np.random.default_rng(2)
    total, k = draw.normal(size=6), 6
    eta = 2.3 * np.sqrt(8) / np.sqrt(np.log(k))
    closed = np.exp(-total / eta)
    closed /= closed.sum()
    sums = {"type": "eq", "fun": lambda p: p.sum() - 1}
    optimum = minimize(
        lambda p: total @ p + eta * (p * np.log(p)).sum(), np.full(k, 1 / k), bounds=[(1e-9, 1)] * k,
        constraints=sums, method="SLSQP", options={"ftol": 1e-15},
    )  # fmt: skip
    np.testing.assert_allclose(closed, optimum.x, atol=1e-6)


def test_linearised_gradient_is_the_tangent_of_the_gradient() -> None:
    draw = np.random.default_rng(3)
    p, r, level = draw.dirichlet(np.ones(5)), draw.random(5), 0.4
    at, step = np.full(5, level), 1e-6
    np.testing.assert_allclose(linearised_gradient(p, at, level), growth_gradient(p, at), rtol=1e-12)
    slope = (growth_gradient(p, at + step * r) - growth_gradient(p, at - step * r)) / (2 * step)
    np.testing.assert_allclose(linearised_gradient(p, at + r, level) - growth_gradient(p, at), slope, atol=1e-8)


def test_q_zero_and_no_tilt_are_fedavg_to_the_last_round() -> None:
    hard = {"local": Local(epochs=2, batch_size=4, lr=0.3, clip=0.9), "cohort": 4, "drop_rate": 0.1, "seed": 3}
    for name, settings in (("q_ffl", {"q": 0.0}), ("term", {"lam": 0.0})):
        np.testing.assert_allclose(theta(go(make(name, **settings), **hard)), theta(go(fedavg(), **hard)), atol=1e-12)
    for dropped in (0.0, 0.3):  # clients that are missing in the first round have their own weight later
        all_of_them = hard | {"cohort": None, "drop_rate": dropped}
        ends = [theta(go(method, **all_of_them)) for method in (make("afl", step=0.0), fedavg())]
        np.testing.assert_allclose(*ends, atol=1e-12)


def test_fixed_weights_of_the_samples_are_fedavg() -> None:
    method = Method("fixed", (CrossEntropy(),), mixing=Fixed(tuple(3.0 * n for n in SIZES)))
    np.testing.assert_allclose(theta(go(method, cohort=4)), theta(go(fedavg(), cohort=4)), atol=1e-12)


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_a_cohort_without_weight_has_no_effect(engine: str, compute: str) -> None:
    """One client alone has a weight: rounds that it misses leave the model, the corrections and clients' states."""
    only = Method("one", (CrossEntropy(),), FedDynDrift(0.1), mixing=Fixed((0.0, 0.0, 1.0, 0.0, 0.0, 0.0)))
    settings = {"cohort": 2, "rounds": 6, "engine": engine, "compute": compute}
    cohorts = [set(draw_cohort(6, 2, 0, t).tolist()) for t in range(6)]
    last = max(t for t in range(6) if 2 in cohorts[t])
    assert 0 < last < 5
    full_run, before = go(only, **settings), go(only, **settings | {"rounds": last + 1})
    assert_same_state(full_run.snapshot, before.snapshot)
    assert not full_run.failures
    assert {client for client, _ in full_run.snapshot.store} == set().union(*(c for c in cohorts if 2 in c))


def test_multi_gradient_of_clients_that_do_not_move() -> None:
    """Clients with a zero update count nothing, and if nobody moves the model stays."""
    still = round_info(N[:3], updates=[torch.zeros(2)] * 3)
    state, p = FedMGDA().coefficients({}, still)
    np.testing.assert_allclose(p, N[:3] / 60)
    moving = [torch.tensor([3.0, 0.0]), torch.zeros(2), torch.tensor([0.0, 4.0])]
    there = round_info(N[:3], updates=moving)
    state, p = FedMGDA(eps=0.0).coefficients({}, there)
    mixed = torch.stack([w * m for w, m in zip(p, moving, strict=True)]).sum(0)
    _, step = FedMGDA(eps=0.0, lr=2.0).combine(state, mixed, {}, there)
    torch.testing.assert_close(step, 2 * torch.tensor([1 / 6, 2 / 6]).double(), check_dtype=False)


def test_propfair_as_objective_and_as_mixing_take_the_same_first_step() -> None:
    """With one step on all data, Σ n_i/n ∇F_i/(M - F_i) is the mixed update times Σ (n_i/n)/(M - F_i)."""
    once = {"rounds": 1, "local": Local(steps=1, batch_size=0, lr=0.1)}
    start = theta(go("fedavg", rounds=1, local=Local(steps=1, lr=1e-300)))
    objective = theta(go(make("propfair", M=3.0), **once)) - start
    mixing = theta(go(Method("m", (CrossEntropy(),), mixing=Proportional(3.0)), **once)) - start
    ratio = objective / mixing
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-8)
    assert 1 / 3 < ratio.mean() < 1 / (3 - 2)


def test_any_policy_with_other_parts_and_engines() -> None:
    """AAggFF mixing, FedDyn drift and server momentum in one method, the same on every engine."""
    method = Method("mine", (CrossEntropy(),), FedDynDrift(0.1), mixing=AAggFFD(), server=SGD(momentum=0.5))
    serial, processes = (theta(go(method, cohort=4, engine=engine)) for engine in ("serial", "processes"))
    np.testing.assert_array_equal(serial, processes)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: make("aaggff_s", cdf="weibul"), "did you mean 'weibull'"),
        (lambda: AAggFFS(c1=0.5, c2=0.2), "0 <= c1 < c2"),
        (lambda: Fixed((0.0, 0.0)), "not all 0"),
        (lambda: Fixed((1.0, float("nan"))), "finite weights"),
        (lambda: go(Method("f", (CrossEntropy(),), mixing=Fixed((1.0, 2.0)))), "2 weights, but there are 6 clients"),
        (lambda: run(experiment("afl", cohort=3)), "mixing 'afl' needs every client in every round"),
        (lambda: run(experiment("aaggff_s", cohort=3)), "mixing 'aaggff_s' needs every client in every round"),
    ],
)
def test_impossible_settings_end_in_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()


@pytest.mark.parametrize("name", ["afl", "q_ffl", "fedmgda", "aaggff_s", "aaggff_d"])
def test_policies_remember_over_a_resume(name: str, tmp_path: Any) -> None:
    full_run = run(experiment(name, rounds=5), tmp_path / "full")
    out = tmp_path / "halves"
    run(experiment(name, rounds=2), out)
    resumed = run(experiment(name, rounds=5), out, resume=True)
    np.testing.assert_array_equal(theta(full_run), theta(resumed))
