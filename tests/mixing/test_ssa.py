"""FedSSA and related methods: the loss and its gradient, laws of the decision, what reaches the server, the cost."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import target
from helpers.federations import SIZES, classes
from helpers.rounds import round_info
from helpers.runs import assert_same_state, experiment, go, theta

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Unlabelled
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.server_data import ServerData
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.experiment.setup import make_plan, make_server_data
from fedloom.methods import fedavg, feddf, fedssa, make
from fedloom.parts.mixing import Confidence, SelfSupervised, Similarity, Uniform
from fedloom.parts.mixing.ssa import ssa_loss
from fedloom.parts.objectives import CrossEntropy
from fedloom_apps.customise.ensemble import after_training

METHODS = ("fedssa", "fedssa_similarity", "fedssa_confidence", "feddf")
UNIFORM = Method("uniform", (CrossEntropy(),), mixing=Uniform())


def logits(seed: int = 0, samples: int = 9, models: int = 4, labels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    first = 3 * draw.normal(size=(samples, models, labels))
    return torch.tensor(first), torch.tensor(first + 0.7 * draw.normal(size=first.shape))


def cohort(seed: int = 0, models: int = 4, **settings: Any) -> RoundInfo:
    """Models at random around a point, at a server with 20 inputs."""
    conditions = experiment(fedssa(**settings), seed=seed)
    plan = make_plan(conditions, conditions.federation, "cpu")
    draw = np.random.default_rng(seed)
    updates = [torch.tensor(draw.normal(size=plan.layout.size)) for _ in range(models)]
    server_data = make_server_data(conditions, plan, conditions.federation)
    return round_info(
        SIZES[:models], clients=len(SIZES), updates=updates, buffers=[plan.buffers0] * models, received=plan.theta0,
        t=2, server_data=server_data,
    )  # fmt: skip


def p_of(policy: Any, of: RoundInfo) -> np.ndarray:
    state, p = policy.coefficients({}, of)
    assert state == {}
    return p


POLICIES = {
    "ssa": SelfSupervised(variance=1.0, optimiser="adam", lr=0.2, batch_size=7, steps=12, draws=2, feed_back=True),
    "confident": SelfSupervised(optimiser="adam", lr=1.0, steps=10, feed_back=True),
    "huge steps": SelfSupervised(variance=1.0, optimiser="adam", lr=100.0, steps=10, feed_back=True),
    "descent": SelfSupervised(lr=3.0, steps=10, feed_back=True),
    "similarity": Similarity(),
    "confidence": Confidence(),
}


@pytest.mark.parametrize(("variance", "entropy"), [(0.0, 0.0), (1.0, 1e-3), (10.0, 0.0), (0.0, 2.0), (3.0, 0.5)])
def test_slope_of_the_loss_by_hand_by_autograd_and_by_differences(variance: float, entropy: float) -> None:
    first, second = logits()
    for seed in range(5):
        a = torch.tensor(np.random.default_rng(seed).normal(size=4), requires_grad=True)
        ssa_loss(a, first, second, variance, entropy).mean().backward()
        assert a.grad is not None
        by_hand = target.ssa_gradient(a.detach().numpy(), first.numpy(), second.numpy(), variance, entropy)
        np.testing.assert_allclose(a.grad.numpy(), by_hand, atol=1e-14)
        with torch.no_grad():
            ends = [
                [float(ssa_loss(a + s * 1e-6 * e, first, second, variance, entropy).mean()) for s in (1, -1)]
                for e in torch.eye(4, dtype=torch.float64)
            ]
        np.testing.assert_allclose(by_hand, [(up - down) / 2e-6 for up, down in ends], atol=1e-8)


def test_loss_of_predictions_known_by_heart() -> None:
    """Two certain models of two classes: alone they agree with themselves, halves of both know nothing."""
    sure = torch.tensor([[[50.0, -50.0], [-50.0, 50.0]]], dtype=torch.float64)
    only, both = torch.tensor([40.0, -40.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    assert ssa_loss(only, sure, sure, entropy=1.0).item() == pytest.approx(-1 - 0.25)  # var of (1, 0) is 1/4
    assert ssa_loss(both, sure, sure, entropy=1.0).item() == pytest.approx(-1 - np.log(2))
    assert ssa_loss(only, sure, sure.flip(-1), entropy=1.0).item() == pytest.approx(-0.25)  # at right angles


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_p_is_on_the_simplex_and_follows_its_clients(policy: Any) -> None:
    of = cohort()
    p = p_of(policy, of)
    assert (p >= 0).all()
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert np.ptp(p) > 1e-3, "all clients look alike to it"
    order = np.array([2, 0, 3, 1])
    swapped = replace(of, cohort=of.cohort[order], samples=of.samples[order], updates=[of.updates[i] for i in order])
    np.testing.assert_allclose(p_of(policy, swapped), p[order], rtol=0, atol=1e-9)
    np.testing.assert_array_equal(p_of(policy, of), p)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_equal_models_get_equal_shares(policy: Any) -> None:
    of = cohort()
    same = replace(of, updates=[of.updates[0]] * 4)
    # a mixture of equal models has no slope but for rounding, which Adam's first steps would blow up without entropy
    policy = replace(policy, entropy=1.0) if isinstance(policy, SelfSupervised) else policy
    np.testing.assert_allclose(p_of(policy, same), 0.25, atol=1e-9)


def test_entropy_alone_leads_to_equal_shares_from_anywhere() -> None:
    z = torch.zeros(5, 4, 3, dtype=torch.float64)  # nobody says anything: cosine and variance have no slope
    start = torch.tensor([2.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    far = SelfSupervised(optimiser="adam", variance=0.0, entropy=1.0, lr=0.05).learnt(start, [(z, z)] * 10)
    near = SelfSupervised(optimiser="adam", variance=0.0, entropy=1.0, lr=0.05).learnt(start, [(z, z)] * 800)
    assert np.ptp(far.numpy()) > 0.3
    np.testing.assert_allclose(near.numpy(), 0.25, atol=1e-6)
    without = SelfSupervised(optimiser="adam", variance=0.0, entropy=0.0).learnt(start, [(z, z)] * 50)
    np.testing.assert_allclose(without.numpy(), torch.softmax(start, 0).numpy(), atol=1e-6)


def test_decision_is_the_one_of_the_derivation() -> None:
    """The same logits, the same steps: p after five epochs of Adam in NumPy."""
    first, second = logits(3)
    policy = SelfSupervised(optimiser="adam", variance=2.0, entropy=0.1, lr=0.1)
    a, adam = np.zeros(4), target.Adam(0.1)
    for _ in range(5):
        a = a - adam.step(target.ssa_gradient(a, first.numpy(), second.numpy(), 2.0, 0.1))
    learnt = policy.learnt(torch.zeros(4, dtype=torch.float64), [(first, second)] * 5)
    np.testing.assert_allclose(learnt.numpy(), target.softmax(a), atol=1e-12)


def test_descent_is_the_one_of_the_derivation() -> None:
    first, second = logits(3)
    policy, a = SelfSupervised(optimiser="sgd", variance=2.0, entropy=0.1, lr=0.7), np.zeros(4)
    for _ in range(5):
        a = a - 0.7 * target.ssa_gradient(a, first.numpy(), second.numpy(), 2.0, 0.1)
    learnt = policy.learnt(torch.zeros(4, dtype=torch.float64), [(first, second)] * 5)
    np.testing.assert_allclose(learnt.numpy(), target.softmax(a), atol=1e-14)


def test_p_does_not_depend_on_how_often_the_same_inputs_are_given() -> None:
    """Steps, not passes: inputs that come five times are as many steps as those that come once."""
    of = cohort()
    data = of.server_data
    assert data is not None
    once, five = (
        replace(of, server_data=replace(data, inputs=data.inputs[:1].expand(n, -1, -1, -1), change=lambda x, _: x))
        for n in (8, 40)
    )
    policy = SelfSupervised(variance=1.0, optimiser="adam", lr=0.1, steps=30, batch_size=8, feed_back=True)
    np.testing.assert_allclose(p_of(policy, once), p_of(policy, five), atol=1e-9)
    assert np.ptp(p_of(policy, once)) > 0.05


def test_the_mean_of_fedavg_until_the_mixture_is_learnt() -> None:
    settings = {"cohort": 4, "rounds": 3, "drop_rate": 0.1, "seed": 3}
    plain = theta(go(fedavg(), **settings))
    longer = [go(method, **settings | {"rounds": 4}).history for method in (fedavg(), fedssa(feed_back=True, start=3))]
    fedavg_losses, fedssa_losses = ([record["train/loss"] for record in history] for history in longer)
    assert fedavg_losses == fedssa_losses, "local work of the fourth round begins at FedAvg's model"
    last = theta(go(fedssa(feed_back=True, start=2, lr=0.2, steps=10), **settings))
    np.testing.assert_allclose(last, theta(go(fedssa(lr=0.2, steps=10), **settings)), rtol=0, atol=1e-12)
    assert np.abs(last - plain).max() > 1e-3


def test_a_start_that_no_round_follows_is_refused() -> None:
    with pytest.raises(ConfigError, match="learnt from round 3 on, counted from 0, but there are 3 rounds"):
        go(fedssa(feed_back=True, start=3), rounds=3)


def test_the_least_loss_that_is_known() -> None:
    """One model knows every input; each of the others is right on one view and wrong on the other.

    Without entropy the least loss is p = (1, 0, 0), with -1 - the variance of its prediction; with λ_we → ∞ p = 1/3.
    """
    eye = 2 * torch.eye(3, dtype=torch.float64)
    first = torch.stack([eye, eye, eye[[1, 2, 0]]], 1)
    second = torch.stack([eye, eye[[1, 2, 0]], eye], 1)
    least = -1 - float(torch.softmax(eye[0], 0).var(correction=0))
    for optimiser, lr in (("adam", 0.1), ("sgd", 30.0)):
        policy = SelfSupervised(variance=1.0, optimiser=optimiser, entropy=0.0, lr=lr)  # pyright: ignore[reportArgumentType]
        p = policy.learnt(torch.zeros(3, dtype=torch.float64), [(first, second)] * 300)
        assert p[0] > 0.99, optimiser
        assert float(ssa_loss(p.log(), first, second, entropy=0.0).mean()) == pytest.approx(least, abs=2e-3)
        many = replace(policy, entropy=1e6, lr=lr if optimiser == "adam" else 1e-6)
        equal = many.learnt(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), [(first, second)] * 300)
        np.testing.assert_allclose(equal.numpy(), 1 / 3, atol=1e-3)


def test_a_model_that_knows_the_inputs_gets_the_largest_share() -> None:
    """Three models of noise, and one that says the same, surely, of both views."""
    draw = np.random.default_rng(5)
    first, second = (torch.tensor(draw.normal(size=(40, 4, 3))) for _ in range(2))
    first[:, 2] = second[:, 2] = torch.eye(3, dtype=torch.float64)[torch.arange(40) % 3] * 6
    p = SelfSupervised(variance=1.0, optimiser="adam", lr=0.1).learnt(
        torch.zeros(4, dtype=torch.float64), [(first, second)] * 50
    )
    assert p.argmax() == 2
    assert p[2] > 0.6


def test_fedssa_that_does_not_learn_is_uniform_fedavg() -> None:
    settings = {"cohort": 4, "rounds": 4, "drop_rate": 0.1, "seed": 3}
    frozen, uniform = go(fedssa(lr=1e-300, steps=2, feed_back=True), **settings), go(UNIFORM, **settings)
    np.testing.assert_allclose(theta(frozen), theta(uniform), rtol=0, atol=1e-12)
    assert np.abs(theta(go(fedssa(lr=0.2, steps=10, feed_back=True), **settings)) - theta(uniform)).max() > 1e-3


def test_feddf_without_steps_is_fedavg() -> None:
    settings = {"cohort": 4, "rounds": 4, "drop_rate": 0.1, "seed": 3}
    np.testing.assert_array_equal(theta(go(feddf(steps=0), **settings)), theta(go(fedavg(), **settings)))
    assert np.abs(theta(go(feddf(), **settings)) - theta(go(fedavg(), **settings))).max() > 1e-3


def test_feddf_comes_nearer_to_the_ensemble() -> None:
    """On its inputs, the distilled model says what the client models say on average, better than their mean does."""
    far = []
    for steps in (0, 300):
        of = cohort(seed=1)
        mean = of.models().mean(0)
        data = of.server_data
        assert data is not None
        part = make("feddf", steps=steps, lr=0.05, batch_size=8).server
        _, distilled = part.refine({}, mean, of.buffers[0], of)
        ensemble = torch.stack([data.logits(m, of.buffers[0], data.inputs) for m in of.models()]).mean(0)
        student = data.logits(distilled, of.buffers[0], data.inputs)
        q = torch.softmax(ensemble, -1)
        far.append(float((q * (q.log() - torch.log_softmax(student, -1))).sum(-1).mean()))
    assert far[1] < 0.2 * far[0]


@pytest.mark.parametrize("name", METHODS)
def test_labels_of_the_target_never_reach_the_server(name: str) -> None:
    federation = classes()
    wrong = replace(federation.test, y=federation.test.y.roll(1))
    poisoned = replace(federation, test=wrong, held_out=replace(federation.held_out, arrays=wrong))
    clean, dirty = (go(name, federation=f, cohort=4, seed=5) for f in (federation, poisoned))
    assert_same_state(clean.snapshot, dirty.snapshot)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_model_whose_logits_overflow_counts_nothing(policy: Any) -> None:
    of = cohort()
    sick = torch.full_like(of.updates[1], 1e308)
    p = p_of(policy, replace(of, updates=[of.updates[0], sick, *of.updates[2:]]))
    assert p[1] == 0
    rest = replace(of, cohort=of.cohort[[0, 2, 3]], samples=of.samples[[0, 2, 3]],
                   updates=[of.updates[i] for i in (0, 2, 3)], buffers=of.buffers[:3])  # fmt: skip
    np.testing.assert_allclose(p[[0, 2, 3]], p_of(policy, rest), atol=1e-9)
    nobody = p_of(policy, replace(of, updates=[sick] * 4))
    np.testing.assert_allclose(nobody, of.samples / of.samples.sum())


@pytest.mark.parametrize("draws", [1, 3])
def test_networks_run_forward_draws_times_two_views(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = ServerData.logits
    monkeypatch.setattr(ServerData, "logits", lambda self, s, b, x: (sizes.append(len(x)), plain(self, s, b, x))[1])
    of = cohort()
    p_of(SelfSupervised(steps=28, batch_size=4, draws=draws, feed_back=True), of)
    assert sum(sizes) == draws * 2 * 4 * 20


def test_views_are_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many inputs there are, no more than a chunk of views is held; the decision sees all of them."""
    of = cohort()
    assert of.server_data is not None
    sizes = []
    plain = ServerData.views
    monkeypatch.setattr("fedloom.core.server_data.CHUNK", 6)
    monkeypatch.setattr(ServerData, "views", lambda self, x, *c: (sizes.append(len(x)), plain(self, x, *c))[1])
    p_of(SelfSupervised(steps=10, feed_back=True), of)
    assert sizes == [6, 6, 6, 2]


def test_a_read_out_that_is_one_client_is_told() -> None:
    """The same weights in a loop, or an even mixture, are not."""
    of = cohort()
    alone = SelfSupervised(optimiser="adam", lr=1.0, steps=50)
    of = replace(of, t=2, facts=of.facts._replace(rounds=3))
    with pytest.warns(UserWarning, match=r"^FedSSA gives client \d+ \d+% of the weight\."):
        assert p_of(alone, of).max() > 0.9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert p_of(replace(alone, feed_back=True), of).max() > 0.9
        assert p_of(SelfSupervised(steps=10), of).max() < 0.9


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="start has an effect only if mixtures are fed back"):
        fedssa(start=1)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_needed_is_asked_for_before_training(name: str) -> None:
    with pytest.raises(ConfigError, match="unlabelled inputs of a target distribution"):
        experiment(name, federation=replace(classes(), unlabelled=None))
    if make(name).needs("views"):
        with pytest.raises(ConfigError, match="compares two views"):
            experiment(name, views=())


@pytest.mark.parametrize("parts", [{"mixing": SelfSupervised(lr=0.2, steps=10)}, {"server": feddf(lr=0.05).server}])
def test_it_combines_with_drift_correction(parts: dict[str, Any]) -> None:
    combined = replace(make("feddyn", alpha=0.3), **parts)
    assert np.abs(theta(go(combined)) - theta(go(make("feddyn", alpha=0.3)))).max() > 1e-3


def test_an_unlabelled_input_alone_is_enough() -> None:
    federation = classes()
    assert federation.unlabelled is not None
    single_input = replace(federation, unlabelled=Unlabelled(federation.unlabelled.x[:1]))
    for name in METHODS:
        assert np.isfinite(theta(go(name, federation=single_input))).all()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.exhaustive
def test_on_real_digits_the_client_with_the_targets_labels_counts_most(seed: int) -> None:
    """NIID-1: five clients, each with two digits; the target has the first client's two."""
    federation = fl.data.federate("digits", "niid1", clients=5, seed=seed, held_out=0.0, target="skew")
    conditions = {
        "federation": federation, "model": lambda: fl.models.make("mlp", classes=10, inputs=(1, 8, 8)),
        "rounds": 4, "local": Local(epochs=5, batch_size=16, lr=0.1), "views": ("blur",), "seed": seed,
        "evaluation": Evaluation(what=("global", "average")), "dtype": "float32",
    }  # fmt: skip
    setup = experiment(fedssa(optimiser="adam", lr=0.02, steps=60, feed_back=True), **conditions)
    learnt, plain = run(setup), go("fedavg", **conditions)
    p = after_training(setup, learnt, setup.method.mixing).p
    assert p.argmax() == 0
    assert p[0] > 0.3
    ssa_accuracy, fedavg_accuracy = (result.history[-1]["global/accuracy"] for result in (learnt, plain))
    assert ssa_accuracy > max(0.9, fedavg_accuracy + 0.05)
    # and on the client models of FedAvg, after training
    mixture = after_training(replace(setup, method=fedavg()), plain, setup.method.mixing)
    assert mixture.p.argmax() == 0
    assert mixture.accuracy > mixture.before
