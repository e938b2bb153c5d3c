"""What user-defined data may look like by mistake: gaps in class numbers, channels last, numbers instead of classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

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
        federation = federate((X, y), "iid", 4)
    assert federation.train.arrays.classes == highest + 1
    np.testing.assert_array_equal(federation.train.arrays.y, y)


def test_channels_last_in_floats_are_warned_of_once() -> None:
    images = np.zeros((60, 8, 8, 3))
    with pytest.warns(
        UserWarning, match=r"shape \[8, 8, 3\], which look like images with their channels last"
    ) as records:
        federate((images, Y), "iid", 4, test=(images, Y))
    assert len(records) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate((np.zeros((60, 3, 8, 8)), Y), "iid", 4)
        federate((np.zeros((60, 8, 50, 1)), Y), "iid", 4)  # eight channels of a series
        federate((np.zeros((60, 8, 8, 3), dtype=np.uint8), Y), "iid", 4)


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8)])
def test_images_of_large_values_are_warned_of_once(shape: tuple[int, ...], tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (60, *shape)).astype(np.float32)
    message = (
        rf"samples of shape \[{', '.join(map(str, shape))}\] hold values up to 25\d, with which models train poorly"
    )
    with pytest.warns(UserWarning, match=f"own data: {message}") as records:
        federate((pixels, Y), "iid", 4, test=(pixels, Y))
    assert len(records) == 1
    np.savez(tmp_path / "mine.npz", x_train=pixels, y_train=Y)
    with pytest.warns(UserWarning, match=f"mine: {message}"):
        federate(f"npz:{tmp_path / 'mine.npz'}", "iid", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate((pixels / 255, Y), "iid", 4)
        federate(((pixels - pixels.mean()) / pixels.std(), Y), "iid", 4)
        federate((pixels.astype(np.uint8), Y), "iid", 4)
        sparse = np.zeros((60, *shape))
        sparse[..., 0, 0] = 20.0  # one bright pixel after normalisation
        federate((sparse, Y), "iid", 4)


def test_of_mapped_images_only_some_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x_train.npy", np.full((600, 3, 8, 8), 255, np.float32))
    np.save(tmp_path / "y_train.npy", np.tile(Y, 10))
    sizes = []

    def abs_with_count(self: torch.Tensor) -> torch.Tensor:
        sizes.append(len(self))
        return torch.abs(self)

    monkeypatch.setattr(torch.Tensor, "abs", abs_with_count)
    with pytest.warns(UserWarning, match="hold values up to 255"):
        federate(f"npz:{tmp_path}", "iid", 4)
    assert max(sizes) <= 16


def test_texts_that_hardly_repeat_are_no_categories() -> None:
    """Names, numbers of records and sentences: no new row has the same ones."""
    table = pd.DataFrame({"age": X[:, 0], "name": [f"n{row}" for row in range(60)], "risk": Y})
    with pytest.warns(UserWarning, match="column 'name' has 60 different texts in 60 rows, each of which becomes an"):
        federate(table, "iid", 4, label="risk")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate(table.assign(name=[f"n{row % 25}" for row in range(60)]), "iid", 4, label="risk")
        federate(table[:20], "iid", 4, label="risk")


@pytest.mark.parametrize("strange", ["unknown", "170,5"])
def test_numbers_beside_texts_are_no_categories(strange: str) -> None:
    """A single cell turns a column of numbers in a file into one of texts."""
    sizes = [str(150 + row % 28) for row in range(59)] + [strange]
    with pytest.warns(UserWarning, match=f"'size' holds numbers, but also texts like '{strange}', .* 29 values"):
        federate(pd.DataFrame({"age": X[:, 0], "size": sizes, "risk": Y}), "iid", 4, label="risk")


@pytest.mark.parametrize("date", ["2024-01-{}", "{}.01.2024", "2024/1/{} 10:30"])
def test_dates_in_texts_are_refused_as_dates_are(date: str) -> None:
    table = pd.DataFrame({"age": X[:, 0], "seen": [date.format(1 + row % 3) for row in range(60)], "risk": Y})
    with pytest.raises(FedLoomError, match="column 'seen' holds dates; turn it into numbers, or leave it out"):
        federate(table, "iid", 4, label="risk")
    federate(table.assign(seen=[*table.seen[:59], "never"]), "iid", 4, label="risk")


def test_a_column_that_counts_the_rows_is_warned_of() -> None:
    table = pd.DataFrame({"age": X[:, 0], "id": np.arange(60), "risk": Y})
    with pytest.warns(UserWarning, match="column 'id' counts the rows and is an input"):
        federate(table, "iid", 4, label="risk", standardise=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate(table, "iid", 4, label="risk", standardise=True, features=["age", "id"])
        federate(table.sample(frac=1.0, random_state=0), "iid", 4, label="risk", standardise=True)
        federate(table[:20], "iid", 4, label="risk", standardise=True)


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


SITE = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "sex": np.where(X[:, 2] > 0, "f", "m"), "ill": Y})
LACKING = [np.nan, np.nan, *X[2:, 0]]


def test_tables_of_clients_are_joined_by_the_names_of_their_columns() -> None:
    turned = SITE[["sex", "ill", "b", "a"]]
    straight, mixed = (federate([SITE, other], label="ill", held_out=0.0).train.arrays for other in (SITE, turned))
    assert torch.equal(straight.x, mixed.x)
    assert torch.equal(straight.y, mixed.y)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SITE.assign(ward="A").drop(columns="b"), r"not all tables have the columns 'b', 'ward'; give data.features "),
        (SITE.assign(a="1,5"), r"column 'a' holds numbers in some tables and texts in others; convert it"),
        (pd.concat([SITE, SITE[["b"]]], axis=1), r"several columns named 'b'"),
    ],
)
def test_tables_of_clients_with_unlike_columns_are_refused(other: pd.DataFrame, message: str) -> None:
    with pytest.raises(FedLoomError, match=message):
        federate([SITE, other], label="ill", held_out=0.0)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "complex": (lambda: federate((X + 1j, Y), "iid", 5), r"x holds complex numbers"),
    "masked inputs": (lambda: federate((np.ma.masked_greater(X, 1), Y), "iid", 5), r"x has \d+ masked values; fill"),
    "masked labels": (lambda: federate((X, np.ma.masked_equal(Y, 1)), "iid", 5), r"y has \d+ masked values; fill"),
    "masked clients": (lambda: federate((X, Y), client=np.ma.masked_equal(Y, 1)), r"client has \d+ masked values"),
    "sparse inputs": (
        lambda: federate((torch.zeros(60, 3).to_sparse(), Y), "iid", 5),
        r"x is a sparse tensor; .*x\.to_d",
    ),
    "sparse labels": (lambda: federate((X, torch.ones(60).to_sparse()), "iid", 5), r"y is a sparse tensor"),
    "beyond float32": (
        lambda: federate((1e200 * X.astype(float), Y), "iid", 5),
        r"NaN or infinity in \d+ of 60 samples, .*; .* scale numbers beyond float32",
    ),
    "a complex column": (
        lambda: federate(SITE.assign(a=1j), "iid", 5, label="ill"),
        r"column 'a' holds complex numbers",
    ),
    "two data sets of a client": (lambda: federate({"1": (X, Y), 1: (X, Y)}), r"two data sets .* client '1'; join"),
    "images of whole numbers": (
        lambda: federate((np.zeros((60, 8, 8), np.uint16), Y), "iid", 5),
        r"give images as bytes, uint8",
    ),
    "several columns that lack values": (
        lambda: federate(SITE.assign(a=LACKING, b=LACKING[::-1], sex=None), "iid", 5, label="ill"),
        r"has missing values, column 'a' in 2, column 'b' in 2, column 'sex' in 60 of 60 rows; fill or drop them, as",
    ),
    "a client as number and text": (
        lambda: federate((X, Y), client=np.array([1, "1"] * 30, object)),
        r"client 1 is a text in some samples and a number in others",
    ),
    "a client as number and text in a table": (
        lambda: federate(SITE.assign(who=[1, "1"] * 30), label="ill", client="who"),
        r"client 1 is a text in some samples and a number in others",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_samples_that_are_no_numbers_or_no_one_client_s_are_refused(case: str) -> None:
    call, sentence = REFUSED[case]
    with pytest.raises(FedLoomError, match=sentence):
        call()


def test_classes_that_only_test_samples_have_are_named() -> None:
    income = np.where(Y > 0, ">50K", "<=50K")
    dotted = np.char.add(income, ".")
    with pytest.raises(FedLoomError, match=r"only test samples have the classes '<=50K\.', '>50K\.', and no training"):
        federate((X, income), "iid", 4, test=(X, dotted))
    with pytest.raises(FedLoomError, match="only test samples have the classes 'a', 'b', 'c', and no training sample"):
        federate((X, Y), "iid", 4, test=(X, np.array(["a", "b", "c"])[Y]))
    with pytest.warns(UserWarning, match=r"only test samples have the class '<=50K\.', which no model can learn"):
        federate((X, income), "iid", 4, test=(X, np.where(Y > 0, income, dotted)))
    with pytest.warns(UserWarning, match="only test samples have the class 3, which"):
        federate((X, Y), "iid", 4, test=(X, Y + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate((X, Y), "iid", 4, test=(X[:1], Y[:1]))
