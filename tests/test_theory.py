"""Theorems of the papers, on problems where all their constants are known.

What has a closed form on quadratics is in ``methods/test_convex.py``, regret bounds of AAggFF in
``mixing/test_bounds.py``, that of MOML (theorem 8) in ``online/test_online_laws.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arriving import convex
from helpers.federations import classes
from helpers.networks import tanh_net
from helpers.quadratics import DIM, Problem, Track, Vector, quadratics, squares
from helpers.runs import go, leaves, theta
from torch import Tensor, nn

from fedloom.base.tree import Tree
from fedloom.core.context import Context, RoundInfo
from fedloom.core.local import Local
from fedloom.core.message import Message, SendResult
from fedloom.core.method import Method
from fedloom.core.parts import UPDATE, Uplink
from fedloom.experiment import federated
from fedloom.parts.adaptation import Maml
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.mixing import Fixed, Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import Alternating
from fedloom_apps.online import BufferedMoml

MU, L = 0.6, 1.6  # bounds of the eigenvalues of all Hessians


def starting_at(point: Vector) -> Any:
    """A factory of models θᵀx that start at a point."""

    def make() -> nn.Module:
        module = nn.Linear(len(point), 1, bias=False).double()
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(point))
        return module

    return make


def value(problem: Problem, at: Vector, weights: Vector) -> float:
    """Σ w_i F_i without constants."""
    return float(sum(w * (at @ a @ at / 2 - b @ at) for w, a, b in zip(weights, problem.a, problem.b, strict=True)))


# --- FedDyn -----------------------------------------------------------------------------


def potentials(problem: Problem, path: Track, alpha: float, kappa: float) -> list[tuple[float, float]]:
    """‖g^t - w*‖² + κC_t, and the excess ℓ(g^t) - ℓ(w*), for t = 0, 1, ….

    g^t = w^t + h^t/α is the mean of the round's models, and C_t the mean square of ∇L_k(w_k^t) - ∇L_k(w*).
    """
    clients = len(problem.n)
    even = np.full(clients, 1 / clients)
    best = problem.solution(even)
    slopes = [problem.gradient(k, best) for k in range(clients)]
    values = []
    for t in range(len(path.theta) + 1):
        g, client_h = np.zeros(DIM), [np.zeros(DIM)] * clients
        if t:
            g = path.theta[t - 1] + path.server[t - 1]["drift"]["h"].numpy() / alpha
            states = path.clients[t - 1]
            client_h = [states[k]["drift"]["h"].numpy() if k in states else np.zeros(DIM) for k in range(clients)]
        spread = np.mean([np.sum((h - s) ** 2) for h, s in zip(client_h, slopes, strict=True)])
        excess = value(problem, g, even) - value(problem, best, even)
        values.append((float(np.sum((g - best) ** 2) + kappa * spread), excess))
    return values


def constants(alpha: float, m: int, p: int, mu: float) -> tuple[float, float, float]:
    """r, κ and κ₀ of lemma 8; with μ = 0 they are those of lemma 1."""
    z = alpha**3 * p + alpha**2 * p * mu - alpha**2 * m * mu - 20 * alpha * L**2 * p + 4 * L**2 * m * mu
    z -= 20 * L**2 * p * mu
    top = 2 * alpha**3 * p + 2 * alpha**2 * p * mu - 2 * alpha**2 * m * mu - 40 * alpha**2 * L * p
    top += -80 * alpha * L**2 * p - 40 * alpha * L * p * mu + 8 * alpha * L * m * mu + 16 * L**2 * m * mu
    top -= 80 * L**2 * p * mu
    return 1 + mu / alpha, 8 * m * (L + alpha) / z, top / (alpha * z)


def exact_local(alpha: float) -> Local:
    """Local problems with Hessians between α + μ and α + L, solved to rounding."""
    return Local(steps=9, batch_size=0, lr=1 / (alpha + (MU + L) / 2))


@pytest.mark.parametrize("mu", [0.0, MU], ids=["theorem 5, convex", "theorem 6, strongly convex"])
def test_feddyn_descends_its_potential_in_every_round(mu: float) -> None:
    """r(‖g^t - w*‖² + κC_t) ≤ ‖g^{t-1} - w*‖² + κC_{t-1} - κ₀(ℓ(g^{t-1}) - ℓ(w*)): the theorems are its sums over t."""
    problem, alpha = quadratics(), (25 if not mu else 30) * L
    r, kappa, weight = constants(alpha, 4, 4, mu)
    path = Track()
    problem.run(squares(FedDynDrift(alpha, size_weighted=False), Uniform()), 20, exact_local(alpha), (path,))
    values = potentials(problem, path, alpha, kappa)
    for (before, excess), (after, _) in pairwise(values):
        assert r * after <= before - weight * excess
    assert weight > 0
    assert values[-1][0] < 0.7 * values[0][0]


def test_feddyn_descends_its_potential_in_expectation_over_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for P of m clients, where E is the mean over all sequences of cohorts."""
    problem, alpha, rounds, taking_part = quadratics((6, 14, 8)), 30 * L, 2, 2
    r, kappa, weight = constants(alpha, 3, taking_part, MU)
    paths = []
    for cohorts in product(combinations(range(3), taking_part), repeat=rounds):
        monkeypatch.setattr(federated, "draw_cohort", lambda *_, cohorts=cohorts, **__: np.array(cohorts[_[3]]))
        path = Track()
        method = squares(FedDynDrift(alpha, size_weighted=False), Uniform())
        problem.run(method, rounds, exact_local(alpha), (path,), cohort=taking_part)
        paths.append(potentials(problem, path, alpha, kappa))
    mean = np.mean(paths, axis=0)
    for (before, excess), (after, _) in pairwise(mean):
        assert r * after <= before - weight * excess


@pytest.mark.parametrize("cohort", [None, 2], ids=["full", "partial"])
def test_device_meta_models_of_pfldyn_converge_to_the_optimal_meta_model(cohort: int | None) -> None:
    """Proposition 3.2.1: where they converge, Σ ∇(f_i∘T_i) = 0, which is not where the mean of f_i is least."""
    problem, alpha, leap = quadratics(), 0.4, 0.3
    inner = [np.eye(DIM) - leap * a for a in problem.a]  # T_i(w) = (I - ηA)w + ηb
    adapted = replace(
        problem,
        a=tuple(s @ a @ s for s, a in zip(inner, problem.a, strict=True)),
        b=tuple(s @ (b - leap * a @ b) for s, a, b in zip(inner, problem.a, problem.b, strict=True)),
    )
    even = np.ones(len(problem.n))
    best = adapted.solution(even)
    assert np.linalg.norm(best - problem.solution(even)) > 0.05
    method = squares(FedDynDrift(alpha, size_weighted=False), Uniform(), adaptation=Maml(leap))
    path = Track()
    local = Local(steps=5, batch_size=0, lr=1 / (alpha + 0.42))  # all of (I - ηA)A(I - ηA) lies near .42
    problem.run(method, 18 if cohort is None else 50, local, (path,), cohort=cohort)
    np.testing.assert_allclose(path.theta[-1], best, rtol=0, atol=1e-4)
    for i in range(len(even)):
        h = path.clients[-1][i]["drift"]["h"].numpy()
        np.testing.assert_allclose(h, adapted.gradient(i, best), rtol=0, atol=1e-4)
        assert np.linalg.norm(h) > 0.05, "the gradients of single devices must not vanish, only their sum"


# --- FedAvg, its bias, and SCAFFOLD ----------------------------------------


def bias(problem: Problem, method: Method, steps: int, lr: float, rounds: int) -> float:
    """How far from the minimiser a run ends that starts there."""
    best = problem.solution(np.ones(len(problem.n)))
    result = problem.run(method, rounds, Local(steps=steps, batch_size=0, lr=lr), model=starting_at(best))
    return float(np.linalg.norm(theta(result) - best))


def test_the_bias_of_fedavg_grows_with_the_local_steps_and_the_learning_rate() -> None:
    """From θ* a round leads (η²E(E - 1)/2)‖d‖ away, d = mean A_i∇F_i(θ*), and all η(E - 1)/2‖A⁻¹d‖, to first order."""
    problem = quadratics((6, 14))
    best = problem.solution(np.ones(2))
    mixed = np.mean([a @ problem.gradient(i, best) for i, a in enumerate(problem.a)], axis=0)
    end = np.linalg.solve(np.mean(problem.a, axis=0), mixed)
    for steps, lr in ((2, 0.002), (5, 0.002), (9, 0.002), (5, 0.001)):
        once = bias(problem, squares(mixing=Uniform()), steps, lr, 1)
        assert once == pytest.approx(lr**2 * steps * (steps - 1) / 2 * np.linalg.norm(mixed), rel=0.03)
    for steps, lr in ((3, 0.04), (5, 0.02), (5, 0.04)):
        at_last = bias(problem, squares(mixing=Uniform()), steps, lr, 60)
        assert at_last == pytest.approx(lr * (steps - 1) / 2 * np.linalg.norm(end), rel=0.1)
    assert bias(problem, squares(mixing=Uniform()), 1, 0.04, 20) < 1e-12


def test_scaffold_converges_at_a_rate_that_does_not_know_how_much_clients_differ() -> None:
    """Gradients at the optimum a thousand times as large: the same factor a round, where FedAvg stays away as far."""
    problem, ratios = quadratics(), []
    best = problem.solution(np.ones(4))
    for scale in (0.1, 100.0):
        b = [a @ best + scale * problem.gradient(i, best) for i, a in enumerate(problem.a)]  # the same minimiser
        y = [x @ np.linalg.solve(a, b_k) for x, a, b_k in zip(problem.x, problem.a, b, strict=True)]
        other, path = replace(problem, b=tuple(b), y=tuple(y)), Track()
        local = Local(steps=4, batch_size=0, lr=0.1)
        other.run(squares(Scaffold(), Uniform()), 40, local, (path,))
        far = [np.linalg.norm(at - best) for at in path.theta]
        ratios.append(far[-1] / far[-11])
        average = np.linalg.norm(theta(other.run(squares(mixing=Uniform()), 25, local)) - best)
        assert average > 0.02 * scale
        assert far[-1] < 1e-3 * average
    np.testing.assert_allclose(ratios, ratios[0], rtol=0.2)


# --- mixing weights for a target ----------------------------------------


def test_the_error_of_other_mixing_weights_than_those_of_the_objective_keeps_its_bound() -> None:
    """FedSSA, theorem A.5 without noise: mean ‖∇F(θ^t)‖² ≤ (2(1 - C)(F⁰ - F*)/(τηT) + (1 - C)BW + 2BC)/(1 - C - 2AC -
    W(1 - C)), W = 2KΣ(p_k - w_k)², C = 2τ(τ - 1)η²L²; without the term of W it would not hold.
    """  # fmt: skip
    problem, tau, lr, rounds, ratio = quadratics(), 2, 0.05, 150, 1.0
    p = np.array([0.25, 0.25, 0.25, 0.25])
    best, c = problem.solution(p), 2 * tau * (tau - 1) * (lr * L) ** 2
    assert lr * L <= 1 / (2 * tau)
    for shift, term_matters in ((0.0, False), (0.15, True)):
        w = p + shift * np.array([1, -1, 1, -1])
        path = Track()
        problem.run(squares(mixing=Fixed(tuple(w.tolist()))), rounds, Local(steps=tau, batch_size=0, lr=lr), (path,))
        points = [np.zeros(DIM), *path.theta[:-1]]
        slopes = [[problem.gradient(k, at) for k in range(4)] for at in points]
        full_gradients = [p @ np.array(gradients) for gradients in slopes]
        b = max(
            g @ g - ratio * full @ full
            for gradients, full in zip(slopes, full_gradients, strict=True)
            for g in gradients
        )
        distance = 2 * 4 * np.sum((p - w) ** 2)
        gain = value(problem, points[0], p) - value(problem, best, p)
        mean = np.mean([full @ full for full in full_gradients])

        def bound(distance: float, gain: float = gain, b: float = b) -> float:
            terms = 2 * (1 - c) * gain / (tau * lr * rounds) + (1 - c) * b * distance + 2 * b * c
            return terms / (1 - c - 2 * ratio * c - distance * (1 - c))

        assert 0 < mean <= bound(distance)
        assert (mean > bound(0.0)) == term_matters


# --- online meta-learning ----------------------------------------


def test_a_buffer_of_b_tasks_has_a_regret_of_the_order_of_one_over_b_squared() -> None:
    """MOML, theorem 9 (α = 0): Σ_t ‖∇S^t(w^t)‖² ≤ 8TG²/B², S^t the mean of the last B losses; by eq. (A.17) it is
    Σ_t ‖∇f^t(w^t) - ∇f^{t-B}(w^t)‖²/B², whose mean falls from one B to twice as many.
    """  # fmt: skip
    draws, length, means = np.random.default_rng(3), 24, []
    centres, scales = draws.normal(size=(length, 3)), draws.uniform(0.95, 1.05, (length, 3))
    local = Local(steps=8, batch_size=0, lr=1.0)
    for size in (2, 4):
        experiment = convex(BufferedMoml(1e-9, buffer=size, nabla=False), centres, scales, local=local)
        ensemble = experiment.ensemble()
        state, regret, largest = ensemble.init(), [], 0.0
        for t in range(length):
            w = state["0"]["w"][0].numpy()
            slopes = [scales[s] ** 2 * (w - centres[s]) for s in range(t, max(t - size, -1), -1)]
            if t >= size:
                old = scales[t - size] ** 2 * (w - centres[t - size])
                mean = np.mean(slopes, axis=0)
                np.testing.assert_allclose(mean, (slopes[0] - old) / size, rtol=0, atol=1e-5)
                regret.append(float(mean @ mean))
                largest = max(largest, *(float(np.linalg.norm(s)) for s in (slopes[0], old)))
            state, _ = ensemble.learn(state, t, experiment.stream[t].train)
        assert sum(regret) <= 8 * len(regret) * largest**2 / size**2
        means.append(float(np.mean(regret)))
    assert means[0] > 2.5 * means[1]


# --- local optimisers, and the order of uplinks ----------------------------------------


ADAM = Local(epochs=3, batch_size=4, lr=0.02, lr_decay=0.5, optimiser="adam", beta1=0.8, beta2=0.95, weight_decay=0.03)


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("alternating", [False, True])
def test_adam_at_clients_is_that_of_pytorch_over_several_steps(compute: str, alternating: bool) -> None:
    """Fresh moments in every round, and bias corrections by the steps that a parameter has really taken."""
    federation, model = classes((11,)), tanh_net().double()
    arrays = federation.train.arrays
    slots: dict[str, Any] = {"personal": Alternating(0.4)} if alternating else {}
    result = go(Method("adam", (CrossEntropy(),), **slots), federation=federation, local=ADAM, rounds=2,
                compute=compute)  # fmt: skip
    for t in range(2):
        optimiser = torch.optim.Adam(
            model.parameters(), ADAM.rate(t), (ADAM.beta1, ADAM.beta2), eps=1e-8, weight_decay=ADAM.weight_decay
        )
        batches = ADAM.batches(federation.train.index[0], 0, t, 0)
        for number, rows in enumerate(batches):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(arrays.x[rows]), arrays.y[rows]).backward()
            for name, parameter in model.named_parameters():
                if alternating and name.startswith("head.") != (number < int(0.4 * len(batches))):
                    parameter.grad = None  # which stands still, and so do its moments
            optimiser.step()
    expected = {name: p.detach().ravel() for name, p in model.named_parameters()}
    body = torch.cat([p for name, p in expected.items() if not alternating or not name.startswith("head.")])
    np.testing.assert_allclose(theta(result), body.numpy(), rtol=0, atol=1e-12)
    if alternating:
        head = torch.cat([p for name, p in expected.items() if name.startswith("head.")])
        private = dict(leaves(result.snapshot))["client 0/personal/private"]
        np.testing.assert_allclose(private.numpy(), head.numpy(), rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Times(Uplink):
    """Clients send the update times a; the server divides."""

    a: float = 4.0

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        upload = message[UPDATE]
        return SendResult(ctx.state, message | {UPDATE: upload._replace(value=upload.value * self.a)}, {})

    def receive(self, state: Tree, received: Any, uploads: Tree, info: RoundInfo) -> tuple[Tree, dict[str, Tensor]]:
        return state, {UPDATE: received[UPDATE].value / self.a}


@dataclass(frozen=True)
class Plus(Uplink):
    """Clients send the update plus c; the server subtracts it."""

    c: float = 0.5

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        upload = message[UPDATE]
        return SendResult(ctx.state, message | {UPDATE: upload._replace(value=upload.value + self.c)}, {})

    def receive(self, state: Tree, received: Any, uploads: Tree, info: RoundInfo) -> tuple[Tree, dict[str, Tensor]]:
        return state, {UPDATE: received[UPDATE].value - self.c}


def test_the_server_undoes_last_what_a_client_did_first() -> None:
    """4x + ½, or 4(x + ½), is x again only in the opposite order."""
    plain = theta(go())
    for uplinks in ((Times(), Plus()), (Plus(), Times()), (Times(), Plus(), Times(0.5), Plus(-2.0))):
        model = theta(go(Method("both", (CrossEntropy(),), uplink=uplinks)))
        np.testing.assert_allclose(model, plain, rtol=0, atol=1e-12)
