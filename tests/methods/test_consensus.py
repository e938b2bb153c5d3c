"""FedMD: steps on what the server has sent, before those on the client's samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, FEATURES, classes
from helpers.networks import tanh_net, with_norm
from helpers.runs import go
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import ConfigError, FedLoomError
from fedloom.core.context import Batch, Context, Output
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.methods import make
from fedloom.parts.drift import Scaffold
from fedloom.parts.objectives import Consensus, CrossEntropy


def test_without_epochs_clients_train_alone() -> None:
    fedmd, alone = go(make("fedmd", epochs=0), cohort=4), go("local", cohort=4)
    assert fedmd.snapshot.server.parts["objective.1"].keys() == {"inputs", "scores", "next"}
    for client, state in alone.snapshot.store:
        fedmd_state = fedmd.snapshot.store.get(client)
        assert fedmd_state is not None
        assert torch.equal(fedmd_state["personal"]["private"], state["personal"]["private"])


def test_inputs_that_are_sent_are_counted_as_what_clients_receive() -> None:
    """Nothing in the first round; in the second inputs to score; then also those of before, with their scores."""
    sent = go(make("fedmd", size=7), cohort=4).history
    inputs, scores = 7 * FEATURES, 7 * CLASSES
    assert [r["comm/down_params"] for r in sent] == [0, 4 * inputs, 4 * (2 * inputs + scores)]
    assert [r["comm/up_params"] for r in sent] == [0, 4 * scores, 4 * scores]


def test_a_lesson_brings_scores_towards_the_consensus() -> None:
    """Of one client, with steps on its own samples that are too small to matter."""
    still = Local(steps=1, batch_size=0, lr=0.1)

    def distance(epochs: int) -> float:
        method = make("fedmd", epochs=epochs, batch_size=5, lam=2.0)
        result = go(method, rounds=4, local=still)
        down = result.snapshot.server.parts["objective.1"]
        distances = [
            (result.trained.client(client).outputs(down["inputs"]) - down["scores"]).abs().mean() for client in range(6)
        ]
        return float(np.mean(distances))

    assert distance(10) < 0.7 * distance(0)


def test_batch_statistics_are_the_clients_own_and_scores_do_not_change_them() -> None:
    """The scores of the last round are those of the models that clients keep, in evaluation mode."""
    settings: dict[str, Any] = {
        "model": lambda: with_norm(tanh_net(), nn.BatchNorm1d),
        "federation": classes((6, 9, 8)),
        "local": Local(epochs=2, batch_size=3, lr=0.2),
    }
    result = go(make("fedmd", size=6, batch_size=3), **settings)
    assert not result.failures
    down = result.snapshot.server.parts["objective.1"]
    outputs = [result.trained.client(client).outputs(down["inputs"]) for client in range(3)]
    torch.testing.assert_close(torch.stack(outputs).mean(0), down["scores"])
    buffers = {client: state["personal"]["buffers"] for client, state in result.snapshot.store}
    assert not torch.equal(buffers[0], buffers[1])
    with pytest.raises(FedLoomError, match="choose another batch_size of the method, or group normalisation"):
        go(make("fedmd", size=7, batch_size=3), **settings)


class Once(Term):
    """One lesson in a round, on an input of ones."""

    def lessons(self, ctx: Context, draws: np.random.Generator) -> Iterable[Batch]:
        return [Batch(ctx.received.new_ones(1, FEATURES), ctx.received.new_zeros(1))]

    def lesson(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return out.logits.square().sum(1)


def test_what_does_not_go_with_lessons_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"other inputs than the client's samples; declare needs = Needs\(model="):
        Method("once", (CrossEntropy(), Once()))
    with pytest.raises(ConfigError, match="with objective 'consensus' local steps start elsewhere"):
        Method("both", (CrossEntropy(), Consensus()), drift=Scaffold())
    with pytest.raises(ConfigError, match="clients' outputs on the same inputs, but with schedule=buffered"):
        go("fedmd", schedule="buffered", devices="lognormal", cohort=4)
    with pytest.raises(ConfigError, match="sends unlabelled inputs to clients, but there are none"):
        go("fedmd", federation=replace(classes(), unlabelled=None))


@pytest.mark.exhaustive  # two runs of two seconds, to see that the method learns
def test_clients_of_two_architectures_learn_from_each_others_scores() -> None:
    federation = fl.data.federate("digits", "dirichlet", clients=4, target="uniform", seed=0)
    setting: dict[str, Any] = {"rounds": 6, "local": Local(epochs=2, batch_size=20, lr=0.2), "seed": 1}
    accuracy = {
        method.name: fl.run(method, federation, ["mlp", "logistic"], **setting).history[-1]["clients/accuracy/mean"]
        for method in (make("local"), make("fedmd", epochs=5))
    }
    assert accuracy["fedmd"] > accuracy["local"] + 0.01, accuracy
