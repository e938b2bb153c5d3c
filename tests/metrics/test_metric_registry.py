"""Metrics by name: scikit-learn's numbers for every kind of targets, and metrics that users add."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.targets import CLASSES, NUMBERS, TRUTHS, TargetKind
from fedloom.metrics import direction, lookup, predictions, registry

TORCH = torch.Generator().manual_seed(0)
OUT, TRUE = torch.randn(60, 3, generator=TORCH), torch.randint(0, 3, (60,), generator=TORCH)
P = OUT.double().softmax(1).numpy()
BINARY, TRUTH = torch.randn(60, 1, generator=TORCH), torch.randint(0, 2, (60,), generator=TORCH)
MANY, LABELS = torch.randn(60, 4, generator=TORCH), (torch.rand(60, 4, generator=TORCH) < 0.4).float()
FITTED, REAL = torch.randn(60, 2, generator=TORCH), torch.randn(60, 2, generator=TORCH)
ONES = (BINARY[:, 0] > 0).numpy()
SEVERAL = (MANY > 0).numpy()

CASES: list[tuple[str, Tensor, Tensor, TargetKind, float]] = [
    ("f1", OUT, TRUE, CLASSES, sk.f1_score(TRUE, P.argmax(1), average="macro")),
    ("balanced_accuracy", OUT, TRUE, CLASSES, sk.balanced_accuracy_score(TRUE, P.argmax(1))),
    ("auroc", OUT, TRUE, CLASSES, sk.roc_auc_score(TRUE, P, multi_class="ovr")),
    ("auprc", OUT, TRUE, CLASSES, np.mean([sk.average_precision_score(c == TRUE, P[:, c]) for c in range(3)])),
    ("f1", OUT[:, :2], TRUTH, CLASSES, sk.f1_score(TRUTH, OUT[:, :2].argmax(1))),
    ("accuracy", BINARY, TRUTH, TRUTHS, sk.accuracy_score(TRUTH, ONES)),
    ("f1", BINARY, TRUTH, TRUTHS, sk.f1_score(TRUTH, ONES)),
    ("auroc", BINARY, TRUTH, TRUTHS, sk.roc_auc_score(TRUTH, BINARY[:, 0])),
    ("auprc", BINARY, TRUTH, TRUTHS, sk.average_precision_score(TRUTH, BINARY[:, 0])),
    ("loss", BINARY, TRUTH, TRUTHS, sk.log_loss(TRUTH, BINARY[:, 0].double().sigmoid())),
    ("accuracy", MANY, LABELS, TRUTHS, 1 - sk.hamming_loss(LABELS, SEVERAL)),
    ("exact_match", MANY, LABELS, TRUTHS, sk.accuracy_score(LABELS, SEVERAL)),
    ("f1", MANY, LABELS, TRUTHS, sk.f1_score(LABELS, SEVERAL, average="macro")),
    ("auroc", MANY, LABELS, TRUTHS, sk.roc_auc_score(LABELS, MANY, average="macro")),
    ("auprc", MANY, LABELS, TRUTHS, sk.average_precision_score(LABELS, MANY, average="macro")),
    ("rmse", FITTED, REAL, NUMBERS, np.sqrt(sk.mean_squared_error(REAL, FITTED))),
    ("mae", FITTED, REAL, NUMBERS, sk.mean_absolute_error(REAL, FITTED)),
    ("r2", FITTED, REAL, NUMBERS, sk.r2_score(REAL, FITTED)),
    ("rmse", BINARY, REAL[:, 0], NUMBERS, np.sqrt(sk.mean_squared_error(REAL[:, 0], BINARY[:, 0]))),
]


@pytest.mark.parametrize(("name", "out", "y", "kind", "expected"), CASES)
def test_metrics_are_scikit_learns(name: str, out: Tensor, y: Tensor, kind: TargetKind, expected: float) -> None:
    names = [] if name == "loss" else [name]
    assert predictions(names, out, y, declared=kind).value(name) == pytest.approx(float(expected), rel=1e-6)
    offsets = np.array([0, 20, 45, 60])
    groups = [predictions(names, out[a:b], y[a:b], declared=kind).value(name) for a, b in pairwise(offsets)]
    np.testing.assert_allclose(predictions(names, out, y, declared=kind).by_group(name, offsets), groups, rtol=1e-6)
    double = predictions(names, torch.cat([out, -out]), torch.cat([y, y]), declared=kind).split(2)
    assert double[0].value(name) == pytest.approx(float(expected), rel=1e-6)


def test_calibration_of_several_labels_counts_each() -> None:
    p = MANY.double().sigmoid().numpy().ravel()
    right = SEVERAL.ravel() == LABELS.numpy().ravel()
    measures = predictions(["ece"], MANY, LABELS, declared=TRUTHS)
    assert measures.value("ece") == pytest.approx(fl.metrics.ece(np.maximum(p, 1 - p), right))
    last = fl.metrics.ece(np.maximum(p, 1 - p)[160:], right[160:])
    assert measures.by_group("ece", np.array([0, 40, 60]))[1] == pytest.approx(last)


def test_a_metric_of_one_s_own(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_METRICS", dict(registry._METRICS))

    @fl.metrics.metric(direction="min", of="probabilities")
    def brier(p, y):
        """The Brier score."""
        return ((p - np.eye(p.shape[1])[y]) ** 2).sum(1).mean()

    assert direction("clients/brier/mean") == "min"
    assert lookup("brier").summary == "The Brier score."
    assert predictions(["brier"], OUT, TRUE).value("brier") == pytest.approx(((P - np.eye(3)[TRUE]) ** 2).sum(1).mean())
    assert np.isnan(predictions(["brier"], FITTED, REAL).value("brier"))
    result = fl.run(
        "fedavg", fl.data.federate("digits", "iid", 4), "logistic", rounds=1,
        evaluation={"metrics": ["brier"], "metric": "clients/brier/mean"},
    )  # fmt: skip
    assert {"global/brier", "clients/brier/worst10"} <= result.history[-1].keys()
    assert result.history[-1]["clients/brier/worst10"] >= result.history[-1]["clients/brier/mean"]
    assert result.summary["headline"] == "clients/brier/mean"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda p, y: None, "the metric 'mine' returned None, but it must return one number"),
        (lambda p, y: "0.5", "the metric 'mine' returned '0.5', but"),
        (lambda p, y: p.mean(0), r"the metric 'mine' returned an ndarray of shape \[3\], but"),
        (lambda p, y: torch.zeros(2), r"returned a Tensor of shape \[2\], but"),
        (
            lambda p, y: 1 / 0,
            "'mine' raises ZeroDivisionError on probabilities .*: division by zero; where it",
        ),
        (lambda p, y: p @ y, r"'mine' raises ValueError on probabilities \[60, 3\] and targets \[60\]: matmul"),
    ],
)
def test_a_metric_that_gives_no_number_ends_in_a_sentence(function, sentence: str, monkeypatch) -> None:
    monkeypatch.setattr(registry, "_METRICS", dict(registry._METRICS))
    fl.metrics.metric("mine", of="probabilities")(function)
    with pytest.raises(ConfigError, match=sentence):
        predictions(["mine"], OUT, TRUE).value("mine")
    with pytest.raises(ConfigError, match="the metric 'mine'"):
        fl.run("fedavg", fl.data.federate("digits", "iid", 4), "logistic", rounds=1, evaluation={"metrics": ["mine"]})


def test_a_metric_may_return_any_scalar(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_METRICS", dict(registry._METRICS))
    for name, value in {"a": 0.5, "b": np.float32(0.5), "c": torch.tensor(0.5), "d": np.array(0.5)}.items():
        fl.metrics.metric(name)(lambda p, y, value=value: value)
        assert predictions([name], OUT, TRUE).value(name) == 0.5


def test_a_cell_of_a_notebook_that_defines_a_metric_may_run_again(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_METRICS", dict(registry._METRICS))

    def run_cell(value: float) -> None:
        @fl.metrics.metric()
        def constant(out, y):
            return value

    run_cell(0.25)
    run_cell(0.75)
    assert predictions(["constant"], OUT, TRUE).value("constant") == 0.75
    with pytest.raises(ConfigError, match="there is already a metric 'constant'"):
        fl.metrics.metric("constant")(max)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fl.metrics.metric("accuracy")(max), "there is already a metric 'accuracy'"),
        (lambda: fl.metrics.metric("a/b")(max), "cannot be called 'a/b'"),
        *(
            (lambda name=name: fl.metrics.metric(name)(max), f"cannot be called '{name}'")
            for name in ("loss", "n", "client")
        ),
        (lambda: fl.metrics.metric(direction="up"), "no direction 'up'"),  # type: ignore[arg-type]
        (lambda: fl.metrics.metric(of="logit"), "cannot be a function of 'logit'"),  # type: ignore[arg-type]
        (lambda: fl.metrics.metric(max), "with parentheses"),  # type: ignore[arg-type]
        (lambda: fl.metrics.lookup("aucpr"), "did you mean 'auprc'"),
    ],
)
def test_wrong_use_ends_in_a_sentence(call, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()
