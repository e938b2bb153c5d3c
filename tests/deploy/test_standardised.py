"""Inputs that the recipe standardises are scaled once: at a node, when dealt, and in predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.deploying import InProcess, config, in_process, simulation

import fedloom as fl
from fedloom.base.errors import ConfigError, DataError
from fedloom.cli import main
from fedloom.data.sources.arrays import rescaled
from fedloom_apps.deploy.data import read
from fedloom_apps.deploy.node import Node
from fedloom_apps.deploy.recipe import Recipe
from fedloom_apps.deploy.server import run

WORDS = ("data.standardise=true", "model=logistic", "partition=iid", "clients=3", "deploy.nodes=3", "rounds=2",
         "held_out=0.25", "validation=0.1", "evaluation.what=[clients]")  # fmt: skip
COLUMNS = ["a", "b", "c"]


def samples(rows: int = 90, seed: int = 0) -> pd.DataFrame:
    """Columns of unlike scale, and a label that depends on them."""
    x = np.random.default_rng(seed).normal(size=(rows, 3))
    table = pd.DataFrame(x * [50, 1, 200] + [100, 0, 5], columns=COLUMNS)
    return table.assign(label=(x.sum(1) > 0).astype(int))


def stored(folder: Path, kind: str, table: pd.DataFrame, name: str = "server") -> str:
    """The word ``data=…`` of samples in a file."""
    path = folder / name
    if kind == "table":
        table.to_csv(path := path.with_suffix(".csv"), index=False)
        return f"data=table:{path}"
    x = table[COLUMNS].to_numpy()
    x = np.rint(x).astype(np.int64) if kind == "whole" else x
    np.savez(path := path.with_suffix(".npz"), x_train=x, y_train=table["label"])
    return f"data=npz:{path}"


def predicted(capsys: pytest.CaptureFixture[str], directory: Path, path: Path | str) -> list[int]:
    capsys.readouterr()
    assert main(["predict", f"run={directory}", str(path)]) == 0
    return [int(line) for line in capsys.readouterr().out.split()]


@pytest.mark.parametrize("kind", ["npz", "whole", "table"])
def test_dealt_data_train_the_bits_of_a_simulation_and_are_predicted_as_they_were_measured(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [stored(tmp_path, kind, samples()), *WORDS]
    transport = in_process(settings := config(*words), tmp_path / "nodes")
    result = run(Recipe.of(settings), transport, 3, tmp_path / "run")
    transport.close()
    reference = simulation(*words)
    assert torch.equal(result.snapshot.server.theta, reference.snapshot.server.theta)
    assert result.history[-1]["clients/accuracy/mean"] == reference.history[-1]["clients/accuracy/mean"]
    table = pd.read_parquet(tmp_path / "run" / "clients.parquet").query("round == 2")
    for client, accuracy in zip(table["client"], table["accuracy"], strict=True):
        data = np.load(tmp_path / "nodes" / "data" / f"node-{client}.npz")
        np.savez(tmp_path / "x.npz", x=data["x_test"])
        assert np.mean(predicted(capsys, tmp_path / "run", tmp_path / "x.npz") == data["y_test"]) == accuracy


@pytest.mark.parametrize("kind", ["npz", "table"])
def test_nodes_own_tables_are_scaled_by_the_servers_numbers_and_predicted_so(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe.of(config(stored(tmp_path, kind, samples()), *WORDS))
    nodes = {}
    for number in range(3):
        path = tmp_path / f"{number}.csv"
        samples(40, number + 1).to_csv(path, index=False)
        nodes[f"node-{number}"] = Node(str(path), tmp_path / f"state-{number}")
    data = read(str(tmp_path / "0.csv"), recipe.spec)
    raw = samples(40, 1)[COLUMNS].to_numpy(np.float32)
    scaled = rescaled(raw, recipe.spec.standardised)
    assert np.array_equal(np.unique(data.train.x[:, 0]), np.intersect1d(data.train.x[:, 0], scaled[:, 0]))
    assert abs(float(data.train.x.mean())) < 0.5
    transport = InProcess({**nodes})
    run(recipe, transport, 3, tmp_path / "run")
    transport.close()
    np.savez(tmp_path / "x.npz", x=raw)
    inputs_file = tmp_path / ("0.csv" if kind == "table" else "x.npz")
    labels = fl.load(tmp_path / "run").server.predict(torch.from_numpy(scaled))
    assert predicted(capsys, tmp_path / "run", inputs_file) == labels.tolist()


def test_arrays_do_not_name_the_columns_that_a_table_standardises(tmp_path: Path) -> None:
    spec = Recipe.of(config(stored(tmp_path, "table", samples()), *WORDS)).spec
    stored(tmp_path, "npz", samples(), "node")
    with pytest.raises(DataError, match="columns have no names, but the recipe standardises them; give a CSV"):
        read(str(tmp_path / "node.npz"), spec)


def test_without_data_at_the_server_nothing_can_be_standardised(tmp_path: Path) -> None:
    words = [stored(tmp_path, "npz", samples()), *WORDS, "deploy.inputs=[3]", "deploy.classes=2"]
    with pytest.raises(ConfigError, match=r"with deploy\.inputs it loads none; leave out one of the two"):
        Recipe.of(config(*words))
