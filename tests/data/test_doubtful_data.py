"""What user-defined data may look like by mistake: gaps in class numbers, channels last, numbers instead of classes."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

from fedloom import FedLoomError, run
from fedloom.data import federate

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = RNG.integers(0, 3, 60)


@pytest.mark.parametrize(
    ("y", "used", "highest"), [(Y + 1, 3, 3), (1000 * Y + 1000, 3, 3000), (Y + 4 * (Y == 2), 3, 6)]
)
def test_class_numbers_with_gaps_are_kept_and_warned_of(y: np.ndarray, used: int, highest: int) -> None:
    with pytest.warns(UserWarning, match=f"of 0 to {highest} only {used} have samples.* for all {highest + 1}"):
        made = federate((X, y), "iid", 4)
    assert made.train.arrays.classes == highest + 1
    np.testing.assert_array_equal(made.train.arrays.y, y)


def test_channels_last_in_floats_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"shape \[8, 8, 3\], which look like images with their channels last"):
        federate((np.zeros((60, 8, 8, 3)), Y), "iid", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate((np.zeros((60, 3, 8, 8)), Y), "iid", 4)
        federate((np.zeros((60, 8, 50, 1)), Y), "iid", 4)  # eight channels of a series
        federate((np.zeros((60, 8, 8, 3), dtype=np.uint8), Y), "iid", 4)


def test_texts_that_hardly_repeat_are_no_categories() -> None:
    """Names, numbers of records and sentences: no new row has the same ones."""
    table = pd.DataFrame({"age": X[:, 0], "name": [f"n{row}" for row in range(60)], "risk": Y})
    with pytest.warns(UserWarning, match="column 'name' has 60 different texts in 60 rows, each of which becomes an"):
        federate(table, "iid", 4, label="risk")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate(table.assign(name=[f"n{row % 25}" for row in range(60)]), "iid", 4, label="risk")
        federate(table[:20], "iid", 4, label="risk")


def test_a_class_without_samples_is_no_gap() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate((X, np.where(Y == 1, 3, Y)), "iid", 4)
        federate((X, np.array(["b", "c", "d"])[Y]), "iid", 4)


@pytest.mark.parametrize(
    ("y", "advice"),
    [
        (Y.astype(float), r"\[squared_error\]; or give class numbers as integers\."),
        (np.eye(3)[Y], r"\[binary_cross_entropy\]; or give class numbers, the argmax of each row\."),
        (Y + 0.5, r"\[squared_error\]\."),
        (np.eye(3)[Y] + np.eye(3)[0] * (Y[:, None] > 0), r"\[binary_cross_entropy\]\."),
    ],
)
def test_floats_that_may_be_classes_are_refused_with_both_ways_out(y: np.ndarray, advice: str) -> None:
    with pytest.raises(FedLoomError, match=advice):
        run("fedavg", federate((X, y), "iid", 4), "logistic", rounds=1)
