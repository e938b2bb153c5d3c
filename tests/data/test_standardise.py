"""Columns of user tables: a warning if their scales differ widely, and their standardisation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedloom as fl
from fedloom import Federation
from fedloom.base.errors import ConfigError, DataError
from fedloom.data import as_source, sources
from fedloom.data.federate import federate
from fedloom.data.sources.arrays import from_tensors, standardised
from fedloom.experiment.conventions import compare

ROWS = 90


@pytest.fixture
def patients() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"pressure": rng.normal(130, 15, ROWS), "sex": rng.choice(["f", "m"], ROWS)})
    frame["batch"] = 0.1  # constant, and of a mean that rounds
    frame["hospital"] = rng.choice(["north", "south"], ROWS)
    return frame.assign(ill=np.where(frame.pressure > 130, "yes", "no"))


def of(federation: Federation) -> np.ndarray:
    return federation.train.arrays.x.numpy()


def forms(frame: pd.DataFrame, folder: Path) -> dict[str, Federation]:
    """The same federation from a frame, from a file by name, and from a source with settings."""
    frame.to_csv(folder / "patients.csv", index=False)
    settings: dict[str, Any] = {"label": "ill", "client": "hospital", "standardise": True}
    path = str(folder / "patients.csv")
    return {
        "frame": federate(frame, **settings),
        "by name": federate(f"table:{path}", **settings),
        "source": federate(sources.make("table", path=path, **settings)),
    }


def test_columns_of_numbers_have_mean_0_and_deviation_1(patients: pd.DataFrame, tmp_path: Path) -> None:
    raw = patients.pressure.to_numpy(np.float32).astype(np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federations = forms(patients, tmp_path)
    for federation in federations.values():
        assert federation.names == ("north", "south")
        pressure, female, male, batch = of(federation).T
        np.testing.assert_allclose(pressure, (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)
        assert set(female) == set(male) == {0.0, 1.0}  # categories stay as they are
        assert (batch == 0).all()
    assert len({federation.provenance["fingerprint"] for federation in federations.values()}) == 1


def test_test_rows_are_scaled_by_the_training_rows(patients: pd.DataFrame) -> None:
    train, test = patients[:60], patients[60:]
    source = as_source(train, test=test, label="ill", client="hospital", standardise=True)
    mean, deviation = train.pressure.mean(), train.pressure.std(ddof=0)
    np.testing.assert_allclose(source.test.x[:, 0], (test.pressure - mean) / deviation, rtol=1e-4, atol=1e-5)
    scaling = source.settings["standardised"]
    assert scaling["columns"] == [0, 3]
    np.testing.assert_allclose([scaling["mean"][0], scaling["deviation"][0]], [mean, deviation], rtol=1e-6)


def test_files_of_arrays_are_scaled_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(50, 5, (40, 2)), rng.integers(0, 2, 40)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:7] + 5, y_test=y[:7])
    source = sources.make("npz", path=str(tmp_path / "mine.npz"), standardise=True)
    np.testing.assert_allclose(source.train.x, (x - x.mean(0)) / x.std(0), atol=1e-4)
    np.testing.assert_allclose(source.test.x, (x[:7] + 5 - x.mean(0)) / x.std(0), atol=1e-4)


def test_what_is_no_table_of_numbers_is_refused() -> None:
    with pytest.raises(DataError, match=r"standardise=true is for samples of plain numbers \[D\], not of shape \[1, 4"):
        federate((torch.zeros(6, 1, 4, 4), np.arange(6) % 2), "iid", 2, standardise=True)
    with pytest.raises(DataError, match="standardise=true needs training samples, and there are none; leave it out"):
        standardised(from_tensors(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), classes=2))
    with pytest.raises(ConfigError, match=r"standardise= belongs to own data, .* 'digits' has no such setting"):
        federate("digits", "iid", 2, standardise=True)
    with pytest.raises(ConfigError, match="label= belongs to own data"):
        federate(sources.make("digits"), "iid", 2, label="ill")


@pytest.mark.parametrize(
    ("column", "warns"),
    [
        (np.random.default_rng(1).normal(130, 15, ROWS), True),
        (np.random.default_rng(1).normal(0, 0.001, ROWS), True),  # beside one of deviation 1
        (np.random.default_rng(1).normal(2, 1, ROWS), False),
        (np.full(ROWS, 1000.0), False),  # constant
    ],
)
def test_columns_of_very_different_scale_are_named(column: np.ndarray, warns: bool, patients: pd.DataFrame) -> None:
    other = np.random.default_rng(2).normal(0, 1, ROWS)
    frame = patients.assign(pressure=column, other=other)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        federate(frame, label="ill", client="hospital")
    assert len(records) == warns
    if warns:
        assert "has mean" in str(records[0].message)
        assert "data.standardise=true (standardise=True in Python)" in str(records[0].message)
        assert records[0].filename == __file__  # the user's own line


def test_a_table_that_trains_at_chance_is_learnt_once_standardised(patients: pd.DataFrame) -> None:
    def accuracy(**settings: Any) -> float:
        federation = fl.data.federate(patients, label="ill", client="hospital", features=["pressure"], **settings)
        return fl.run("fedavg", federation, "logistic", rounds=10).summary["final"]["clients/accuracy/mean"]

    with pytest.warns(UserWarning, match=r"column 'pressure' has mean 13\d and standard deviation 1"):
        before = accuracy()
    assert accuracy(standardise=True) > max(before, 0.85)


def test_models_and_data_are_in_another_scale_if_a_column_is() -> None:
    def conventions(mean: float, deviation: float) -> dict[str, Any]:
        return {"standardised": {"columns": ["a", "b"], "mean": [0.0, mean], "deviation": [1.0, deviation]}}

    for mean, deviation, differs in ((0.4, 1.5, False), (0.6, 1.0, True), (0.0, 2.5, True), (0.0, 0.3, True)):
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            compare(conventions(0.0, 1.0), conventions(mean, deviation), "the model")
        assert bool(records) == differs, (mean, deviation)
