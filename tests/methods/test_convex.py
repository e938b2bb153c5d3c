"""Least squares at every client: the stopping points of methods in closed form, and which of them are optimal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.marks import kinds
from helpers.quadratics import DIM, EXACT, FEW, NEAR, Problem, Vector, quadratics, squares
from helpers.runs import leaves, theta

from fedloom.core.local import Local
from fedloom.core.parts import Drift, Uplink
from fedloom.experiment.evaluation import Evaluation
from fedloom.parts.drift import FedCMDrift, FedDCDrift, FedDynDrift, FedNovaDrift, Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.server import SGD, Adagrad, Adam, Yogi
from fedloom.parts.uplink import ClipNoise, RandomK

MANY = Local(steps=25, batch_size=0, lr=0.2)


# --- FedAvg and the wrong point ----------------------------------------


def wrong_point(problem: Problem, p: Vector, steps: Vector, lr: float) -> Vector:
    """FedAvg's fixed point: Σ p_i (I - (I - ηA_i)^τ_i)(θ - θ_i*) = 0."""
    identity = np.eye(len(problem.b[0]))
    left, right = np.zeros_like(identity), np.zeros(len(identity))
    for i, a in enumerate(problem.a):
        pull = identity - np.linalg.matrix_power(identity - lr * a, int(steps[i]))
        left += p[i] * pull
        right += p[i] * pull @ np.linalg.lstsq(a, problem.b[i], rcond=None)[0]
    return np.linalg.solve(left, right)


def test_fedavg_stops_at_the_wrong_point_that_algebra_gives() -> None:
    problem = quadratics()
    p = problem.n / problem.n.sum()
    best = problem.solution(p)
    there = wrong_point(problem, p, np.full(len(p), 25), 0.2)
    assert np.linalg.norm(there - best) > 0.05 * np.linalg.norm(best)
    np.testing.assert_allclose(theta(problem.run(squares(), 10, MANY)), there, rtol=0, atol=1e-9)


def test_fedavg_with_one_step_is_gradient_descent_and_right() -> None:
    problem = quadratics()
    point = theta(problem.run(squares(), 30, Local(steps=1, batch_size=0, lr=0.8)))
    np.testing.assert_allclose(point, problem.solution(problem.n), rtol=0, atol=1e-9)


# --- SCAFFOLD and FedDyn and the right one ---------------------------------------------------------------------------

DRIFTS = {
    "scaffold": (Scaffold(), FEW, False),
    "scaffold by size": (Scaffold(size_weighted=True), FEW, True),
    "dc by size": (FedDCDrift(0.7, control=True, size_weighted=True), NEAR, True),
    "dynamic by size": (FedDynDrift(0.7, size_weighted=True), NEAR, True),
    "dynamic unweighted": (FedDynDrift(0.7, size_weighted=False), NEAR, False),
}


@pytest.mark.parametrize(("drift", "local", "size_weighted"), DRIFTS.values(), ids=DRIFTS)
@pytest.mark.parametrize("cohort", [None, 2], ids=["full", "partial"])
def test_corrected_methods_reach_the_true_minimiser(
    drift: Drift, local: Local, size_weighted: bool, cohort: int | None
) -> None:
    problem = quadratics()
    weighted, unweighted = problem.solution(problem.n), problem.solution(np.ones(len(problem.n)))
    assert np.linalg.norm(weighted - unweighted) > 0.1, "the two goals must differ for the test to tell them apart"
    point = theta(problem.run(squares(drift, Uniform()), 30 if cohort is None else 60, local, cohort=cohort))
    np.testing.assert_allclose(point, weighted if size_weighted else unweighted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("drift", ["scaffold", "dynamic unweighted"])
@pytest.mark.parametrize("uplink", [ClipNoise(0.3, 0.0), RandomK(0.7)], ids=["clipped", "random_k"])
def test_they_reach_it_whatever_uplinks_make_of_the_updates(drift: str, uplink: Uplink) -> None:
    """Clients keep the corrections that the server has read, so that it forgets nothing that was cut off."""
    problem, (part, local, _) = quadratics(), DRIFTS[drift]
    if isinstance(part, Scaffold) and isinstance(uplink, RandomK):
        uplink = replace(uplink, slices=("update", "drift/control"))
    point = theta(problem.run(squares(part, Uniform(), uplink=(uplink,)), 40, local))
    np.testing.assert_allclose(point, problem.solution(np.ones(len(problem.n))), rtol=0, atol=1e-3)


def test_the_direction_of_fedcm_repeats_the_decay_of_weights() -> None:
    """∇F + (wd/α)θ = 0 where it stops; methods that remember gradients by client stop at ∇F + wd θ = 0."""
    problem, decay, alpha = quadratics(), 0.06, 0.3
    local = Local(steps=1, batch_size=0, lr=0.4, weight_decay=decay)
    hessian, pull = np.mean(problem.a, axis=0), np.mean(problem.b, axis=0)
    for drift, strength in ((FedCMDrift(alpha), decay / alpha), (Scaffold(), decay)):
        there = np.linalg.solve(hessian + strength * np.eye(DIM), pull)
        np.testing.assert_allclose(theta(problem.run(squares(drift, Uniform()), 80, local)), there, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size_weighted", kinds([True, False], [True]))
def test_linear_terms_of_feddyn(size_weighted: bool) -> None:
    """After every round h = mean of all h_i; with exact solves h_i is the (scaled) gradient at θ_i; means vanish."""
    problem, alpha = quadratics(), 0.7
    scale = problem.n / problem.n.mean() if size_weighted else np.ones(len(problem.n))
    clients = len(scale)
    solutions: dict[int, Vector] = {}
    means = []
    for rounds in (1, 3, 60):
        result = problem.run(squares(FedDynDrift(alpha, size_weighted), Uniform()), rounds, NEAR, cohort=2, seed=4)
        states = {key: value.numpy() for key, value in leaves(result.snapshot)}
        linear_terms = [states.get(f"client {i}/drift/h", np.zeros(DIM)) for i in range(clients)]
        np.testing.assert_allclose(states["server/drift/h"], np.mean(linear_terms, axis=0), rtol=0, atol=1e-10)
        for i in {client for client, _ in result.snapshot.store}:
            # h_i = s_i ∇F_i(θ_i), so θ_i follows from h_i, and then αθ_i + s_i A_iθ_i from the received model.
            solutions[i] = np.linalg.solve(scale[i] * problem.a[i], linear_terms[i] + scale[i] * problem.b[i])
        means.append(np.linalg.norm(states["server/drift/h"]))
    best = problem.solution(scale)
    for i in range(clients):
        np.testing.assert_allclose(solutions[i], best, rtol=0, atol=1e-4)
        np.testing.assert_allclose(linear_terms[i], scale[i] * problem.gradient(i, best), rtol=0, atol=1e-4)
    assert means[-1] < 1e-4 < 1e-2 < means[0]
    assert min(np.linalg.norm(h) for h in linear_terms) > 0.1, "single linear terms must not vanish, only their mean"


@pytest.mark.parametrize("size_weighted", [True, False])
def test_linear_term_is_the_gradient_at_the_last_local_solution(size_weighted: bool) -> None:
    """Round by round, with θ_i taken from the models the clients report."""
    problem = quadratics()
    scale = problem.n / problem.n.mean() if size_weighted else np.ones(len(problem.n))
    for rounds in (1, 2, 4):
        result = problem.run(
            squares(FedDynDrift(0.7, size_weighted), Uniform()),
            rounds,
            EXACT,
            cohort=3,
            evaluation=Evaluation(what=("average",)),
        )
        states = {key: value.numpy() for key, value in leaves(result.snapshot)}
        assert result.snapshot.last is not None
        for i in result.snapshot.last.models.clients:
            model = result.snapshot.last.get(i)
            expected = scale[i] * problem.gradient(i, model.numpy())
            np.testing.assert_allclose(states[f"client {i}/drift/h"], expected, rtol=0, atol=1e-6)
            assert np.linalg.norm(expected) > 1e-2


def test_feddyn_with_one_client_is_the_proximal_point_method() -> None:
    """θ_1^t - θ* = (α(A + α)⁻¹)^t (θ⁰ - θ*), and the server stands at θ_1^t - ∇F(θ_1^t)/α."""
    problem, alpha, rounds = quadratics((9,)), 0.7, 6
    a, best = problem.a[0], problem.solution(np.ones(1))
    result = problem.run(squares(FedDynDrift(alpha), Uniform()), rounds, EXACT)
    shrink = np.linalg.matrix_power(alpha * np.linalg.inv(a + alpha * np.eye(DIM)), rounds)
    error = shrink @ (0 - best)
    assert np.linalg.norm(error) > 1e-4
    np.testing.assert_allclose(theta(result) - best, error - a @ error / alpha, rtol=0, atol=1e-7)


def test_feddyn_with_a_tiny_alpha_and_one_client_solves_in_one_round() -> None:
    """Its local model minimises F_1 itself; h = ∇F_1 there, of size α, so the linear term does no more."""
    problem = quadratics((9,))
    result = problem.run(
        squares(FedDynDrift(1e-7), Uniform()), 1, replace(EXACT, steps=80), evaluation=Evaluation(what=("average",))
    )
    assert result.snapshot.last is not None
    np.testing.assert_allclose(result.snapshot.last.get(0).numpy(), problem.solution(np.ones(1)), rtol=0, atol=1e-5)


# --- FedNova ----------------------------------------


def copies(counts: tuple[int, ...], seed: int = 2) -> Problem:
    """One dimension, and clients that hold copies of one sample: every batch has the same gradient."""
    draw = np.random.default_rng(seed)
    a, b, xs, ys = [], [], [], []
    for n in counts:
        x, y = draw.normal(loc=1.0, scale=0.2, size=(1, 1)), 3 * draw.normal(size=1)
        xs.append(np.repeat(x, n, axis=0))
        ys.append(np.repeat(y, n))
        a.append(x.T @ x)
        b.append(x.T @ y)
    return Problem(tuple(a), tuple(b), tuple(xs), tuple(ys))


def nova_point(problem: Problem, p: Vector, steps: Vector, lr: float) -> float:
    """FedNova's fixed point in one dimension: Σ p_i (1 - (1 - ηa_i)^τ_i)/τ_i (θ - θ_i*) = 0."""
    a = np.array([m.item() for m in problem.a])
    weight = p * (1 - (1 - lr * a) ** steps) / steps
    return float((weight * np.array([v.item() for v in problem.b]) / a).sum() / weight.sum())


def test_fednova_is_consistent_with_unequal_steps_and_fedavg_is_not() -> None:
    """As η → 0 FedNova's stopping point goes to the minimiser, FedAvg's to that of Σ p_i τ_i F_i."""
    problem = copies((2, 4, 12))
    p, steps = problem.n / problem.n.sum(), problem.n / 2
    best = problem.solution(p).item()
    nova, average = [], []
    for lr in (0.04, 0.02):
        local = Local(epochs=1, batch_size=2, lr=lr)
        rounds = int(8 / lr / 4)
        point = theta(problem.run(squares(FedNovaDrift()), rounds, local)).item()
        assert point == pytest.approx(nova_point(problem, p, steps, lr), abs=1e-6)
        nova.append(abs(point - best))
        point = theta(problem.run(squares(), rounds, local)).item()
        assert point == pytest.approx(wrong_point(problem, p, steps, lr).item(), abs=1e-6)
        average.append(abs(point - best))
    assert min(average) > 0.3
    assert max(nova) < 0.25 * min(average)
    assert nova[1] / nova[0] == pytest.approx(0.5, rel=0.1)  # error of order η
    assert average[1] / average[0] > 0.9  # error that stays


# --- server optimisers ----------------------------------------


RULES = {"adam": Adam(0.1), "yogi": Yogi(0.1), "adagrad": Adagrad(0.1, beta1=0.9)}


@pytest.mark.parametrize("rule", RULES)
def test_moments_are_kept_across_rounds(rule: str) -> None:
    """Two rounds in one run are not two runs of one round: the moments of the first act in the second."""
    problem = quadratics()
    result = problem.run(squares(server=RULES[rule]), 3, MANY)
    p = problem.n / problem.n.sum()
    at, m, v = np.zeros(DIM), np.zeros(DIM), np.full(DIM, 1e-6)
    for _ in range(3):
        delta = np.zeros(DIM)
        for i, a in enumerate(problem.a):
            here = at.copy()
            for _ in range(25):
                here = here - 0.2 * (a @ here - problem.b[i])
            delta += p[i] * (at - here)
        m = 0.9 * m + 0.1 * delta
        if rule == "adam":
            v = 0.99 * v + 0.01 * delta**2
        elif rule == "yogi":
            v = v + 0.01 * np.where(delta**2 > v, delta**2, -(delta**2))
        else:
            v = v + delta**2
        at = at - 0.1 * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(theta(result), at, rtol=0, atol=1e-10)
    states = {key: value.numpy() for key, value in leaves(result.snapshot)}
    np.testing.assert_allclose(states["server/server/m"], m, rtol=0, atol=1e-10)
    np.testing.assert_allclose(states["server/server/v"], v, rtol=0, atol=1e-10)


def test_server_momentum_speeds_up_and_stops_at_the_same_point() -> None:
    """Momentum changes the path, not the fixed point."""
    problem = quadratics()
    there = wrong_point(problem, problem.n / problem.n.sum(), np.full(len(problem.n), 25), 0.2)
    point = theta(problem.run(squares(server=SGD(lr=0.9, momentum=0.2)), 18, MANY))
    np.testing.assert_allclose(point, there, rtol=0, atol=1e-6)
