"""Inputs that are numbers of tokens: a model must know all of them, in every split, before anything trains."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import experiment
from torch import nn

import fedloom as fl
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Federation, Unlabelled
from fedloom.core.local import Local
from fedloom.data import as_source
from fedloom.experiment.conventions import compare, refusing_unknown_tokens
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask, run
from fedloom.models import models
from fedloom.parts.adaptation import FineTune, Neighbours, PersonalHead, Prototypes
from fedloom.parts.objectives import CrossEntropy, PrototypeAlignment
from fedloom_apps.online import LiveLearner, Moml, Online, grid
from fedloom_apps.online import run as run_online
from fedloom_apps.online.streams import InOrder, task_stream
from fedloom_apps.online.task import OnlineTask

LENGTH = 5


def sequences(rare: int = 1, *, test: bool = False, every: bool = False) -> Federation:
    """Sequences of tokens 0 and 1 whose last sample, in the training set or in the test set, has another one, too."""
    rows = np.random.default_rng(0).integers(2, size=(40, LENGTH))
    labels = np.roll(rows, -1, 1) if every else rows[:, 0]
    test_rows = rows.copy()
    (test_rows if test else rows)[-1, 2] = rare
    return fl.data.federate((rows, labels), "iid", clients=2, test=(test_rows, labels), held_out=0.0)


def settings(federation: Federation, **model: Any) -> Experiment:
    """A run of a small LSTM on these sequences."""
    lstm = partial(models.make, "stacked_lstm", classes=2, inputs=(LENGTH,), hidden=3, layers=1, **model)
    return experiment("fedavg", federation=federation, model=lstm, rounds=1)


def test_a_sample_may_be_one_token() -> None:
    rows = torch.arange(40) % 5
    federation = fl.data.federate((rows, rows % 2), "iid", clients=2)
    for size in (4, 5):
        setup = experiment("fedavg", federation=federation, model=lambda n=size: nn.Embedding(n, 2), rounds=1)
        if size == 5:
            assert not run(setup).failures
        else:
            with pytest.raises(ConfigError, match="the data have tokens up to 4: give the model a vocabulary of 5"):
                run(setup)


@pytest.mark.parametrize("test", [False, True], ids=["training", "test"])
@pytest.mark.parametrize(
    ("rare", "sentence"),
    [
        (7, "the data have tokens up to 7: give the model a vocabulary of 8, model.vocabulary=8"),
        (-1, "tokens are numbered from 0, but the data have -1"),
    ],
)
def test_tokens_that_the_model_does_not_know_are_refused(rare: int, sentence: str, test: bool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(settings(sequences(rare, test=test)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unlabelled_inputs_of_a_target_are_looked_at_too() -> None:
    target = Unlabelled(torch.full((4, LENGTH), 7))
    with pytest.raises(ConfigError, match=r"tokens up to 7: give the model a vocabulary of 8"):
        run(settings(replace(sequences(), unlabelled=target)))


def test_a_vocabulary_of_all_tokens_is_enough() -> None:
    assert not run(settings(sequences(7), vocabulary=8)).summary["failures"]


def test_labels_at_every_position_need_predictions_there() -> None:
    with pytest.raises(ConfigError, match=r"labels of shape \[5\]; model=stacked_lstm with model\.positions=every"):
        run(settings(sequences(every=True)))
    run(settings(sequences(every=True), positions="every"))


@pytest.mark.parametrize(
    ("slot", "part"),
    [
        ("adaptation", Prototypes()),
        ("adaptation", Prototypes(training=False)),
        ("adaptation", Neighbours()),
        ("adaptation", PersonalHead()),
        ("objective", (CrossEntropy(), PrototypeAlignment())),
    ],
)
def test_parts_that_need_one_class_per_sample_are_refused_before_training(slot: str, part: Any) -> None:
    base = settings(sequences(every=True), positions="every")
    setup = replace(base, method=replace(base.method, **{slot: part}))
    with pytest.raises(ConfigError, match=rf"^{slot} '\w+' needs one class per sample, .* do not have\.$"):
        FederatedTask(setup)
    FederatedTask(replace(setup, federation=sequences(), model=settings(sequences()).model))


def test_predictions_from_tokens_that_the_model_does_not_know() -> None:
    model = fl.run("fedavg", sequences(), settings(sequences()).model, rounds=1, compute="live").trained.server
    valid, unknown = torch.ones(2, LENGTH).long(), torch.full((2, LENGTH), 9)
    assert len(model.predict(valid)) == 2
    for call in (model.predict, lambda x: model.evaluate(x, [0, 1])):
        with pytest.raises(DataError, match="tokens from 9 to 9, not all of which this model knows"):
            call(unknown)
    with pytest.raises(DataError, match="real numbers, but this model takes whole numbers"):
        model.predict(valid + 0.5)


def test_a_stream_may_bring_tokens_that_the_model_does_not_know() -> None:
    rows = np.random.default_rng(0).integers(2, size=(40, LENGTH))
    rows[35, 1:] = 9
    stream = task_stream(as_source((rows, rows[:, 0])), InOrder(train=8, test=2))
    lstm = partial(models.make, "stacked_lstm", classes=2, inputs=(LENGTH,), hidden=3, layers=1)
    setup = Online("moml", grid(Moml(), FineTune(), Local(steps=2, batch_size=4, lr=0.1), {}), stream, lstm)
    with pytest.raises(DataError, match="tokens from 0 to 9, not all of which this model knows"):
        run_online(setup)
    live = LiveLearner(OnlineTask(setup))
    for call in (lambda x: live.predict((x, rows[:8, 0]), x), lambda x: live.observe((x, rows[:8, 0]))):
        call(rows[:8])
        with pytest.raises(DataError, match="tokens from 4 to 5, not all of which this model knows"):
            call(rows[:8] % 2 + 4)


def test_a_gpu_is_given_no_token_that_the_model_does_not_know() -> None:
    """The tokens are tried on a copy on the host, and once: the block, which would run on the GPU, is not entered."""
    module, tried = nn.Embedding(5, 2), []
    module.register_forward_hook(lambda module, inputs, out: tried.append(inputs[0].tolist()))
    with refusing_unknown_tokens(module, False, torch.tensor([[1, 3], [2, 4]]), torch.zeros(2)):
        pass
    assert tried == [[[1, 3]], [[2, 4]]]
    with refusing_unknown_tokens(module, False, torch.tensor([[2, 2], [3, 1]])):
        tried.clear()
    assert not tried, "tokens between known ones were tried again"
    for unknown in (5, -1):
        with (
            pytest.raises(DataError, match="not all of which this model knows"),
            refusing_unknown_tokens(module, False, torch.tensor([[1, unknown]])),
        ):
            tried.append("entered")
    assert not tried
    with refusing_unknown_tokens(
        nn.Linear(7, 2), False, torch.tensor([[1, 9]])
    ):  # fails otherwise: the device will say so
        tried.append("entered")
    with refusing_unknown_tokens(module, True, torch.tensor([[9]])):  # the host raises the error itself
        tried.append("entered")
    assert tried == ["entered", "entered"]


def test_tokens_that_a_module_is_known_to_take_are_not_tried_again() -> None:
    """On a device: the host's copy is asked once for a range, and again beyond it."""
    calls = []

    class Counted(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.tolist())
            return super().forward(x)

    module = Counted(9, 2)
    for tokens, tries in (([1, 4], 2), ([1, 4], 2), ([2, 3], 2), ([1, 5], 4), ([0, 5], 6)):
        with refusing_unknown_tokens(module, False, torch.tensor(tokens)[:, None]):
            pass
        assert len(calls) == tries, tokens


def test_the_same_columns_standardised_alike_have_one_scale() -> None:
    def scaled(*columns: int, mean: float = 0.0) -> dict[str, Any]:
        count = len(columns)
        return {"standardised": {"columns": [*columns], "mean": [mean] * count, "deviation": [1.0] * count}}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(scaled(0, 1), scaled(0, 1), "the model")
    for scale in (scaled(0, 2), scaled(0), scaled(0, 1, mean=9.0), {}):
        with pytest.warns(UserWarning, match="learnt from inputs in another scale"):
            compare(scaled(0, 1), scale, "the model")
