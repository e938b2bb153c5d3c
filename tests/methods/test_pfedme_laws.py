"""pFedMe: its outer step is a gradient step on the Moreau envelope, and a visit depends only on the received model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.marks import kinds
from helpers.nested import flat
from helpers.networks import tanh_net
from helpers.quadratics import Track, quadratics
from helpers.reference import World
from helpers.runs import experiment, go, leaves, theta
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.core.context import Batch, Context, Output
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.experiment.federated import FederatedTask, run
from fedloom.methods import make
from fedloom.parts.objectives import CrossEntropy, SquaredError
from fedloom.parts.personal import PFedMe

HEAVY = Local(epochs=2, batch_size=4, lr=0.2, momentum=0.8)


@dataclass(frozen=True)
class Flat(Term):
    """A loss that is the same everywhere."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return 0 * out.logits.sum(1)


@pytest.mark.parametrize("engine", kinds(["serial", "processes"], ["serial"]))
def test_where_the_loss_is_constant_returning_clients_change_nothing(engine: str) -> None:
    """Though the server's model has moved since their last visit, here by half of the clients with a loss."""

    @dataclass(frozen=True)
    class Half(Term):
        def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
            return CrossEntropy().loss(out, batch, ctx) * float(ctx.round == 1)

    for term, moves in ((Flat(), False), (Half(), True)):
        method = Method("m", (term,), personal=PFedMe(3.0))
        track = Track()
        run(experiment(method, local=HEAVY, rounds=4, cohort=4, seed=3, engine=engine), callbacks=(track,))
        moved = [not np.array_equal(*ends) for ends in pairwise(track.theta)]
        assert moved == [moves, False, False]


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_a_visit_does_not_depend_on_the_model_that_was_kept(compute: str) -> None:
    """A second round from stored models that were tampered with ends where it would have ended."""
    ends = []
    for shift in (0.0, 10.0):
        task = FederatedTask(experiment(make("pfedme", lam=3.0), local=HEAVY, compute=compute))
        task.open()
        task.commit(task.step())
        for _, state in task.state.store:
            state["personal"]["private"] += shift
        task.commit(task.step())
        ends.append(task.state.server.theta)
        task.close()
    assert torch.equal(*ends)


def test_the_outer_step_is_a_gradient_step_on_the_moreau_envelope() -> None:
    """With inner problems solved: w ← w - η∇M(w), ∇M(w) = λ(w - prox(w)), prox(w) = (A + λI)⁻¹(b + λw)."""
    problem, lam, rate, beta, steps = quadratics(), 2.0, 0.3, 0.6, 3
    method = replace(
        make("pfedme", beta=beta), objective=(SquaredError(),), personal=PFedMe(lam, steps=50, personal_lr=0.4)
    )
    result = problem.run(method, 2, Local(steps=steps, batch_size=0, lr=rate, momentum=0.9))
    p, at = problem.n / problem.n.sum(), np.zeros(len(problem.b[0]))
    for _ in range(2):
        ends = []
        for a, b in zip(problem.a, problem.b, strict=True):
            w = at
            for _ in range(steps):
                solution = np.linalg.solve(a + lam * np.eye(len(b)), b + lam * w)
                w = w - rate * lam * (w - solution)
            ends.append(w)
        at = (1 - beta) * at + beta * p @ np.array(ends)
    np.testing.assert_allclose(theta(result), at, rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ["gradient of h", "gradient of F"])
def test_what_is_clipped_is_the_gradient_of_the_inner_problem(part: str) -> None:
    """∇F(v) + λ(v - w) as a whole, before weight decay; with only ∇F clipped, v and w would end elsewhere."""
    lam, rate, local = 3.0, 0.09, replace(HEAVY, lr=0.1, weight_decay=0.03, clip=0.3)
    initial = flat(tanh_net())
    world = World(classes(), initial, 3, 1, 6, local, 5)

    def clipped(g: np.ndarray) -> np.ndarray:
        return g * min(1.0, 0.3 / (np.linalg.norm(g) + 1e-6))

    ends, private = [], {}
    for i in range(world.clients):
        w = v = initial
        for rows in local.batches(world.federation.train.index[i], world.seed, 0, i):
            for _ in range(5):
                g, pull = world.gradient(v, rows), lam * (v - w)
                g = clipped(g + pull) if part == "gradient of h" else clipped(g) + pull
                v = v - rate * (g + local.weight_decay * v)
            w = w - local.lr * lam * (w - v)
        ends.append(w)
        private[i] = v
    result = go(make("pfedme", lam=lam, personal_lr=rate), rounds=1, seed=world.seed, local=local)
    errors = [np.abs(theta(result) - world.n @ np.array(ends) / world.n.sum()).max()]
    errors += [np.abs(state["personal"]["private"].numpy() - private[i]).max() for i, state in result.snapshot.store]
    assert max(errors) < 1e-12 if part == "gradient of h" else min(errors) > 1e-3


def test_momentum_changes_nothing() -> None:
    plain = replace(HEAVY, momentum=0.0)
    adam = replace(plain, optimiser="adam")
    ends = [dict(leaves(go(make("pfedme", lam=3.0), local=local).snapshot)) for local in (HEAVY, plain, adam)]
    for other in ends[1:]:
        assert all(np.array_equal(value, other[key]) for key, value in ends[0].items())


def test_rates_at_which_a_loop_cannot_converge_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"personal_lr is 0\.2, but with lam 15 steps of 0\.133 or more diverge"):
        make("pfedme", personal_lr=0.2)
    with pytest.raises(ConfigError, match=r"the local learning rate is 0\.2, but with lam 15"):
        FederatedTask(experiment(make("pfedme"), local=Local(lr=0.2), federation=classes()))
