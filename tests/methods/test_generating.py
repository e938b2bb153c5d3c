"""Generating networks in a federation: cost, clients with few samples, policies that need losses, and the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, classes, federation
from helpers.generative import DenseGAN, DenseVAE, generative_net
from helpers.networks import fixed, tanh_net
from helpers.runs import assert_same_run, experiment, go, theta
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Arrays, Federation
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.models import ConditionalGAN, ConditionalVAE
from fedloom.parts.mixing import AFL
from fedloom.rounds.plan import ClientPlan
from fedloom_apps.synthesis.synthetic_set import sample

TWO: dict[str, Any] = {"engine": "processes", "engine_settings": {"workers": 2}}
BOTH = ["fedcgan", "fedcvae"]


@pytest.mark.parametrize("name", BOTH)
def test_all_parameters_cross_both_ways_and_nothing_else(name: str) -> None:
    result = go(name, cohort=3, rounds=2)
    size = len(theta(result))
    assert size == sum(p.numel() for p in generative_net(make(name))().parameters())
    for record in result.history:
        assert record["comm/down_params"] == record["comm/up_params"] == 3 * size
    assert len(result.snapshot.store) == 0, "clients keep nothing"


def scarce() -> Federation:
    """Clients with one class each, one of them with a single sample."""
    data = classes()
    arrays = data.train.arrays
    rows = [np.flatnonzero(arrays.y.numpy() == label)[:8].tolist() for label in range(CLASSES)]
    return federation(arrays, [rows[0][:1], rows[1], rows[2], rows[0][1:]], data.test)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("local", [Local(steps=3, batch_size=4, lr=0.05),
                                   Local(epochs=1, batch_size=4, lr=0.01, optimiser="adam", beta1=0.5)],
                         ids=["sgd", "adam"])  # fmt: skip
def test_clients_without_a_class_or_with_one_sample(name: str, local: Local) -> None:
    conditions = {"federation": scarce(), "rounds": 4, "local": local}
    serial = go(name, **conditions)
    assert not serial.failures
    assert np.isfinite(theta(serial)).all()
    start, _ = Layout.of(generative_net(make(name))()).read(generative_net(make(name))().double())
    assert np.abs(theta(serial) - start.numpy()).max() > 1e-3
    assert_same_run(serial, go(name, **TWO, **conditions))


@pytest.mark.parametrize("name", BOTH)
def test_losses_of_the_received_model_are_known_to_mixing_policies(name: str) -> None:
    """AFL asks for F_i(θ^t), whose random numbers are data too: every engine finds the same."""
    method = replace(make(name), mixing=AFL(0.1))
    serial = go(method)
    assert np.isfinite(theta(serial)).all()
    assert np.abs(theta(serial) - theta(go(name))).max() > 1e-6
    assert_same_run(serial, go(method, **TWO))


@pytest.mark.parametrize("name", BOTH)
def test_a_method_without_a_predictor_refuses_to_be_evaluated_as_one(name: str) -> None:
    setup = experiment(name)
    with pytest.raises(ConfigError, match=f"method '{name}' trains no predictor"):
        replace(setup, evaluation=Evaluation(what=("global",)))


@pytest.mark.parametrize("name", BOTH)
def test_another_length_of_latent_vectors_is_refused(name: str) -> None:
    kind = DenseGAN if name == "fedcgan" else DenseVAE
    setup = replace(experiment(name, rounds=1), model=lambda: fixed(kind(3, nn.Tanh())))
    sentence = r"draws latent vectors of length \d+, but the model's have 3; give both the same latent"
    with pytest.raises(ConfigError, match=sentence):
        run(setup)


def pictures(shape: tuple[int, ...] = (1, 4, 4)) -> Federation:
    """Images between 0 and 1 that are then normalised, bright in another half for each class, at four clients."""
    draw = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = draw.uniform(0.0, 0.2, (60, *shape))
    x[y == 0, :, :2] += 0.8
    x[y == 1, :, 2:] += 0.8
    arrays = Arrays(torch.as_tensor((x - 0.5) / 0.25), torch.as_tensor(y), 2, mean=(0.5,), std=(0.25,))
    return federation(arrays, np.arange(60).reshape(4, 15).tolist(), arrays)


def image_model(name: str) -> Callable[[], nn.Module]:
    kind = ConditionalGAN if name == "fedcgan" else ConditionalVAE
    return lambda: kind(2, (1, 4, 4), 3, width=4, groups=2, low=-2.0, high=2.0)


@pytest.mark.parametrize("name", BOTH)
def test_networks_of_images_are_the_same_on_every_engine(name: str) -> None:
    local = Local(steps=3, batch_size=6, lr=0.05, clip=1.0)
    conditions: dict[str, Any] = {
        "local": local,
        "dtype": "float64",
        "evaluation": Evaluation(what=()),
        "device": "cpu",
    }
    setup = Experiment(make(name, latent=3), pictures(), image_model(name), rounds=2, **conditions)
    serial = run(setup)
    assert not serial.failures
    assert_same_run(serial, run(replace(setup, **TWO)))


def trained(name: str, rounds: int) -> tuple[nn.Module, Tensor]:
    method, local = make(name, latent=3), Local(steps=10, batch_size=15, lr=0.01, optimiser="adam", beta1=0.5)
    conditions: dict[str, Any] = {"local": local, "evaluation": Evaluation(what=()), "device": "cpu"}
    result = run(Experiment(method, pictures(), image_model(name), rounds=rounds, **conditions))
    assert not result.failures
    return image_model(name)(), result.snapshot.server.theta


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.exhaustive
def test_what_is_made_looks_like_the_data(name: str) -> None:
    """Each class is bright where it should be; before training it is not."""
    net, after = trained(name, 20)
    halves = []
    for at in (Layout.of(net).read(net)[0], after):
        x, y = sample(net, at, per_class=20)
        upper, lower = x[:, 0, :2].mean((1, 2)), x[:, 0, 2:].mean((1, 2))
        halves.append(torch.where(y == 0, upper - lower, lower - upper))
    assert halves[0].abs().mean() < 0.6, "nothing is there before training"
    assert (halves[1] > 1.5).float().mean() > 0.9, "real ones differ by 3.2"


@pytest.mark.parametrize("name", BOTH)
def test_samples_depend_on_the_seed_alone_and_lie_in_the_range(name: str) -> None:
    net = image_model(name)()
    layout = Layout.of(net)
    start, _ = layout.read(net)
    at = start * 3 + 0.1
    x, y = sample(net, at, per_class=4, seed=1)
    assert x.shape == (8, 1, 4, 4)
    assert y.tolist() == [0] * 4 + [1] * 4
    assert x.min() >= -2
    assert x.max() <= 2
    torch.manual_seed(99)
    again, _ = sample(net, at, per_class=4, seed=1)
    assert torch.equal(x, again)
    assert not torch.equal(x, sample(net, at, per_class=4, seed=2)[0])
    more, _ = sample(net, at, per_class=7, seed=1)
    torch.testing.assert_close(torch.cat([more[:4], more[7:11]]), x)
    assert torch.equal(layout.read(net)[0], start), "the model stays as it is"
    double, _ = sample(net, at.double(), per_class=4, seed=1)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), x, rtol=1e-4, atol=1e-4)
    assert torch.pdist(x[:4].flatten(1)).min() > 1e-4, "samples of a class are not one"


@pytest.mark.parametrize("name", BOTH)
def test_many_samples_are_made_in_pieces(name: str) -> None:
    net = image_model(name)()
    at, _ = Layout.of(net).read(net)
    x, y = sample(net, at, per_class=600)
    assert x.shape == (1200, 1, 4, 4)
    assert y.bincount().tolist() == [600, 600]


def test_what_makes_no_samples_is_refused() -> None:
    net = image_model("fedcvae")()
    at, _ = Layout.of(net).read(net)
    for sentence, change in [
        ("per_class must be at least 1, not 0", {"per_class": 0}),
        ("cannot generate labelled samples", {"model": tanh_net()}),
        ("do not fit this model", {"theta": at[:-1]}),
        ("do not fit this model", {"buffers": torch.zeros(3)}),
    ]:
        arguments: dict[str, Any] = {"model": net, "theta": at, "per_class": 1} | change
        with pytest.raises(ConfigError, match=sentence):
            sample(**arguments)


def test_the_range_that_clients_see_is_that_of_normalised_images() -> None:
    plan = ClientPlan.of(image_model("fedcvae")(), make("fedcvae", latent=3), pictures().train, Local())
    assert plan.facts.low.shape == plan.facts.high.shape == (1, 1, 1)
    assert (plan.facts.low == -2).all()
    assert (plan.facts.high == 2).all()
    plain = ClientPlan.of(tanh_net(), make("fedavg"), classes().train, Local()).facts
    assert (plain.low, plain.high) == (0, 1), "of images that are not normalised"
