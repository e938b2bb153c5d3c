"""Validation and test samples from files or data of their own, and missing values of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedloom as fl
from fedloom.base.errors import DataError
from fedloom.config import build, resolve
from fedloom.data.sources import sources


def frame(rows: int, seed: int, sites: tuple[str, ...] = ("a", "b", "c")) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame({
        "x": draw.normal(size=rows), "kind": draw.choice(["u", "v"], rows), "label": draw.choice(["no", "yes"], rows),
        "site": draw.choice(sites, rows),
    })  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, rows in (("train", 60), ("test", 30), ("valid", 20)):
        frame(rows, len(name)).to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def test_a_table_has_test_and_validation_samples_in_other_files(files: Path) -> None:
    """Each client its own rows of them, with the columns and class numbers of the first file."""
    words = [f"data=table:{files / 'train.csv'}", "data.label=label", "data.client=site", "held_out=natural"]
    words += [f"data.test={files / 'test.csv'}", f"data.validation={files / 'valid.csv'}", "model=logistic"]
    federation = build(resolve([*words, "evaluation.what=[global,clients,validation]"])).federation
    for split, name in ((federation.validation, "valid"), (federation.held_out, "test")):
        table = pd.read_csv(files / f"{name}.csv")
        for client, site in enumerate(federation.names):
            samples, rows = split.client(client), table[table["site"] == site.removeprefix("site ")]
            assert len(samples) == len(rows) > 0
            np.testing.assert_allclose(samples.x[:, 0], rows["x"], rtol=1e-6)
            assert samples.y.tolist() == (rows["label"] == "yes").astype(int).tolist()
    assert len(federation.test) == 30


def test_without_clients_of_their_own_validation_samples_are_dealt(files: Path) -> None:
    source = sources.make("table", path=files / "train.csv", label=["label"], validation=files / "valid.csv")
    federation = fl.data.federate(source, "iid", clients=4, held_out=0.0)
    assert len(federation.validation.index.rows) == 20
    assert len(federation.train.index.rows) == 60
    split_off = fl.data.federate(source, "iid", clients=4, held_out=0.0, validation=0.25)
    assert (len(split_off.validation.index.rows), len(split_off.train.index.rows)) == (16, 44)


@pytest.mark.filterwarnings("ignore:own data")
def test_validation_sets_are_taken_in_every_form_of_test_sets() -> None:
    train, valid = frame(60, 1), frame(20, 2, ("b", "c", "d"))
    settings: dict[str, Any] = {"label": "label", "client": "site", "held_out": 0.2}
    federation = fl.data.federate(train, validation_set=valid, **settings)
    for client, site in enumerate(federation.names):
        assert len(federation.validation.client(client)) == int((valid["site"] == site).sum())
    lists = [(np.random.default_rng(k).normal(size=(8, 3)), np.arange(8) % 2) for k in range(4)]
    federation = fl.data.federate(lists[:2], validation_set=[lists[2], (lists[3][0][:3], lists[3][1][:3])])
    assert federation.validation.index.sizes.tolist() == [8, 3]
    with pytest.warns(UserWarning, match="only validation samples have the class 2, which"):
        fl.data.federate(lists[0], "iid", clients=2, validation_set=(lists[1][0], np.arange(8) % 3))
    with pytest.raises(DataError, match=r"sample has x of shape \[3\] .*, but a validation sample \[2\]"):
        fl.data.federate(lists[0], "iid", clients=2, validation_set=(lists[1][0][:, :2], lists[1][1]))


def test_data_are_read_once_for_all_their_samples(tmp_path: Path) -> None:
    """What can be read only once has a validation set, too, and arrays of a file have one like those of a table."""
    rows = [(np.full(2, row, np.float32), row % 2) for row in range(12)]

    class Once(torch.utils.data.IterableDataset):
        def __init__(self, items: list[Any]) -> None:
            self.items = iter(items)

        def __iter__(self) -> Any:
            return self.items

    settings: dict[str, Any] = {"clients": 2, "held_out": 0.0}
    federation = fl.data.federate(Once(rows[:8]), "iid", validation_set=Once(rows[8:]), **settings)
    assert (len(federation.train.index.rows), len(federation.validation.index.rows)) == (8, 4)
    x, y = np.stack([x for x, _ in rows]), np.array([y for _, y in rows])
    owners = np.array(["a", "b"])[np.arange(12) % 2]
    arrays = {"train": slice(8), "validation": slice(8, 12)}
    np.savez(tmp_path / "all.npz", **{f"{kind}_{split}": side[rows] for split, rows in arrays.items()
                                      for kind, side in (("x", x), ("y", y), ("client", owners))})  # fmt: skip
    federation = fl.data.federate(f"npz:{tmp_path / 'all.npz'}", held_out=0.0)
    assert [federation.validation.client(k).x[:, 0].tolist() for k in range(2)] == [[8, 10], [9, 11]]


@pytest.mark.parametrize("missing", ["drop", "impute"])
def test_missing_values_are_dropped_or_filled_by_the_first_file(files: Path, missing: str) -> None:
    for name in ("train", "test"):
        table = pd.read_csv(files / f"{name}.csv")
        table.loc[[0, 3], "x"] = np.nan
        table.loc[3, "kind"] = None
        table.to_csv(files / f"{name}.csv", index=False)
    settings = {"path": files / "train.csv", "label": ["label"], "features": ["x", "kind"], "test": files / "test.csv"}
    with pytest.raises(DataError, match="has missing values"):
        sources.make("table", **settings)
    source = sources.make("table", **settings, missing=missing)
    table = pd.read_csv(files / "train.csv")
    assert (len(source.train), len(source.test)) == ((58, 28) if missing == "drop" else (60, 30))
    if missing == "impute":
        for arrays in (source.train, source.test):
            np.testing.assert_allclose(arrays.x[[0, 3], 0], table["x"].mean(), rtol=1e-6)
        common = table["kind"].mode()[0]
        assert source.train.x[3, 1:].tolist() == [float(common == kind) for kind in ("u", "v")]
    assert source.settings["missing"] == missing


def test_labels_of_complete_rows_stay_classes(files: Path) -> None:
    """A column of whole numbers that lacks one is read as floats."""
    table = pd.read_csv(files / "train.csv")
    table["label"] = (table["label"] == "yes").astype(float)
    table.loc[0, "label"] = None
    table.to_csv(files / "train.csv", index=False)
    source = sources.make("table", path=files / "train.csv", label=["label"], missing="drop")
    assert source.train.y.tolist() == table["label"][1:].tolist()
    assert source.train.has_classes
    table["x"] = None
    table.to_csv(files / "train.csv", index=False)
    with pytest.raises(DataError, match="every row has a missing value, most often in column 'x'; leave that column"):
        sources.make("table", path=files / "train.csv", label=["label"], missing="drop")


def test_whole_numbers_that_are_missing_are_filled_by_their_mean(tmp_path: Path) -> None:
    table = pd.DataFrame({"x": pd.array([1, None, 2], "Int64"), "t": pd.array([True, None, False], "boolean")})
    table.assign(label=[0, 1, 0]).to_parquet(tmp_path / "t.parquet")
    source = sources.make("table", path=tmp_path / "t.parquet", missing="impute")
    assert source.train.x.tolist() == [[1, 1], [1.5, 0.5], [2, 0]]


def test_labels_are_never_filled(files: Path) -> None:
    table = pd.read_csv(files / "train.csv")
    table.loc[0, "label"] = None
    table.to_csv(files / "train.csv", index=False)
    with pytest.raises(DataError):
        sources.make("table", path=files / "train.csv", label=["label"], missing="impute")


def test_npz_files_with_the_names_of_medmnist_and_rows_of_pixels(tmp_path: Path) -> None:
    """Labels [N, 1] are class numbers, and ``val`` is for validation; data.shape makes images of rows."""
    draw = np.random.default_rng(0)
    parts = {"train": 40, "val": 12, "test": 10}
    arrays = {f"{p}_images": draw.integers(0, 256, (n, 16), dtype=np.uint8) for p, n in parts.items()}
    np.savez(tmp_path / "m.npz", **arrays, **{f"{p}_labels": draw.integers(0, 3, (n, 1)) for p, n in parts.items()})
    words = [f"data=npz:{tmp_path / 'm.npz'}", "data.shape=[4,4]", "clients=4", "held_out=0", "model=logistic"]
    federation = build(resolve([*words, "partition=iid"])).federation
    assert federation.train.arrays.x.shape == (40, 1, 4, 4)
    assert federation.validation.index.sizes.tolist() == [3, 3, 3, 3]
    np.testing.assert_allclose(federation.test.x.flatten(1) * 255, arrays["test_images"], rtol=1e-5)
    with pytest.raises(DataError, match=r"data.shape=\[5\] is 5 numbers, but a sample has 16"):
        sources.make("npz", path=tmp_path / "m.npz", shape=(5,))


def test_rows_of_a_table_as_samples_of_a_shape(tmp_path: Path) -> None:
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 6)), columns=list("abcdef"))
    table.assign(label=np.arange(30) % 2).to_csv(tmp_path / "t.csv", index=False)
    words = [f"data=table:{tmp_path / 't.csv'}", "data.shape=[2,3]", "partition=iid", "clients=3", "rounds=1"]
    server = fl.run(build(resolve([*words, "model=logistic"]))).trained.server
    assert server.arrays.x.shape == (30, 2, 3)
    assert len(server.predict(table)) == 30


def test_validation_samples_that_a_source_keeps_apart(tmp_path: Path) -> None:
    """``validation=apart`` gives MedMNIST's to the clients, ``true`` joins them to the pool."""
    draw, sizes = np.random.default_rng(0), {"train": 40, "val": 12, "test": 10}
    arrays = {f"{part}_images": draw.integers(0, 256, (n, 28, 28), dtype=np.uint8) for part, n in sizes.items()}
    arrays |= {f"{part}_labels": draw.integers(0, 11, (n, 1)).astype(np.uint8) for part, n in sizes.items()}
    np.savez(tmp_path / "organcmnist.npz", **arrays)
    by_setting = {how: sources.make("organcmnist", root=tmp_path, validation=how) for how in (False, True, "apart")}
    assert [len(source.train) for source in by_setting.values()] == [40, 52, 40]
    federation = fl.data.federate(by_setting["apart"], "iid", clients=4)
    assert len(federation.validation.index.rows) == 12
    assert not len(fl.data.federate(by_setting[False], "iid", clients=4).validation.index.rows)
