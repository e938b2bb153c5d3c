"""The judge on sets with known answers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.base.errors import ConfigError, DataError
from fedloom.base.rng import stream
from fedloom.core.federation import Arrays, Federation
from fedloom.data import federate, sources
from fedloom_apps.synthesis.judge import (
    ClassifierTraining,
    EvalConfig,
    EvalResult,
    FittedClassifier,
    SyntheticEvaluator,
    fit,
)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return federate("digits", "dirichlet", clients=5, seed=2)


@pytest.fixture(scope="module")
def judge(federation: Federation) -> SyntheticEvaluator:
    return SyntheticEvaluator(federation, EvalConfig(classifier="mlp", max_steps=1500))


def class_samples(arrays: Arrays, count: int = 20) -> Arrays:
    """A number of random samples of each class."""
    draws = stream(0, "some")
    rows = [draws.permutation((arrays.y == c).nonzero()[:, 0].numpy())[:count] for c in range(arrays.classes)]
    return arrays.take(torch.cat([torch.from_numpy(part) for part in rows]))


@pytest.fixture(scope="module")
def copies(judge: SyntheticEvaluator) -> EvalResult:
    return judge.evaluate(class_samples(judge.training_samples))


def test_real_training_images_teach_are_recognised_and_are_found_to_be_copies(copies: EvalResult) -> None:
    numbers = copies.numbers
    assert numbers["synthetic/accuracy"] > 0.85
    assert numbers["synthetic/clients/accuracy/mean"] > 0.85
    assert numbers["synthetic/train_accuracy"] > 0.97
    assert numbers["synthetic/recognised"] > 0.93
    assert numbers["synthetic/copies"] > 0.95
    assert numbers["synthetic/membership_auc"] > 0.95
    assert numbers["synthetic/members_p"] < 1e-6
    assert numbers["synthetic/nearest"] == 0
    assert numbers["synthetic/diversity"] == pytest.approx(1, abs=0.15)
    assert numbers["synthetic/coverage"] > 0.8
    assert copies.details["features"] == "mlp trained on digits"


@pytest.mark.exhaustive
def test_fresh_real_images_are_no_copies(judge: SyntheticEvaluator, federation: Federation, copies: EvalResult) -> None:
    held_out = federation.held_out
    fresh = judge.evaluate(class_samples(held_out.arrays.take(held_out.index.rows), count=15)).numbers
    assert fresh["synthetic/accuracy"] > 0.8
    assert fresh["synthetic/copies"] < 0.1
    assert fresh["synthetic/members_p"] > 0.001
    assert fresh["synthetic/fid"] < 3 * copies.numbers["synthetic/fid"] + 5


def test_noise_teaches_nothing(judge: SyntheticEvaluator, copies: EvalResult) -> None:
    y = torch.arange(10).repeat_interleave(20)
    noise = Arrays(torch.from_numpy(stream(1, "noise").random((200, 1, 8, 8))).float(), y, 10)
    numbers = judge.evaluate(noise).numbers
    assert numbers["synthetic/accuracy"] < 0.35
    assert numbers["synthetic/recognised"] < 0.35
    assert numbers["synthetic/fid"] > 3 * copies.numbers["synthetic/fid"]
    assert numbers["synthetic/kid"] > copies.numbers["synthetic/kid"]
    assert numbers["synthetic/copies"] < 0.1


@pytest.mark.exhaustive
def test_one_image_a_class_is_no_diversity(judge: SyntheticEvaluator, copies: EvalResult) -> None:
    once = class_samples(judge.training_samples, count=1)
    same = once.take(torch.arange(10).repeat_interleave(20))
    numbers = judge.evaluate(same, thorough=False).numbers
    assert numbers["synthetic/diversity"] == pytest.approx(0, abs=1e-6)
    assert numbers["synthetic/coverage"] < 0.5 * copies.numbers["synthetic/coverage"]
    assert numbers["synthetic/recognised"] > 0.8
    assert "synthetic/copies" not in numbers


@pytest.mark.exhaustive
def test_wrong_labels_are_not_recognised(judge: SyntheticEvaluator) -> None:
    right = class_samples(judge.training_samples)
    wrong = replace(right, y=(right.y + 1) % 10)
    numbers = judge.evaluate(wrong, thorough=False).numbers
    assert numbers["synthetic/recognised"] < 0.05
    assert numbers["synthetic/accuracy"] < 0.1


def test_images_in_another_range_are_refused(judge: SyntheticEvaluator) -> None:
    few = class_samples(judge.training_samples, count=2)
    with pytest.raises(DataError, match="the same range"):
        judge.evaluate(replace(few, x=2 * few.x - 1))


def test_clients_own_test_samples_stand_in_for_a_test_set(federation: Federation) -> None:
    test = federation.test
    without = replace(federation, test=replace(test, x=test.x[:0], y=test.y[:0]))
    judge = SyntheticEvaluator(without, EvalConfig(max_steps=30))
    assert len(judge.test) == federation.held_out.index.sizes.sum()
    numbers = judge.evaluate(class_samples(judge.training_samples, count=5), thorough=False).numbers
    assert "synthetic/accuracy" not in numbers
    assert "synthetic/clients/accuracy/mean" in numbers


def test_without_anything_held_out_there_is_no_judge() -> None:
    federation = federate("digits", "iid", clients=2, held_out=0.0)
    test = federation.test
    with pytest.raises(ConfigError, match="test samples"):
        SyntheticEvaluator(replace(federation, test=replace(test, x=test.x[:0], y=test.y[:0])))


def test_a_set_by_class_needs_classes_that_mean_the_same_at_all_clients(federation: Federation) -> None:
    split = federation.train
    relabelled = replace(federation, train=replace(split, relabel=torch.arange(10).flip(0).repeat(len(split), 1)))
    with pytest.raises(ConfigError, match="number the classes differently"):
        SyntheticEvaluator(relabelled)


@pytest.mark.exhaustive
def test_training_ends_when_nothing_is_left_to_learn() -> None:
    few = class_samples(sources.make("digits").train, count=10)
    classifier = fit("mlp", few, ClassifierTraining(augment=()), seed=0)
    assert classifier.steps < 2000
    assert classifier.loss < 0.05
    assert classifier.accuracy == 1
    again = fit("mlp", few, ClassifierTraining(augment=()), seed=0)
    assert again.loss == classifier.loss, "a function of its arguments"
    assert fit("mlp", few, ClassifierTraining(augment=()), seed=1).loss != classifier.loss


def test_batch_normalisation_never_sees_a_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven samples in batches of five: a single sample is left at the end of a pass."""
    normalised = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    monkeypatch.setattr("fedloom_apps.synthesis.judge.classifier", lambda name, arrays: deepcopy(normalised))
    eleven = sources.make("digits").train.take(torch.arange(11))
    assert fit("normalised", eleven, ClassifierTraining(batch_size=5, max_steps=9, augment=()), seed=0).steps == 9


@pytest.mark.parametrize("wrong", [{"every": -1}, {"per_class": 0}, {"lr": 0.0}, {"max_steps": 0}, {"batch_size": 1}])
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        EvalConfig(**wrong)


def test_the_real_classifier_sees_only_samples_that_clients_train_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fitted = []

    def record_fit(name: str, arrays: Arrays, *settings: Any, **more: Any) -> FittedClassifier:
        fitted.append(arrays)
        return fit(name, arrays, *settings, **more)

    monkeypatch.setattr("fedloom_apps.synthesis.judge.fit", record_fit)
    dealt = federate("digits", "iid", clients=5, seed=2, validation=0.1, held_out=0.2, unseen=0.2)
    other = federate("digits", "iid", clients=5, seed=3, validation=0.1, held_out=0.2, unseen=0.2)
    few = EvalConfig(classifier="mlp", max_steps=2)
    for federation in (dealt, other, dealt):
        _ = SyntheticEvaluator(federation, few, cache=tmp_path).real_classifier
    split = dealt.train.first(dealt.seen)
    assert dealt.seen == 4
    assert [len(arrays) for arrays in fitted] == [len(split.index.rows), len(other.train.first(4).index.rows)]
    assert torch.equal(fitted[0].x, dealt.train.arrays.x[torch.from_numpy(split.index.rows).sort().values])
    assert len(list(tmp_path.glob("real-*"))) == 2
