"""Runs whose numbers need a word, and models that an adaptation cannot train."""

from __future__ import annotations

import pytest
import torch
from helpers.arriving import online, stream

from fedloom.base.errors import ConfigError
from fedloom.core.local import Local
from fedloom.models import models
from fedloom.parts.adaptation import Maml, Prototypes
from fedloom_apps.online import Fs, Mogd, Moml, Toe, run


def test_a_long_term_loss_that_is_unknown_leaves_no_regret() -> None:
    """The only task is predicted before the step that diverges, and evaluated after it."""
    result = run(online(Mogd(), stream(1), local=Local(steps=1, lr=1e200, clip=None)))
    assert result.history[0]["ctm/loss"] is not None
    assert result.history[0]["ltm/loss"] is None
    assert "regret_to_final_model" not in result.summary
    assert "infinite or NaN in 1 of 1 long-term evaluations: lower" in result.summary["warnings"][0]


def test_classes_without_prototypes_are_told() -> None:
    """With two training samples a task of three classes lacks one of them, to which two of six test samples belong."""
    result = run(online(Mogd(), stream(4, samples=2, test=6), adaptation=Prototypes()))
    assert [record["ctm/absent"] for record in result.history] == [2] * 4
    assert "at 4 of 4 tasks, 8 test samples were of classes without training samples" in result.summary["warnings"][0]
    for adaptation in (Prototypes(), Maml()):
        complete_run = run(
            online(Mogd(), stream(4, samples=3 if adaptation == Prototypes() else 2), adaptation=adaptation)
        )
        assert "ctm/absent" not in complete_run.history[-1]
        assert not complete_run.summary["warnings"]


def test_features_without_parameters_are_not_trained() -> None:
    """They are refused where steps go through them, and serve a learner that takes none."""

    def linear() -> torch.nn.Module:
        return models.make("logistic", classes=3, inputs=(2,))

    with pytest.raises(
        ConfigError, match="trains the features before the head, but Classifier has no parameters there"
    ):
        run(online(Moml(), model=linear, adaptation=Prototypes()))
    with pytest.raises(ConfigError, match="needs the model's features, but Linear has no"):
        run(online(Moml(), model=lambda: torch.nn.Linear(2, 3), adaptation=Prototypes()))
    for learner, adaptation in ((Fs(), Prototypes()), (Moml(), Prototypes(training=False)), (Toe(), Prototypes())):
        assert run(online(learner, model=linear, adaptation=adaptation)).summary["rounds"] == 6
