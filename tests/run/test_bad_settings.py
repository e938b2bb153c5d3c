"""Every invalid setting gets one sentence, before anything runs or is written."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.federations import classes
from helpers.runs import experiment
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.objectives import BinaryCrossEntropy, Proximal, SquaredError
from fedloom.parts.server import SGD, Extrapolated
from fedloom_apps.distill.experiment import SGDConfig

NAN, INF = float("nan"), float("inf")


def with_empty_clients() -> Any:
    federation = classes()
    lists = [federation.train.index[i] if i not in (2, 4) else [] for i in range(6)]
    return replace(federation, train=Split(federation.train.arrays, Index.of(lists)))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no augmentation": (lambda: experiment(augment=(3,)), "augmentation 3 is neither a name nor a mapping"),
    "samples to choose by": (
        lambda: make("superfed_mm", min_validation=-1),
        r"min_validation must be at least 0, not -1",
    ),
    "beyond": (lambda: make("propfair", beyond="flat"), r"beyond is 'flat'; there are: published, tangent"),
    "many rounds": (lambda: experiment(rounds=10**30), r"rounds is 1e\+30, but whole numbers"),
    "rounds": (lambda: experiment(rounds=-1), r"rounds must lie in \[0, 100000000\], not -1"),
    "participation 0": (lambda: experiment(participation=0.0), r"participation is 0, but it must lie in \(0, 1\]"),
    "participation 2": (lambda: experiment(participation=2.0), r"participation is 2, but it must lie in \(0, 1\]"),
    "cohort 0": (lambda: experiment(cohort=0), r"cohort is 0, but it must lie between 1 and .* 6"),
    "cohort 7": (lambda: experiment(cohort=7), r"cohort is 7, but it must lie between 1 and .* 6"),
    "a Bernoulli cohort that is always empty": (
        lambda: experiment(participation=1e-300, sampling="bernoulli"),
        r"nearly all cohorts would be empty; with 6 clients it must be at least 0\.000167",
    ),
    "weight decay of a student": (
        lambda: SGDConfig(weight_decay=INF),
        r"training\.weight_decay must be finite and at least 0",
    ),
    "sampling": (lambda: experiment(sampling="fix"), r"sampling is 'fix'; did you mean 'fixed'\?"),
    "drop rate 1": (lambda: experiment(drop_rate=1.0), r"drop_rate must lie in \[0, 1\), not 1"),
    "drop rate -1": (lambda: experiment(drop_rate=-0.5), r"drop_rate must lie in \[0, 1\), not -0\.5"),
    "dtype": (lambda: experiment(dtype="float16"), r"dtype is 'float16'; did you mean 'float"),
    "no samples": (
        lambda: experiment(federation=with_empty_clients()),
        r"2 clients have no training samples; .* client 2",
    ),
    "scaffold and adam": (
        lambda: experiment("scaffold", local=Local(optimiser="adam")),
        r"drift 'scaffold' .* by sgd, not adam",
    ),
    "fednova and adam": (
        lambda: experiment("fednova", local=Local(optimiser="adam")),
        r"drift 'normalised' .* by sgd, not adam",
    ),
    "evaluation": (lambda: Evaluation(what=("globl",)), r"unknown evaluation 'globl'; did you mean 'global'\?"),
    "target 0": (lambda: Evaluation(target=0.0), r"target accuracy is 0, but it must lie in \(0, 1\]"),
    "target 80": (lambda: Evaluation(target=80.0), r"target accuracy is 80, but it must lie in \(0, 1\]"),
    "target nan": (lambda: Evaluation(target=NAN), r"target accuracy is nan, but it must lie in \(0, 1\]"),
    "target nobody measures": (
        lambda: Evaluation(what=("clients",), target=0.5),
        r"'global/accuracy', which is never measured: evaluation\.what is clients",
    ),
    "a figure over clients": (
        lambda: Evaluation(metric="clients/accuracy", target=0.5),
        r"'clients/accuracy' names no statistic over clients; "
        r"choose one like clients/accuracy/mean, or mean, weighted, std, …",
    ),
    "a figure that there is not": (
        lambda: Evaluation(metric="clients/accuracy/meen", patience=2),
        r"'clients/accuracy/meen' names no statistic",
    ),
    "patience nobody measures": (
        lambda: Evaluation(what=("global",), patience=2, metric="global/train_loss"),
        r"'global/train_loss', which is never measured",
    ),
    "stop without target": (lambda: Evaluation(stop_at_target=True), r"stop_at_target needs a target"),
    **{
        f"fedprox mu {mu}": (lambda mu=mu: make("fedprox", mu=mu), rf"\bmu must be .*at least 0, not {mu:g}")
        for mu in (-0.1, NAN, INF)
    },
    "method": (lambda: experiment("fedavgg"), r"unknown method 'fedavgg'; did you mean 'fedavg'\?"),
    "setting": (lambda: make("feddyn", alpa=1), r"method 'feddyn' has no setting 'alpa'; did you mean 'alpha'\?"),
}


@pytest.mark.parametrize(("build", "sentence"), CASES.values(), ids=CASES)
def test_impossible_setting(build: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    text = str(error.value)
    assert re.search(sentence, text), text
    assert "\n" not in text
    assert text.endswith((".", "?"))


def test_limits_that_are_allowed() -> None:
    """The edges of each range, so that the checks above do not refuse too much."""
    assert Proximal(0.0) == Proximal(mu=0.0)
    assert FedDynDrift(1e-12).alpha == 1e-12
    assert SGD(momentum=0.0).momentum == 0
    assert Extrapolated(eps=0.0).eps == 0
    assert Evaluation(target=1.0).target == 1
    assert Evaluation(target=40.0, metric="global/loss").target == 40
    assert experiment(participation=1e-9).participation == 1e-9
    assert experiment(drop_rate=0.0, cohort=6).cohort == 6


def numbers() -> Any:
    """The usual federation with a number for each sample in the place of its class."""
    federation = classes()
    arrays = federation.train.arrays
    return replace(
        federation,
        **{
            name: replace(split, arrays=replace(split.arrays, y=split.arrays.y.double()))
            for name, split in (("train", federation.train), ("held_out", federation.held_out))
        },
        test=replace(federation.test, y=federation.test.y.to(arrays.x.dtype)),
    )


def whole_numbers() -> Any:
    """The usual federation with whole numbers for inputs."""
    federation = classes()
    arrays = replace(federation.train.arrays, x=federation.train.arrays.x.long())
    return replace(federation, train=replace(federation.train, arrays=arrays))


class Narrow(nn.Module):
    """Takes three features where the data have four, or has too few outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def people() -> Federation:
    """A table of ages and two towns, which are three columns of inputs."""
    table = pd.DataFrame({"age": [0.0, 1, 2, 3] * 5, "town": ["x", "y"] * 10, "ill": [0, 1, 1, 0] * 5})
    return federate(table, "iid", 2, label="ill")


class Mute(Narrow):
    """Refuses inputs without a word, as a bare assertion does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "inputs": ({"model": lambda: Narrow(3, 3)}, r"the model does not take inputs of shape \(4,\): "),
    "no message": ({"model": lambda: Mute(4, 3)}, r"does not take inputs of shape \(4,\): AssertionError$"),
    "columns": (
        {"model": lambda: Narrow(2, 2), "federation": people()},
        r"does not take inputs of shape \(3,\): .*; the table has 3 columns of inputs, one for each category",
    ),
    "views": ({"views": ("bluur",)}, r"unknown augmentation 'bluur'; did you mean 'blur'\?"),
    "outputs": ({"model": lambda: Narrow(4, 2)}, r"the model has 2 outputs, but the data have 3 classes; give"),
    "one output for two classes": (
        {"model": lambda: Narrow(3, 1), "federation": people()},
        r"has 1 outputs, but the data have 2 classes; .*method\.objective=\[binary_cross_entropy\], takes one",
    ),
    "device": ({"device": "tpu"}, r"unknown device 'tpu'; did you mean 'cpu'\?"),
    "squared error of classes": (
        {"method": Method("mine", objective=(SquaredError(),))},
        r"objective 'squared_error' compares outputs with numbers, but the targets of these data are classes",
    ),
    "cross entropy of numbers": (
        {"federation": numbers()},
        r"objective 'cross_entropy' compares outputs with classes, but .* are numbers; .*=\[squared_error\]; or give "
        r"class numbers as integers\.",
    ),
    "three outputs for one number": (
        {"method": Method("mine", objective=(SquaredError(),)), "federation": numbers()},
        r"the model has 3 outputs, but each sample has 1 targets",
    ),
    "engine": ({"engine": "serail"}, r"unknown engine 'serail'; did you mean 'serial'\?"),
    "engine setting": (
        {"engine": "processes", "engine_settings": {"worker": 2}},
        r"engine 'processes' has no setting 'worker'; did you mean 'workers'\?",
    ),
    "workers": ({"engine": "processes", "engine_settings": {"workers": -1}}, r"workers is -1, but .* at least 0"),
    "too many workers": ({"engine": "processes", "engine_settings": {"workers": 100_000}}, r"at most \d+, since each"),
    "compute": ({"compute": "life"}, r"compute 'life'; did you mean 'live'\?"),
    "features without parameters": (
        {"method": "p_avg_proto", "model": lambda: models.make("logistic", classes=3, inputs=(4,))},
        r"trains the features before the head, but \w+ has no parameters there; choose .* like mlp",
    ),
    "whole numbers": (
        {"federation": whole_numbers()},
        r"does not take inputs of shape \(4,\): .*; whole numbers are taken as tokens",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_written(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run(experiment(**{"method": "fedavg", **changes}), tmp_path / "out")
    assert re.search(sentence, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("default")
def test_probabilities_where_cross_entropy_wants_logits_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="the model returns probabilities, .* return the logits"):
        run(experiment(rounds=1, model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(experiment(rounds=1, model=lambda: nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1))))


@pytest.mark.filterwarnings("default")
def test_a_sigmoid_before_the_one_of_the_loss_is_a_warning() -> None:
    binary = {"method": make("fedavg").with_loss(BinaryCrossEntropy()), "federation": people(), "rounds": 1}
    with pytest.warns(UserWarning, match=r"the model returns probabilities, .* without the sigmoid"):
        run(experiment(**binary, model=lambda: nn.Sequential(nn.Linear(3, 1), nn.Sigmoid(), nn.Flatten(0))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(experiment(**binary, model=lambda: nn.Linear(3, 1)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    for device in ("cuda", "cuda:7"):
        with pytest.raises(ConfigError, match=f"there is no device '{device}' on this machine"):
            run(experiment(device=device), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", [{"checkpoint_every": 0}, {"keep": 0}])
def test_checkpoint_settings(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        run(experiment(), **settings)


def test_average_cannot_begin_in_the_middle(tmp_path: Path) -> None:
    """The mean of all clients' last models is not known if nobody kept them."""
    from fedloom.base.errors import CheckpointError

    run(experiment(rounds=2), tmp_path / "out")
    with pytest.raises(CheckpointError, match="the average cannot begin now"):
        run(experiment(rounds=4, evaluation=Evaluation(what=("average",))), tmp_path / "out", resume=True)


@pytest.mark.parametrize("metric", ["global/acc", "average/accuracy", "clients/accuracy"])
def test_a_metric_that_is_never_measured_is_refused_though_nothing_stops_by_it(metric: str) -> None:
    with pytest.raises(ConfigError, match=r"which is never measured|names no statistic over clients"):
        Evaluation(("global", "clients"), metric=metric)
