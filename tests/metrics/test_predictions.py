"""Ranking and calibration against scikit-learn, direct definitions and numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, top_k_accuracy_score

from fedloom.base.errors import ConfigError
from fedloom.metrics import Predictions, auprc, auroc, direction, ece, f1, mce, predictions, r2, top_k
from fedloom.metrics.registry import lookup, view
from fedloom.parts.objectives import SquaredError

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("ties", [False, True])
def test_binary_auroc_is_scikit_learns_and_its_definition(ties: bool) -> None:
    scores, y = RANDOM.random(60), RANDOM.integers(2, size=60)
    scores = scores.round(1) if ties else scores
    pairs = scores[y == 1][:, None] - scores[y == 0]
    assert auroc(scores, y) == pytest.approx(roc_auc_score(y, scores))
    assert auroc(scores, y) == pytest.approx((pairs > 0).mean() + 0.5 * (pairs == 0).mean())
    assert auroc(np.stack([1 - scores, scores], 1), y) == pytest.approx(auroc(scores, y))


def test_auroc_of_several_classes_is_one_against_rest() -> None:
    p = RANDOM.dirichlet(np.ones(5), size=80)
    y = RANDOM.integers(5, size=80)
    assert auroc(p, y) == pytest.approx(roc_auc_score(y, p, multi_class="ovr", average="macro"))
    present = y % 2 == 0  # classes 1 and 3 are away: the mean is over those that are present
    by_hand = np.mean([roc_auc_score(y[present] == c, p[present, c]) for c in (0, 2, 4)])
    assert auroc(p[present], y[present]) == pytest.approx(by_hand)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_scores_are_log_odds_without_ties_where_probabilities_round_to_one(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    out, y = torch.randn(40, classes, generator=generator).double(), torch.randint(classes, (40,), generator=generator)
    out[torch.arange(40), y] += torch.linspace(0, 60, 40).double()
    scores, _ = view("scores", out, y, "classes")
    p = out.softmax(-1)
    scores = torch.stack([-scores, scores], 1) if classes == 2 else scores
    near = (p > 1e-12) & (p < 1 - 1e-12)
    torch.testing.assert_close(scores[near], (p / (1 - p))[near].log(), rtol=1e-3, atol=1e-3)
    rest = [torch.cat([out[:, :c], out[:, c + 1 :]], 1).logsumexp(1) for c in range(classes)]
    torch.testing.assert_close(scores, out - torch.stack(rest, 1), rtol=1e-12, atol=1e-12)
    assert (p == 1).any(0).all()
    assert all(len(column.unique()) == 40 for column in scores.T)
    assert view("scores", torch.full((2, classes), torch.nan), y[:2], "classes")[0].isnan().all()


def test_auroc_is_not_defined_for_one_class() -> None:
    assert np.isnan(auroc([0.1, 0.2], [0, 0]))
    assert np.isnan(auroc(np.eye(3), [2, 2, 2]))
    assert np.isnan(auroc([], []))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_is_scikit_learns(k: int) -> None:
    p, y = RANDOM.random((50, 5)), RANDOM.integers(5, size=50)
    assert top_k(p, y, k) == pytest.approx(top_k_accuracy_score(y, p, k=k, labels=range(5)))


def test_r2_of_a_constant_target_is_one_or_zero_whatever_its_mean_rounds_to() -> None:
    assert np.mean([0.1] * 3) != 0.1
    assert r2([0.1, 0.2, 0.3], [0.1] * 3) == 0
    assert r2([0.1] * 3, [0.1] * 3) == 1
    assert r2([[0.1, 1.0], [0.2, 2.0], [0.3, 3.0]], [[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]]) == 0.5
    assert np.isnan(r2([], []))


def test_calibration_by_hand() -> None:
    """Two bins of three are used: two samples at .5, right once; one at .9, wrong."""
    confidence, correct = [0.5, 0.6, 0.9], [1, 0, 0]
    assert ece(confidence, correct, bins=3) == pytest.approx(2 / 3 * 0.05 + 1 / 3 * 0.9)
    assert mce(confidence, correct, bins=3) == pytest.approx(0.9)


def test_bins_are_closed_above_and_there_are_fifteen() -> None:
    edge = np.arange(1, 16) / 15
    assert ece(edge, np.ones(15)) == pytest.approx(np.mean(1 - edge))
    assert mce([8 / 15, 8 / 15 - 0.01], [1, 0]) == pytest.approx(abs(0.5 - (8 / 15 - 0.005)))
    assert mce([8 / 15, 8 / 15 + 0.01], [1, 0]) == pytest.approx(8 / 15 + 0.01)


def test_calibration_of_nothing_is_nan_and_of_the_perfect_zero() -> None:
    assert np.isnan(ece([], []))
    assert np.isnan(mce([], []))
    assert ece(np.ones(4), np.ones(4)) == mce(np.ones(4), np.ones(4)) == 0


def test_calibration_of_outputs_that_are_nan_is_not_perfect() -> None:
    for confidence in ([np.nan, np.nan], [np.nan, 0.9]):
        assert np.isnan(ece(confidence, [0, 1]))
        assert np.isnan(mce(confidence, [0, 1]))


NAMES = ("accuracy", "top2", "auroc", "ece", "mce")


def test_predictions_agree_with_the_functions() -> None:
    torch.manual_seed(0)
    out, y = torch.randn(40, 4), torch.randint(4, (40,))
    measures = Predictions.concatenate([predictions(NAMES, out[:15], y[:15]), predictions(NAMES, out[15:], y[15:])])
    p = out.double().softmax(1).numpy()
    right = (out.argmax(1) == y).numpy()
    expected = {
        "loss": float(torch.nn.functional.cross_entropy(out.double(), y)),
        "accuracy": right.mean(),
        "top2": top_k(p, y, 2),
        "auroc": auroc(p, y),
        "ece": ece(p.max(1), right),
        "mce": mce(p.max(1), right),
    }
    assert {name: measures.value(name) for name in expected} == pytest.approx(expected, rel=1e-6)
    offsets = np.array([0, 7, 8, 40])
    for name in expected:
        groups = [predictions(NAMES, out[i:j], y[i:j]).value(name) for i, j in pairwise(offsets)]
        np.testing.assert_allclose(measures.by_group(name, offsets), groups, rtol=1e-6)


def test_saturated_logits_of_two_classes_are_still_ranked() -> None:
    out = torch.tensor([[0.0, 50.0], [0.0, 60.0], [0.0, 70.0]])
    assert predictions(["auroc"], out, torch.tensor([0, 1, 1])).value("auroc") == 1.0


def test_sequences_count_positions_and_padding_does_not() -> None:
    torch.manual_seed(0)
    out, y = torch.randn(3, 5, 4), torch.randint(1, 4, (3, 5))
    y[0, 2:] = y[2, 4:] = 0
    flat, labels = out.reshape(-1, 4), y.reshape(-1)
    for padding, mask in ((None, labels >= 0), (0, labels != 0)):
        measures = predictions(NAMES, out, y, padding)
        alone = predictions(NAMES, flat[mask], labels[mask])
        assert measures.count.sum() == mask.sum()
        for name in ("loss", *NAMES):
            assert measures.value(name) == pytest.approx(alone.value(name), rel=1e-6)
            last = predictions(NAMES, out[2:], y[2:], padding).value(name)
            np.testing.assert_allclose(measures.by_group(name, np.array([0, 2, 3]))[1], last, rtol=1e-6)
            assert measures.take(np.array([2])).value(name) == pytest.approx(last, rel=1e-6)
        means = torch.from_numpy(measures.sums["loss"] / measures.count)
        by_position = predictions([], out, y, padding, loss=lambda *_, means=means: means)  # a value for all positions
        assert by_position.value("loss") == pytest.approx(alone.value("loss"), rel=1e-6)


def test_a_sample_that_is_all_padding_counts_nowhere() -> None:
    out, y = torch.randn(2, 3, 4), torch.tensor([[0, 0, 0], [1, 2, 3]])
    measures = predictions(["accuracy", "auroc", "ece"], out, y, padding=0)
    for name in ("loss", "accuracy", "auroc", "ece"):
        assert np.isnan(measures.by_group(name, np.array([0, 1, 2]))[0])
        assert not np.isnan(measures.value(name))


def test_a_regression_has_a_loss_and_nothing_else() -> None:
    measures = predictions(NAMES, torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]]))
    assert measures.value("loss") == (0.5 + 4.5) / 2
    assert all(np.isnan(measures.value(name)) for name in NAMES)
    assert np.isnan(predictions(NAMES, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).value("accuracy"))


def test_the_best_class_of_several_equal_ones_is_the_one_that_is_predicted() -> None:
    """As argmax has it: the first one."""
    out, y = (
        torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [2.0, 2.0, 2.0], [0.0, 1.0, 1.0]]),
        torch.tensor([0, 1, 2, 2]),
    )
    names = ("accuracy", "top1", "top2", "top3", "top9")
    measures = predictions(names, out, y)
    assert [measures.value(name) for name in names] == [0.25, 0.25, 0.75, 1.0, 1.0]
    assert predictions(["top1"], out, torch.tensor([0, -100, -100, 1]), -100).value("top1") == 1.0
    draw = torch.randint(4, (200, 6), generator=torch.Generator().manual_seed(0)).double()
    truth = torch.randint(6, (200,), generator=torch.Generator().manual_seed(1))
    many = predictions(["accuracy", "top1", "top3"], draw, truth)
    assert many.value("accuracy") == many.value("top1")
    assert many.value("top3") == top_k(draw, truth, 3)


def test_predictions_that_are_nan_are_neither_right_nor_wrong() -> None:
    names = ["accuracy", "top1", "top2", "f1", "balanced_accuracy"]
    measures = predictions(names, torch.full((4, 3), torch.nan), torch.tensor([0, 0, 0, 1]))
    assert all(np.isnan(measures.value(name)) for name in names)
    names = ["accuracy", "f1", "exact_match"]
    measures = predictions(names, torch.full((4, 2), torch.nan), torch.zeros(4, 2), declared="truth values")
    assert all(np.isnan(measures.value(name)) for name in names)


def test_one_truth_value_has_one_f1_whatever_its_shape() -> None:
    out, y = torch.tensor([1.0, -1.0, 2.0, -3.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    for targets in (y, y[:, None], y.long()):
        assert predictions(["f1"], out[:, None], targets, declared="truth values").value("f1") == 0.5
    assert f1([0.9, 0.2, 0.8, 0.1], [1, 1, 0, 0]) == 0.5
    assert f1(np.array([[0.9], [0.2], [0.8]]), np.array([[1], [1], [0]])) == 0.5


def test_numbers_without_an_axis_for_them() -> None:
    out, y = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0])
    for loss in (None, SquaredError().test_loss):
        assert predictions(["rmse"], out, y, loss=loss).value("loss") == (0.5 + 4.5) / 2


def test_directions() -> None:
    higher = ("global/accuracy", "clients/auroc/worst10", "average/top5")
    lower = ("global/loss", "global/train_mae", "clients/loss/mean", "global/ece", "clients/accuracy/gini")
    assert {direction(key) for key in higher} == {"max"}
    assert {direction(key) for key in lower} == {"min"}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: auprc([0.9, 0.1], [1, 0, 1]), "2 rows of scores but 3 labels"),
        (lambda: f1([[0.9, 0.1]], [0, 1, 0]), "1 rows of scores but 3 labels"),
        (lambda: lookup("top0"), "unknown metric 'top0'"),
        (lambda: lookup("top"), "unknown metric 'top'"),
        (lambda: lookup("acuracy"), "did you mean 'accuracy'"),
    ],
)
def test_wrong_use_ends_in_a_sentence(call, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()
