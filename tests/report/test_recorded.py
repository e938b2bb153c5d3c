"""What runs record only for the page: clients' labels, and the bins of the calibration error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from helpers.pages import figures_of

from fedloom import methods
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models
from fedloom_apps.report import build


def test_the_partition_and_the_bins_of_the_calibration_error(tmp_path: Path) -> None:
    federation = federate("digits", "dirichlet", clients=5, seed=1)
    make = lambda: models.make("logistic", classes=10, inputs=(1, 8, 8))  # noqa: E731
    evaluation = Evaluation(("global", "clients"), metrics=("accuracy", "ece"))
    result = run(Experiment(methods.fedavg(), federation, make, rounds=2, evaluation=evaluation), tmp_path / "run")
    figures = {figure["name"]: figure for figure in figures_of(build([tmp_path / "run"], tmp_path / "page"))}

    split = federation.train
    counts = np.zeros((10, 5))
    for client in range(5):
        rows = split.index.rows[split.index.owners == client]
        np.add.at(counts[:, client], split.arrays.y.numpy()[rows], 1)
    stored = parquet.read_table(tmp_path / "run" / "partition.parquet").to_pandas()
    np.testing.assert_array_equal(counts[stored["label"], stored["client"]], stored["samples"])
    assert stored["samples"].sum() == counts.sum()
    np.testing.assert_array_equal(figures["partition"]["z"], counts)

    record = result.history[-1]
    share, sure, right = np.array(record["global/reliability"]).T
    assert share.sum() == pytest.approx(1)
    assert share @ np.abs(sure - right) == pytest.approx(record["global/ece"])
    (line,) = figures["reliability"]["series"]
    np.testing.assert_allclose([line["x"][0], line["y"]], [sure[share > 0], right[share > 0]], rtol=1e-5)


@pytest.mark.parametrize("method", ["fedper", "superfed_mm", "heterofl", "fedavg"])
def test_the_bins_of_all_clients_models_are_those_of_their_predictions(method: str, tmp_path: Path) -> None:
    federation = federate("digits", "dirichlet", clients=4, seed=1, validation=0.2)
    make = lambda: models.make("mlp", classes=10, inputs=(1, 8, 8), hidden=(6,))  # noqa: E731
    evaluation = Evaluation(("clients",), metrics=("accuracy", "ece"))
    experiment = Experiment(methods.make(method), federation, make, rounds=2, evaluation=evaluation)
    result = run(experiment, tmp_path / "run")
    sure, right = [], []
    for client in range(4):
        samples = federation.held_out.client(client)
        p = result.trained.client(client).outputs(samples.x).double().softmax(1)
        sure.append(p.amax(1).numpy())
        right.append((p.argmax(1) == samples.y).numpy())
    confidence, correct = np.concatenate(sure), np.concatenate(right)
    expected = np.zeros((15, 3))
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            expected[low] = inside.mean(), confidence[inside].mean(), correct[inside].mean()
    np.testing.assert_allclose(result.history[-1]["clients/reliability"], expected, atol=1e-6)
    names = {figure["name"] for figure in figures_of(build([tmp_path / "run"], tmp_path / "page"))}
    assert ("reliability_clients" in names, "reliability" in names) == (True, False)
