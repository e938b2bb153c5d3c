"""User-defined models: what cannot be trained is refused in one sentence, and masks are not state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.federations import CLASSES, FEATURES, classes
from helpers.runs import assert_same_run, experiment, go
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.config import build, resolve
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask
from fedloom.models import Copies, models, wrap


class Returning(nn.Module):
    """A linear layer whose output is packed by a function."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.pack = nn.Linear(FEATURES, CLASSES), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.layer(x))


class Inside(nn.Module):
    """A model with a compiled layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.jit.script(linear())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def linear(**settings: Any) -> nn.Module:
    return nn.Linear(FEATURES, CLASSES, **settings)


def weight_norm() -> nn.Module:
    """The outdated form, which keeps the product g·v/‖v‖ beside its factors."""
    return torch.nn.utils.weight_norm(linear())


def model_with(value: Any) -> nn.Module:
    model = linear()
    model.thing = value
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tuple": (lambda: Returning(lambda y: (y, y)), "the model returns a tuple of 2; return the logits alone."),
    "dict": (lambda: Returning(lambda y: {"logits": y}), "the model returns a dict; return the logits alone."),
    "lazy": (lambda: nn.LazyLinear(CLASSES), "the model's 'weight' has no shape yet; "),
    "script": (lambda: torch.jit.script(linear()), "the model is compiled by torch.jit; "),
    "trace": (lambda: torch.jit.trace(linear(), torch.zeros(2, FEATURES)), "the model is compiled by torch.jit; "),
    "script inside": (Inside, "layer 'layer' of the model is compiled by torch.jit; "),
    "complex": (lambda: linear(dtype=torch.cfloat), "the model's 'weight' holds complex numbers; keep their real and "),
    "computed weight": (weight_norm, "the model cannot be copied: Only Tensors created explicitly by the user "),
    "lock": (lambda: model_with(threading.Lock()), "the model cannot be copied: cannot pickle '_thread.lock' object; "),
    "meta": (lambda: linear(device="meta"), "the model's 'weight' is on the meta device, without values; "),
}


def test_a_lazy_model_by_name_is_refused_in_the_same_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line asks for its size before."""
    monkeypatch.setattr(models, "_entries", dict(models._entries))
    monkeypatch.setattr(models, "_names", dict(models._names))

    @models.register
    def lazy(classes: int) -> nn.Module:
        """A layer that has no size yet."""
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

    with pytest.raises(ConfigError, match=r"the model's '1\.weight' has no shape yet"):
        FederatedTask(build(resolve(["method=fedavg", "model=lazy"])))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_sentence(name: str) -> None:
    model, words = REFUSED[name]
    with pytest.raises(ConfigError) as refusal:
        FederatedTask(experiment(model=model))
    assert str(refusal.value).startswith(words)
    assert str(refusal.value).endswith(".")


class Masked(nn.Module):
    """Attention to earlier positions only, with the mask stored as a buffer."""

    def __init__(self, stored: bool = True) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(2, 5), nn.Linear(5, CLASSES)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1), persistent=stored)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        return self.head(((h @ h.mT + self.mask).softmax(-1) @ h).mean(1))


def test_a_mask_that_is_not_finite_is_no_state() -> None:
    layout = Layout.of(Masked())
    assert layout.buffers == ()
    runs = []
    for stored in (True, False):
        torch.manual_seed(0)
        runs.append(go(federation=classes((6, 9), shape=(4, 2)), model=lambda stored=stored: Masked(stored)))
    assert not runs[0].failures
    assert torch.equal(*(result.snapshot.server.theta for result in runs))


def test_statistics_are_state_even_if_they_have_diverged() -> None:
    norm = nn.BatchNorm1d(3)
    norm.get_buffer("running_var").fill_(float("inf"))
    assert [leaf.name for leaf in Layout.of(norm).buffers] == ["running_mean", "running_var", "num_batches_tracked"]


class Centred(nn.Module):
    """Inputs minus their running mean, a buffer that every training pass replaces or overwrites."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layer, self.replaces = linear(), replaces
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        if self.training:
            mean = 0.9 * mean + 0.1 * x.mean(0)
            if self.replaces:
                self.mean = mean
            else:
                self.get_buffer("mean").copy_(mean)
        return self.layer(x - mean)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])  # with and without steps of the compute's own
def test_a_buffer_that_is_replaced_is_state_like_one_that_is_overwritten(method: str) -> None:
    runs = []
    for replaces in (True, False):
        runs.append(go(method, model=lambda replaces=replaces: Centred(replaces)).snapshot.server)
    assert runs[0].buffers.abs().min() > 0
    assert torch.equal(runs[0].theta, runs[1].theta)
    assert torch.equal(runs[0].buffers, runs[1].buffers)


class Counting(nn.Module):
    """A model that counts its training passes in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("passes").add_(int(self.training))
        return self.layer(x) / (1 + self.get_buffer("passes"))


def test_whole_numbers_that_training_changes_are_no_constants_and_refused() -> None:
    with pytest.raises(ConfigError, match=r"forward pass changes the buffer 'passes', .* a stored buffer of floats"):
        go(model=Counting)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_that_cannot_be_copied_is_refused_as_an_instance_too() -> None:
    for use in (Copies, lambda module: wrap(nn.Sequential(module), head="0")):
        with pytest.raises(ConfigError, match=r"cannot be copied: .*; take torch\.nn\.utils\.parametrizations"):
            use(weight_norm())


class Positioned(nn.Module):
    """A model with a float constant and, optionally, running statistics."""

    def __init__(self, stored: bool, counts: bool = False) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.BatchNorm1d(FEATURES) if counts else nn.Identity()
        self.register_buffer("places", torch.ones(FEATURES), persistent=stored)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x + self.get_buffer("places")))


def test_a_constant_where_no_buffer_may_be_is_told_how_to_be_none() -> None:
    private = Local(epochs=1, batch_size=4, lr=0.1, dp_clip=1.0)
    with pytest.raises(ConfigError, match=r"buffer 'places' couples .*; if it never changes, .* persistent=False, and"):
        go(model=lambda: Positioned(True), local=private)
    assert not go(model=lambda: Positioned(False), local=private).failures
    with pytest.raises(ConfigError, match=r"buffer 'norm.running_mean' couples .*, like one with group normalisation"):
        go(model=lambda: Positioned(True, counts=True), local=private)


class Selecting(nn.Module):
    """A model that compares a stored float constant with 1, which a rounded mean of ones need not be."""

    def __init__(self, stored: bool) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.BatchNorm1d(FEATURES)
        self.register_buffer("on", torch.ones(FEATURES), persistent=stored)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x) * (self.get_buffer("on") == 1))


@pytest.mark.parametrize("settings", [{}, {"compute": "batched"}, {"engine": "processes"}], ids=str)
@pytest.mark.parametrize("method", ["fedavg", "q_ffl", "krum", "fedmgda"])  # by sums, and by single uploads
def test_a_constant_that_is_stored_is_not_rounded_by_averaging(method: str, settings: dict[str, Any]) -> None:
    runs = []
    for stored in (True, False):
        federation, rest = classes((3, 5, 6, 7, 11, 13)), {"rounds": 12, "cohort": 3, "dtype": "float32", **settings}
        torch.manual_seed(0)
        runs.append(go(method, federation=federation, model=lambda s=stored: Selecting(s), **rest).snapshot.server)
    assert torch.equal(runs[0].theta, runs[1].theta)
    layout = Layout.of(Selecting(True))
    constant = layout.views(runs[0].theta, runs[0].buffers)["on"]
    assert (constant == 1).all()
    assert not any("on" in leaf.name.split(".") for leaf in Layout.of(Selecting(False)).buffers)


class Sampling(nn.Module):
    """A model that drops units in every mode, as F.dropout does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.5))


def test_a_model_that_draws_in_evaluation_has_the_same_bits_wherever_it_runs() -> None:
    """In the losses before local work, which give the weights of q-FFL, and in evaluation."""
    runs = []
    for number, engine in enumerate(["serial", "processes", "serial"]):
        torch.manual_seed(number)  # of whoever calls
        settings = {"engine_settings": {"workers": 2}} if engine == "processes" else {}
        runs.append(go("q_ffl", model=Sampling, evaluation=Evaluation(), engine=engine, **settings))
    assert_same_run(runs[0], runs[1])
    assert_same_run(runs[0], runs[2])
