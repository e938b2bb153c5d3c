"""A node's table is read by the names of the columns, labels and classes of the server's table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.deploying import InProcess, config

from fedloom.base.errors import DataError
from fedloom_apps.deploy.data import DataSpec, check_readable, read
from fedloom_apps.deploy.node import Node
from fedloom_apps.deploy.recipe import Recipe
from fedloom_apps.deploy.server import run

WORDS = ("model=logistic", "partition=iid", "deploy.nodes=2", "held_out=0.25", "rounds=2")


def patients(rows: int = 24, seed: int = 0) -> pd.DataFrame:
    """Two numbers, a category whose names may look like numbers, and a label with names."""
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(size=(2, rows)).astype(np.float32)
    ward = np.array(["01", "1", "2x"])[np.arange(rows) % 3]
    return pd.DataFrame({"age": age, "dose": dose, "ward": ward, "ill": np.where(age > dose, "yes", "no")})


def recipe(folder: Path, table: pd.DataFrame, *words: str) -> Recipe:
    """The recipe of a server with this table."""
    table.to_csv(folder / "server.csv", index=False)
    return Recipe.of(config(*WORDS, f"data=table:{folder / 'server.csv'}", "data.label=ill", *words))


def table_file(folder: Path, table: pd.DataFrame, name: str = "node.csv") -> str:
    """The path of a table that is written into a folder."""
    path = folder / name
    table.to_csv(path, index=False) if path.suffix == ".csv" else table.to_parquet(path)
    return str(path)


@pytest.mark.parametrize("name", ["node.csv", "node.parquet"])
def test_columns_are_found_by_name_whatever_their_order(name: str, tmp_path: Path) -> None:
    spec, table = recipe(tmp_path, patients()).spec, patients(seed=1)
    shuffled = table[["ill", "ward", "dose", "age"]].assign(town="x")
    data = read(table_file(tmp_path, table, name), spec)
    shuffled_data = read(table_file(tmp_path, shuffled, f"other-{name}"), spec)
    assert spec.columns == ("age", "dose", "ward=01", "ward=1", "ward=2x")
    assert torch.equal(data.train.x, shuffled_data.train.x)
    assert torch.equal(data.test.y, shuffled_data.test.y)
    inputs = torch.cat([data.train.x, data.test.x])
    assert sorted(inputs[:, 0].tolist()) == sorted(table["age"].astype(np.float32).tolist())


def test_categories_that_look_like_numbers_are_read_as_the_servers_were(tmp_path: Path) -> None:
    table = patients().query("ward != '2x'")  # 01 and 1 alone would be read as the number 1
    data = read(table_file(tmp_path, table), recipe(tmp_path, patients()).spec)
    x = torch.cat([data.train.x, data.test.x])
    assert x[:, 2:].sum(0).tolist() == [8, 8, 0]


def test_a_column_that_is_missing_or_named_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    spec, table = recipe(tmp_path, patients()).spec, patients(seed=1)
    for renamed, sentence in (
        ({"dose": "amount"}, "the inputs have no column 'dose'; there are: age, amount, ward"),
        ({"dose": "amount", "ward": "unit"}, "the inputs have no column '(dose|ward)'; there are: age, amount, unit"),
        ({"ill": "sick"}, r"has no column 'ill' of labels; it has age, dose, ward, sick\."),
    ):
        with pytest.raises(DataError, match=sentence):
            read(table_file(tmp_path, table.rename(columns=renamed)), spec)
    with pytest.raises(DataError, match=r"training, column 'ward' of the inputs holds '3'"):
        read(table_file(tmp_path, table.assign(ward="3")), spec)
    with pytest.raises(DataError, match=r"training, column 'dose' of the inputs holds values that are not"):
        read(table_file(tmp_path, table.assign(dose="much")), spec)


def test_classes_may_be_names_or_numbers_in_the_recipes_column_or_in_label(tmp_path: Path) -> None:
    spec, table = recipe(tmp_path, patients()).spec, patients(seed=1)
    numbers = (table["ill"] == "yes").astype(int)
    reference = read(table_file(tmp_path, table), spec)
    for variant in (
        table.assign(ill=numbers),
        table.rename(columns={"ill": "label"}),
        table.drop(columns="ill").assign(label=numbers),
    ):
        assert torch.equal(read(table_file(tmp_path, variant), spec).train.y, reference.train.y)
    with pytest.raises(DataError, match=r"training, there is no class 'maybe'; there are: no"):
        read(table_file(tmp_path, table.assign(ill="maybe")), spec)
    with pytest.raises(DataError, match="column 'ill' has missing values in 24 of 24 rows"):
        read(table_file(tmp_path, table.assign(ill=None)), spec)


def test_names_of_classes_that_look_like_numbers_are_names(tmp_path: Path) -> None:
    table = patients().assign(ill=np.array(["1", "2", "x"])[np.arange(24) % 3])
    spec = recipe(tmp_path, table).spec
    data = read(table_file(tmp_path, table.query("ill != 'x'")), spec)
    assert sorted({*data.train.y.tolist(), *data.test.y.tolist()}) == [0, 1]


def test_whole_numbers_are_targets_of_a_regression(tmp_path: Path) -> None:
    spec = recipe(tmp_path, patients().assign(ill=np.linspace(0, 1, 24)), "method.objective=[squared_error]").spec
    data = read(table_file(tmp_path, patients(seed=1).assign(ill=2)), spec)
    assert data.train.y.dtype == torch.float32
    assert data.train.y.unique().tolist() == [2.0]


def test_without_names_at_the_server_only_the_number_of_columns_counts(tmp_path: Path) -> None:
    table = patients()[["dose", "age"]].assign(label=np.arange(24) % 2)
    data = read(table_file(tmp_path, table), DataSpec((2,), 2, held_out=0.0))
    assert np.array_equal(np.sort(data.train.x[:, 0]), np.sort(table["dose"].to_numpy()))
    with pytest.raises(DataError, match=r"the inputs have shape \[24, 2\], but this model takes \[N, 3\]"):
        read(table_file(tmp_path, table), DataSpec((3,), 2))


def test_a_table_is_looked_at_before_its_recipe_is_known(tmp_path: Path) -> None:
    check_readable(table_file(tmp_path, patients()))
    with pytest.raises(
        DataError, match=r"column 'ward' has missing values in 24 of 24 rows|NaN or infinity in 24 of 24"
    ):
        check_readable(table_file(tmp_path, patients().assign(ward=None)))


def trained(server_recipe: Recipe, transport: InProcess) -> torch.Tensor:
    """The model that the nodes train; none may refuse to join."""

    def tell(sentence: str) -> None:
        assert "refused" not in sentence, sentence

    theta = run(server_recipe, transport, len(transport.nodes), tell=tell).snapshot.server.theta
    transport.close()
    return theta


def test_nodes_with_columns_in_other_orders_train_the_same_model(tmp_path: Path) -> None:
    server_recipe, models = recipe(tmp_path, patients()), []
    for number, columns in enumerate((["age", "dose", "ward", "ill"], ["ill", "ward", "dose", "age"])):
        home = tmp_path / str(number)
        home.mkdir()
        nodes = {
            f"node-{seed}": Node(table_file(home, patients(seed=seed)[columns], f"{seed}.csv"), home / f"state-{seed}")
            for seed in range(2)
        }
        models.append(trained(server_recipe, InProcess({**nodes})))
    assert torch.equal(*models)
