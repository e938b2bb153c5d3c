"""Methods with a private model at each client: what they reduce to, what stays private, and what is deployed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import BodyAndHead
from helpers.runs import go, theta
from torch import Tensor, nn

from fedloom.api import run
from fedloom.core.context import NO_ROUND, Context
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Use
from fedloom.core.views import SharedPrivate, StepInfo, View
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.methods import make
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import APFL, Alternating, Ditto, PFedMe, Subspace
from fedloom.rounds.client import private_start
from fedloom.rounds.exchange import Broadcast
from fedloom.rounds.plan import ClientPlan

PAIRED = ["ditto", "pfedme", "apfl", "superfed_mm", "superfed_lm"]
LOCAL = Local(epochs=2, batch_size=4, lr=0.2, momentum=0.8, weight_decay=0.01, clip=0.9)


def random_net() -> nn.Module:
    """A net that PyTorch initialises as it likes."""
    return BodyAndHead(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), 3)


def same(a: Method | str, b: Method | str, **changes: Any) -> None:
    changes = {"local": LOCAL, "cohort": 4, "rounds": 4, "seed": 3} | changes
    assert np.array_equal(theta(go(a, **changes)), theta(go(b, **changes)))


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_the_shared_model_of_ditto_and_apfl_is_that_of_fedavg(engine: str) -> None:
    """Bit for bit: what the private model does is seen by nobody else."""
    for method in ("ditto", make("apfl", alpha=0.7), make("apfl", learn=True)):
        same(method, "fedavg", engine=engine)


def test_superfed_before_its_start_is_fedprox() -> None:
    same(make("superfed_mm", mu=0.0, start_round=100), "fedavg")
    near = theta(go(make("superfed_lm", mu=0.3, start_round=100), local=LOCAL))
    np.testing.assert_allclose(near, theta(go(make("fedprox", mu=0.3), local=LOCAL)), atol=1e-12)


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_superfed_starts_from_models_of_zeros_as_without_its_angle(compute: str) -> None:
    """A logistic regression starts at zero, where no angle is defined: one step is that of ν = 0."""
    federation = federate("digits", "iid", clients=3)
    conditions = {"rounds": 1, "local": Local(steps=1, batch_size=20), "compute": compute, "engine": "serial"}
    with_angle, without = (
        run(make("superfed_mm", nu=nu, start_round=0), federation, "logistic", **conditions) for nu in (1.0, 0.0)
    )
    assert not with_angle.failures
    assert torch.equal(with_angle.snapshot.server.theta, without.snapshot.server.theta)
    assert with_angle.snapshot.server.theta.any()


def test_superfed_at_lambda_zero_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ClientPlan, "draws", lambda self, round, client, steps: np.zeros((steps, len(self.layout.layers)))
    )
    for layers in (False, True):
        method = Method("a", (CrossEntropy(),), personal=Subspace(layers, mu=0.0, nu=0.0))
        same(method, "fedavg", local=Local(epochs=2, batch_size=4, lr=0.2, momentum=0.8, weight_decay=0.01))


def test_head_first_with_one_half_only_trains_that_half() -> None:
    """All steps for the head leave the shared body where it was; none for it leave the head there."""
    start = theta(go("fedavg", rounds=1, local=Local(lr=1e-300)))
    only_head = go(make("fedrep", head_fraction=1.0), local=LOCAL)
    assert np.array_equal(theta(only_head), start[: len(theta(only_head))])
    only_body = go(make("fedrep", head_fraction=0.0), local=LOCAL)
    assert not np.array_equal(theta(only_body), start[: len(theta(only_body))])
    for _, state in only_body.snapshot.store:
        assert np.array_equal(state["personal"]["private"].numpy(), start[len(theta(only_body)) :])


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_adam_corrects_the_moments_of_each_half_by_its_own_steps(compute: str) -> None:
    """Adam's first step has the length η in every coordinate; the body takes its first one after the head's three."""
    local = Local(steps=4, batch_size=8, lr=0.01, optimiser="adam")
    federation = classes(sizes=(8,))
    start = theta(go("fedavg", federation=federation, rounds=1, local=Local(lr=1e-300)))
    after = theta(go(make("fedrep", head_fraction=0.75), federation=federation, rounds=1, local=local, compute=compute))
    np.testing.assert_allclose(np.abs(after - start[: len(after)]), 0.01, rtol=1e-4)


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_heads_and_bodies_are_trained_however_few_steps_there_are(compute: str) -> None:
    federation = classes(sizes=(8, 8))
    for fraction in (0.05, 0.5, 0.95):
        for steps in (1, 2, 5):
            method = make("fedrep", head_fraction=fraction)
            local = Local(steps=steps, batch_size=8, lr=0.3)
            result = go(method, federation=federation, rounds=1, local=local, compute=compute)
            start = go(method, federation=federation, rounds=1, local=replace(local, lr=1e-300), compute=compute)
            assert not np.allclose(theta(result), theta(start)), "the body is as it was"
            heads = [[state["personal"]["private"] for _, state in end.snapshot.store] for end in (result, start)]
            assert not any(torch.allclose(*pair) for pair in zip(*heads, strict=True)), "a head is as it was"


def context(received: Tensor) -> Context:
    return NO_ROUND._replace(received=received, round=5)


@pytest.mark.parametrize("nu", [0.0, 0.7])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_superfed_follows_the_gradient_of_its_whole_objective(mu: float, nu: float) -> None:
    """Both regularisers against automatic differentiation, through the squared cosine too, and for both models."""
    draw = torch.Generator().manual_seed(0)
    w, v, received, target = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(4))
    at = 0.3
    w.requires_grad_(), v.requires_grad_()
    mixed = (1 - at) * w + at * v
    cosine = torch.dot(w, v) / (w.norm() * v.norm())
    value = (mixed - target).pow(3).sum() + mu / 2 * (w - received).pow(2).sum() + nu * cosine**2
    expected = torch.autograd.grad(value, (w, v))
    with torch.no_grad():
        task = 3 * (mixed - target).pow(2)
        pair = SharedPrivate(w, v, torch.zeros(0), task)
        reg = Subspace(mu=mu, nu=nu).regulariser_grad(View(at), pair, context(received))
        of_w = sum(a * x for a, x in zip(reg.w, (w, v, received), strict=True))
        of_v = sum(a * x for a, x in zip(reg.v, (v, w, received), strict=True))
        gradients = (1 - at) * task + of_w, at * task + of_v
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def test_layer_mixing_draws_one_number_a_layer_and_model_mixing_one() -> None:
    plan = ClientPlan.of(random_net(), make("superfed_lm"), classes().train, LOCAL)
    draws = plan.draws(0, 1, 3)
    assert draws.shape == (3, 2)
    assert np.array_equal(plan.draws(0, 1, 5)[:3], draws), "more steps must not change the first ones"
    assert plan.layout.layers == (15, 12)
    moment = StepInfo(0, 2, draws[2].tolist())
    (view,) = Subspace(layers=True).views(moment, torch.zeros(0), context(torch.zeros(27)))
    assert view.at == draws[2].tolist()
    (view,) = Subspace().views(moment, torch.zeros(0), context(torch.zeros(27)))
    assert view.at == draws[2, 0]


def test_local_models_of_superfed_start_apart_from_each_other_and_from_the_shared_one() -> None:
    plan = ClientPlan.of(random_net(), make("superfed_mm"), classes().train, LOCAL)
    object.__setattr__(plan, "make", random_net)
    received = torch.ones(plan.layout.size)
    starts = [private_start(plan, Broadcast(0, 0.1, received, plan.buffers0, {}), client, {}) for client in (0, 1, 0)]
    assert not torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], plan.theta0)
    for part in (Ditto(), APFL(), PFedMe()):
        other = ClientPlan.of(random_net(), Method("a", (CrossEntropy(),), personal=part), classes().train, LOCAL)
        assert torch.equal(private_start(other, Broadcast(0, 0.1, received, other.buffers0, {}), 0, {}), received)


@pytest.mark.parametrize("name", [*PAIRED, "fedrep"])
def test_private_models_never_travel(name: str) -> None:
    """A round moves what FedAvg moves (FedRep: the body alone), whatever stays at the clients."""
    record = go(name, local=LOCAL, cohort=4, rounds=1).history[0]
    size = 15 if name == "fedrep" else 27
    assert record["comm/up_params"] == record["comm/down_params"] == 4 * size


@pytest.mark.parametrize("name", PAIRED)
def test_what_is_deployed(name: str) -> None:
    """Clients that took part deploy a mixture, the others the shared model; records of SuPerFed tell λ."""
    result = go(
        name, local=LOCAL, cohort=2, rounds=2, seed=5, evaluation=Evaluation(what=("clients",), metrics=("accuracy",))
    )
    participants = {client for client, _ in result.snapshot.store}
    assert 0 < len(participants) < 6
    for client in range(6):
        deployed_model = torch.cat([p.detach().flatten() for p in result.trained.client(client).module.parameters()])
        assert torch.equal(deployed_model, result.snapshot.server.theta) == (client not in participants)
    record = result.history[-1]
    assert 0 <= record["clients/accuracy/mean"] <= 1
    if name.startswith("superfed"):
        assert {"lambda/0/accuracy/mean", "lambda/1/accuracy/mean", "as_published/accuracy/mean"} <= record.keys()
        assert record["as_published/accuracy/mean"] >= record["lambda/0.5/accuracy/mean"]
    else:
        assert not any(key.startswith("lambda") for key in record)


def test_the_learned_mixture_moves_and_stays_between_zero_and_one() -> None:
    result = go(make("apfl", learn=True), local=Local(epochs=3, batch_size=4, lr=0.05), rounds=4)
    learned = [float(state["personal"]["private"][-1]) for _, state in result.snapshot.store]
    assert all(0 <= a <= 1 for a in learned)
    assert len({round(a, 6) for a in learned}) > 1


def test_pairs_combine_with_drift_correction() -> None:
    """FedDyn under SuperFed: the shared path differs from either alone, and engines agree."""
    combined = Method("both", (CrossEntropy(),), FedDynDrift(0.3), Subspace(mu=0.0, nu=0.5))
    thetas = {engine: theta(go(combined, local=LOCAL, engine=engine, cohort=4)) for engine in ("serial", "processes")}
    np.testing.assert_array_equal(thetas["serial"], thetas["processes"])
    for other in (make("feddyn", alpha=0.3), make("superfed_mm", mu=0.0, nu=0.5)):
        assert np.abs(thetas["serial"] - theta(go(other, local=LOCAL, cohort=4))).max() > 1e-6


def test_validation_chooses_the_mixture() -> None:
    """With validation samples the deployed λ is each client's best there, not the best on its test samples."""
    federation = classes()
    federation = type(federation)(
        federation.train, federation.held_out, federation.held_out, federation.test, federation.names
    )
    on = {"federation": federation, "local": LOCAL, "rounds": 2, "evaluation": Evaluation(what=("clients",))}
    record = go(make("superfed_mm", min_validation=2), **on).history[-1]
    # Here the validation samples are the test samples, so that both choices agree.
    assert record["clients/accuracy/mean"] == record["as_published/accuracy/mean"]
    record = go(make("superfed_mm", min_validation=3), **on).history[-1]
    assert record["clients/accuracy/mean"] == record["lambda/0.5/accuracy/mean"]


def test_a_client_whose_own_model_was_never_trained_deploys_the_shared_one() -> None:
    """It took part before L alone, so that it keeps nothing; what it would have started from is drawn again later."""
    method, on = make("superfed_mm", start_round=3), Evaluation(what=("global", "clients"))
    early = go(method, rounds=3, local=LOCAL, cohort=4, evaluation=on, seed=3)
    assert all("personal" not in state for _, state in early.snapshot.store)
    late = go(method, rounds=4, local=LOCAL, cohort=4, evaluation=on, seed=3)
    clients = {client for client, state in late.snapshot.store if "personal" in state}
    assert len(clients) == 4
    assert "lambda/0.5/accuracy/mean" in early.history[0]
    assert method.personal.uses(0, lambda: None, 9) == make("apfl").personal.uses(0, lambda: None, 9) == (Use(lam=0.0),)
    everyone = go(make("superfed_mm", start_round=3), rounds=3, local=LOCAL, evaluation=on).history[-1]
    shared = go(make("fedprox", mu=0.01), rounds=3, local=LOCAL, evaluation=on).history[-1]
    assert everyone["clients/loss/mean"] == pytest.approx(shared["clients/loss/mean"], abs=1e-12)


def test_the_grid_is_the_papers() -> None:
    assert np.allclose([use.lam for use in make("superfed_mm").choices], np.arange(11) / 10)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda: Subspace(nu=-1), "at least 0"),
        (lambda: APFL(1.5), "[0, 1]"),
        (lambda: Ditto(float("inf")), "finite"),
        (lambda: PFedMe(0.0), "greater than 0"),
        (lambda: Alternating(2.0), "[0, 1]"),
    ],
)
def test_settings_outside_their_range_are_refused(part: Any, words: str) -> None:
    with pytest.raises(ValueError, match="personal") as error:
        part()
    assert words in str(error.value)
