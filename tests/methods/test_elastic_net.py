"""The elastic net's proximal step, derived independently in NumPy, and the problem that it must solve."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.networks import tanh_net
from helpers.reference import World, average
from helpers.runs import experiment, theta

from fedloom.base.errors import ConfigError
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models
from fedloom.parts.objectives import CrossEntropy, ElasticNet, Proximal
from fedloom.parts.personal import LocalOnly

LOCAL = Local(epochs=2, batch_size=4, lr=0.3, lr_decay=0.8, weight_decay=0.02)


def shrunk(v: np.ndarray, by: float) -> np.ndarray:
    return np.sign(v) * np.maximum(np.abs(v) - by, 0)


@pytest.mark.parametrize(("l1", "l2"), [(0.05, 0.0), (0.0, 0.4), (0.03, 0.2)])
def test_it_follows_its_equations(l1: float, l2: float) -> None:
    method = Method("elastic", (CrossEntropy(), ElasticNet(l1, l2)))
    setup = experiment(method, rounds=3, cohort=4, local=LOCAL, seed=7)
    start = np.concatenate([p.detach().double().numpy().ravel() for p in tanh_net().parameters()])
    world = World(setup.federation, start, 3, 3, 4, LOCAL, 7)
    at = world.start
    for t, rate, cohort in world.schedule():
        ends = {}
        for i in cohort:
            w = at.copy()
            for rows in LOCAL.batches(setup.federation.train.index[i], 7, t, i):
                w = w - rate * (world.gradient(w, rows) + LOCAL.weight_decay * w)
                w = shrunk(w, rate * l1) / (1 + rate * l2)
            ends[i] = w
        at = average(world, at, ends)
    np.testing.assert_allclose(theta(run(setup)), at, rtol=0, atol=1e-12)


def test_parameters_become_exactly_zero() -> None:
    """A subgradient step leaves them near zero; the proximal one does not, and more so the larger the weight."""
    federation = federate("digits", "iid", clients=4, seed=0)
    zeros = []
    for l1 in (0.0, 1e-3, 1e-2):
        result = run(Experiment(
            Method("elastic", (CrossEntropy(), ElasticNet(l1))), federation,
            lambda: models.make("logistic", classes=10, inputs=(1, 8, 8)), rounds=5,
            local=Local(epochs=1, batch_size=20, lr=0.1), evaluation=Evaluation(("global",)), seed=1,
        ))  # fmt: skip
        zeros.append(int((result.snapshot.server.theta == 0).sum()))
    assert zeros[0] < zeros[1] < zeros[2]
    assert zeros[2] > 100


@pytest.mark.parametrize("term", [ElasticNet(), Proximal()], ids=["elastic_net", "proximal"])
def test_a_penalty_that_would_have_no_effect_is_refused(term: Term) -> None:
    with pytest.raises(ConfigError, match="works on shared parameters, but personal 'local_only' shares none"):
        Method("m", (CrossEntropy(), term), personal=LocalOnly())
