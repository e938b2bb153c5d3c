"""Laws of the stronger local losses: reductions, gradients by hand, invariants, and every engine."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import Shaken, as_images, classes
from helpers.networks import BodyAndHead as Net
from helpers.networks import Flattening, fixed, tanh_net, teacher_net
from helpers.runs import assert_same_run, experiment, go, leaves, theta
from torch import nn

from fedloom import methods
from fedloom.base.errors import ConfigError
from fedloom.compute.live import Live
from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.engines import Serial
from fedloom.experiment.federated import run
from fedloom.parts.adaptation import Prototypes
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.mixing import QFFL, Uniform
from fedloom.parts.objectives import (
    Contrastive,
    CrossEntropy,
    Distillation,
    NotTrueDistillation,
    Robustness,
    divergence,
)
from fedloom.parts.personal import Ditto, PrivateHead
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server

HARD = Local(epochs=2, batch_size=4, lr=0.3, lr_decay=0.9, weight_decay=0.02, clip=0.9)
CONDITIONS: dict[str, Any] = {"cohort": 4, "rounds": 4, "drop_rate": 0.1, "local": HARD, "seed": 3}
IMAGES: dict[str, Any] = {"model": lambda: Flattening(tanh_net()), "augment": (Shaken(),)}


def same(a: Method, b: Method, **changes: Any) -> None:
    """Both methods end at the same bits, which differ from the start."""
    settings = CONDITIONS | {"federation": as_images(classes())} | IMAGES | changes
    first, second = (theta(go(method, **settings)) for method in (a, b))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - theta(go(b, **settings | {"rounds": 1}))).max() > 1e-2, "nothing was learnt"


def test_moon_without_mu_is_fedavg() -> None:
    same(methods.moon(mu=0.0), methods.fedavg())
    assert np.abs(theta(go(methods.moon(mu=1.0))) - theta(go("fedavg"))).max() > 1e-4


def test_fedntd_without_beta_is_fedavg_and_so_is_its_first_step() -> None:
    same(methods.fedntd(beta=0.0), methods.fedavg())
    once = {"local": Local(steps=1, batch_size=0, lr=0.3), "rounds": 3}
    np.testing.assert_allclose(theta(go(methods.fedntd(5.0), **once)), theta(go("fedavg", **once)), rtol=0, atol=1e-12)
    assert np.abs(theta(go(methods.fedntd(5.0))) - theta(go("fedavg"))).max() > 1e-3


def test_fedntd_says_nothing_of_the_true_class() -> None:
    """Its value does not depend on that class's logits, of neither model; with two classes there is nothing to keep."""
    draw = torch.Generator().manual_seed(5)
    z, there = (torch.randn(6, 4, dtype=torch.float64, generator=draw) for _ in range(2))
    y, ctx = torch.arange(6) % 4, NO_ROUND

    def value(z: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return NotTrueDistillation(2.0, 1.5).loss(Output(z, at=lambda theta: Output(there)), Batch(z, y), ctx)

    lifted = 7 * torch.nn.functional.one_hot(y, 4)
    torch.testing.assert_close(value(z + lifted, there), value(z, there), rtol=0, atol=1e-12)
    torch.testing.assert_close(value(z, there - lifted), value(z, there), rtol=0, atol=1e-12)
    assert value(z, there).min() > 1e-3
    y = y % 2
    assert value(z[:, :2], there[:, :2]).abs().max() == 0


@pytest.mark.parametrize("name", ["distill", "robust", "distill_robust"])
def test_labels_alone_are_fedavg(name: str) -> None:
    """Also where a second view is drawn: the first one stays what it is."""
    same(methods.make(name, alpha=1.0), methods.fedavg())
    settings = CONDITIONS | {"federation": as_images(classes())} | IMAGES
    assert np.abs(theta(go(name, **settings)) - theta(go("fedavg", **settings))).max() > 1e-3


def test_labels_alone_under_feddyn_are_feddyn() -> None:
    plain = methods.distill_robust(alpha=1.0)
    same(replace(plain, drift=FedDynDrift(0.1), mixing=Uniform()), methods.feddyn(alpha=0.1))


def test_moon_has_no_gradient_at_clients_that_come_for_the_first_time() -> None:
    """Their previous model is the received one: μ log 2, without gradient."""
    moon, fedavg = go(methods.moon(mu=5.0), rounds=1), go("fedavg", rounds=1)
    np.testing.assert_array_equal(theta(moon), theta(fedavg))
    assert moon.history[0]["train/loss"] == pytest.approx(fedavg.history[0]["train/loss"] + 5 * log(2))


def test_moon_keeps_the_model_with_which_the_client_ended() -> None:
    result = go("moon", rounds=1)
    models = {key: value for key, value in leaves(result.snapshot) if key.endswith("objective.1/previous")}
    assert len(models) == 6
    n = np.array([7, 12, 5, 9, 16, 4])
    mean = sum(w * models[f"client {i}/objective.1/previous"].numpy() for i, w in enumerate(n)) / n.sum()
    np.testing.assert_allclose(mean, theta(result), rtol=0, atol=1e-12)


def test_losses_of_the_received_model_count_moons_constant() -> None:
    """Mixing policies that ask for them know no client state; the term is there all the same."""
    losses = []
    for method in (methods.fedavg(), methods.moon(mu=3.0)):
        federation = classes()
        plan = ClientPlan.of(tanh_net().double(), method, federation.train, HARD)
        down = Server.initial(plan, plan.theta0, plan.buffers0).broadcast(plan)
        losses.append(Serial(plan, Live).losses(down, np.arange(6), lambda client: {}))
    np.testing.assert_allclose(losses[1], losses[0] + 3 * log(2), rtol=0, atol=1e-12)
    fair = replace(methods.moon(), mixing=QFFL(1.0))
    assert np.isfinite(theta(go(fair))).all()


def contrast(z: torch.Tensor, there: torch.Tensor, before: torch.Tensor, tau: float = 0.5) -> torch.Tensor:
    previous = torch.ones(1)

    def at(theta: torch.Tensor) -> Output:
        return Output(torch.zeros(len(z), 2), before if theta is previous else there)

    out = Output(torch.zeros(len(z), 2), z, at=at)
    ctx = NO_ROUND._replace(received=torch.zeros(1), state={"previous": previous})
    return Contrastive(1.0, tau).loss(out, Batch(z, torch.zeros(len(z))), ctx)


def test_moon_is_the_negative_logarithm_of_its_fraction() -> None:
    draw = torch.Generator().manual_seed(0)
    z, there, before = (torch.randn(5, 3, dtype=torch.float64, generator=draw) for _ in range(3))
    cos = torch.nn.functional.cosine_similarity
    up, down = (cos(z, there) / 0.5).exp(), (cos(z, before) / 0.5).exp()
    torch.testing.assert_close(contrast(z, there, before), -(up / (up + down)).log(), rtol=0, atol=1e-12)
    a, b, c = (t.reshape(5, 3, 1, 1) for t in (z, there, before))  # features may have any shape
    torch.testing.assert_close(contrast(a, b, c), contrast(z, there, before), rtol=0, atol=0)
    assert torch.isfinite(contrast(z, there, before, tau=1e-3)).all()


def test_moon_survives_features_that_are_all_zero() -> None:
    """Dead units: the direction of zero is undefined, and must not send gradients of 1/eps."""
    z = torch.zeros(2, 3, requires_grad=True)
    value = contrast(z, torch.ones(2, 3), -torch.ones(2, 3))
    value.sum().backward()
    assert value.tolist() == pytest.approx([log(2)] * 2)
    assert z.grad is not None
    assert z.grad.abs().max() < 10


def test_gradient_of_the_divergence_is_tau_times_the_difference() -> None:
    draw = torch.Generator().manual_seed(1)
    t, s = (3 * torch.randn(4, 5, dtype=torch.float64, generator=draw) for _ in range(2))
    s.requires_grad_()
    assert torch.autograd.gradcheck(lambda u, v: divergence.symmetric_kl(u, v, 3.5), (t.clone().requires_grad_(), s))
    for tau in (1.0, 3.5):
        (gradient,) = torch.autograd.grad(divergence.kl(t, s, tau).sum(), s)
        p, q = ((v.detach() / tau).exp() for v in (t, s))
        expected = tau * (q / q.sum(1, keepdim=True) - p / p.sum(1, keepdim=True))
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert divergence.kl(t, t, 3.5).abs().max() < 1e-12
    shifted = divergence.kl(t + 7, s, 2.0)  # logits count up to a constant
    torch.testing.assert_close(shifted, divergence.kl(t, s, 2.0), rtol=0, atol=1e-10)


def test_no_view_is_the_target() -> None:
    """Both directions of the divergence, their mean, and a gradient through both views."""
    draw = torch.Generator().manual_seed(2)
    a, b = (torch.randn(4, 3, dtype=torch.float64, generator=draw).requires_grad_() for _ in range(2))
    value = divergence.symmetric_kl(a, b, 2.0)
    torch.testing.assert_close(value, (divergence.kl(a, b, 2.0) + divergence.kl(b, a, 2.0)) / 2, rtol=0, atol=1e-12)
    torch.testing.assert_close(value, divergence.symmetric_kl(b, a, 2.0), rtol=0, atol=1e-12)
    slopes = torch.autograd.grad(value.sum(), (a, b))
    assert min(slope.abs().max() for slope in slopes) > 1e-2


def test_both_is_the_sum_of_both_with_labels_once() -> None:
    draw = torch.Generator().manual_seed(3)
    logits, twin, taught = (torch.randn(6, 4, generator=draw) for _ in range(3))
    out, batch = Output(logits, twin=twin, teacher=taught), Batch(logits, torch.arange(6) % 4)
    terms = methods.distill_robust(alpha=0.3, tau=2.0).objective
    loss = sum(term.loss(out, batch, NO_ROUND) for term in terms)
    labels = CrossEntropy().loss(out, batch, NO_ROUND)
    divergences = divergence.kl(taught, logits, 2.0) + divergence.symmetric_kl(logits, twin, 2.0)
    torch.testing.assert_close(loss, 0.3 * labels + 0.7 * divergences)


def test_sequences_take_the_mean_over_positions() -> None:
    draw = torch.Generator().manual_seed(4)
    logits, taught = (torch.randn(3, 5, 4, generator=draw) for _ in range(2))
    y = torch.arange(15).reshape(3, 5) % 4
    out = Output(logits, teacher=taught, twin=taught)
    for term in (Distillation(0.4), Robustness(0.4)):
        losses = term.loss(out, Batch(logits, y), NO_ROUND)
        parts = [
            term.loss(Output(logits[:, t], teacher=taught[:, t], twin=taught[:, t]), Batch(logits, y[:, t]), NO_ROUND)
            for t in range(5)
        ]
        torch.testing.assert_close(losses, torch.stack(parts).mean(0))
        assert losses.shape == (3,)


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_the_teacher_never_changes(engine: str) -> None:
    teacher = teacher_net()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    machine = experiment("distill", teacher=teacher, engine=engine)
    run(machine)
    assert teacher.training
    assert all(p.grad is None and p.requires_grad for p in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_a_teacher_is_asked_in_evaluation_mode() -> None:
    """Dropout and batch statistics of the teacher are those of its evaluation."""

    def noisy() -> nn.Module:
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
        return fixed(Net(body, 8), seed=2)

    assert_same_run(go("distill", teacher=noisy()), go("distill", teacher=noisy().eval()))
    assert_same_run(go("distill", teacher=noisy()), go("distill", teacher=noisy(), engine="processes"))


COMPOSED = {
    "moon, private heads and feddyn": Method(
        "a", (CrossEntropy(), Contrastive(2.0)), FedDynDrift(0.1), PrivateHead(), mixing=Uniform()
    ),
    "both, private heads and scaffold": Method(
        "b", methods.distill_robust().objective, Scaffold(), PrivateHead(), mixing=Uniform()
    ),
    "fedntd and scaffold": Method("d", (CrossEntropy(), NotTrueDistillation(2.0)), Scaffold(), mixing=Uniform()),
    "everything at once": Method(
        "c", (*methods.distill_robust().objective, Contrastive(1.0)), FedDynDrift(0.2), mixing=QFFL(0.5)
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_compositions_agree_on_every_engine(name: str) -> None:
    settings = CONDITIONS | {"cohort": 5}
    serial = go(COMPOSED[name], **settings)
    assert_same_run(serial, go(COMPOSED[name], engine="processes", engine_settings={"workers": 2}, **settings))


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'not_true' compares with the received model.*adaptation 'proto' trains"):
        replace(methods.fedntd(), adaptation=Prototypes())
    with pytest.raises(ConfigError, match=r"'alignment' evaluates the model on inputs of its own, .*personal 'ditto'"):
        replace(methods.fedproto(), personal=Ditto())
