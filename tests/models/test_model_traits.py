"""Probes of models: outputs that depend on other samples, and passes that leave something behind, are found at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import LARGE
from helpers.federations import CLASSES, FEATURES, classes
from helpers.marks import kinds
from helpers.runs import experiment, go
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.model_traits import ModelTraits, traits
from fedloom.experiment.federated import FederatedTask
from fedloom.models import models

X = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(0))


class Odd(nn.Module):
    """Two linear layers, with a function in between and what it needs."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.layer, self.between = layer or nn.Identity(), between
        self.calls, self.cache, self.seen = 0, None, [0]
        self.register_buffer("hidden", torch.zeros(()), persistent=False)
        self.register_buffer("running", torch.zeros(()), persistent=between is in_sent_buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self, self.first(x)))


def through(m: Any, h: Tensor) -> Tensor:
    return m.layer(h)


def in_buffer(m: Any, h: Tensor) -> Tensor:
    m.hidden = 0.9 * m.hidden + 0.1 * h.detach().mean()
    return h - m.hidden


def in_sent_buffer(m: Any, h: Tensor) -> Tensor:
    if m.training:
        m.running = 0.9 * m.running + 0.1 * h.detach().mean()
    return h - m.running


def in_attribute(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


def in_list(m: Any, h: Tensor) -> Tensor:
    m.seen[0] += 1
    return h + m.seen[0]


def in_cache(m: Any, h: Tensor) -> Tensor:
    m.cache = h
    return h


def random_scale(m: Any, h: Tensor) -> Tensor:
    return h * torch.rand(()) + random.random() + float(np.random.rand())


def zero_head() -> nn.Module:
    model = Odd(lambda m, h: h - h.mean(0))
    nn.init.zeros_(model.head.weight)
    return model


ALONE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Odd(through, nn.Dropout(0.5)),
    "batch statistics": lambda: Odd(through, nn.BatchNorm1d(4)),
    "layer norm": lambda: Odd(through, nn.LayerNorm(4)),
    "spectral norm": lambda: Odd(through, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
    "random numbers": lambda: Odd(random_scale),
    "sent buffer": lambda: Odd(in_sent_buffer),
    "cache that nothing reads": lambda: Odd(in_cache),
}
MIXES: dict[str, Callable[[], nn.Module]] = {
    "untracked statistics": lambda: Odd(through, nn.BatchNorm1d(4, track_running_stats=False)),
    "mean": lambda: Odd(lambda m, h: h - h.mean(0)),
    "softmax over the batch": lambda: Odd(through, nn.Softmax(0)),
    "attention over the batch": lambda: Odd(lambda m, h: (h @ h.T).softmax(-1) @ h),
    "head of zeros": zero_head,
}
REMEMBERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "buffer": (lambda: Odd(in_buffer), "the buffer 'hidden'"),
    "attribute": (lambda: Odd(in_attribute), "the attribute 'calls'"),
    "list": (lambda: Odd(in_list), "a place outside its parameters and buffers"),
}


def traits_of(model: nn.Module) -> ModelTraits:
    return traits(model, Layout.of(model), X)


@pytest.mark.parametrize("name", ALONE)
def test_models_that_compute_each_sample_alone_are_not_accused(name: str) -> None:
    model_traits = traits_of(ALONE[name]())
    assert (model_traits.memory, model_traits.mixes) == (None, False)
    assert model_traits.mixes_in_training == (name in ("batch statistics", "sent buffer"))


@pytest.mark.parametrize("name", MIXES)
def test_a_model_whose_evaluation_mixes_samples_is_refused(name: str) -> None:
    assert traits_of(MIXES[name]()) == ModelTraits(None, True, True)
    with pytest.raises(
        ConfigError, match=r"depend on the others of its batch even in evaluation, .* running statistics"
    ):
        FederatedTask(experiment(model=MIXES[name]))


@pytest.mark.parametrize("name", REMEMBERS)
def test_a_model_that_remembers_its_passes_is_refused(name: str) -> None:
    model, where = REMEMBERS[name]
    assert traits_of(model()) == ModelTraits(where)
    with pytest.raises(
        ConfigError, match=rf"forward pass changes {where}, which is not part of the model that is sent"
    ):
        FederatedTask(experiment(model=model))


def test_what_mixes_in_training_alone_has_no_gradient_of_each_sample() -> None:
    def model() -> nn.Module:
        return Odd(lambda m, h: h - h.mean(0) if m.training else h)

    assert traits_of(model()) == ModelTraits(None, False, True)
    assert not go(model=model, rounds=1).failures
    with pytest.raises(ConfigError, match=r"local\.dp_clip needs the gradient of each sample, but the model's outputs"):
        go(model=model, local=Local(epochs=1, batch_size=4, lr=0.1, dp_clip=1.0))


def test_a_probe_leaves_the_model_and_random_numbers_as_they_were() -> None:
    model = Odd(in_attribute).train()
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    traits_of(model)
    assert (model.calls, model.training, len(model.seen)) == (0, True, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1], states[2]) == (random.getstate(), str(np.random.get_state()))


SHAPES = {"m5": (1, 2000), "stacked_lstm": (6,)}
OTHERS = {"efficientnet_b0", "timm", "transformers", "distilbert"}


@pytest.mark.parametrize("name", kinds(models.names(), {*models.names()} - {*LARGE}))
def test_our_own_networks_need_no_probe(name: str) -> None:
    if name in OTHERS:
        pytest.skip("it is another library's, and probed")
    shape = SHAPES.get(name, (3, 16, 16))
    try:
        model = models.make(name, classes=3, inputs=shape)
    except ConfigError:  # it needs larger images
        model = models.make(name, classes=3, inputs=(shape := (3, 32, 32)))
    x = torch.randint(0, 5, (5, *shape)) if name == "stacked_lstm" else torch.randn(5, *shape)
    model_traits = traits(model, Layout.of(model), x)
    assert (model_traits.memory, model_traits.mixes) == (None, False)


def test_our_own_networks_are_not_probed_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(*_: object) -> ModelTraits:
        raise AssertionError("probed")

    monkeypatch.setattr("fedloom.core.model_traits.traits", probe)
    FederatedTask(experiment(model=lambda: models.make("mlp", classes=CLASSES, inputs=(FEATURES,)), dtype="float32"))
    with pytest.raises(AssertionError, match="probed"):
        FederatedTask(experiment(federation=classes()))
