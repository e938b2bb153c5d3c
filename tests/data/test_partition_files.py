"""Partitions that are saved and read as files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pandas as pd
import pytest

import fedloom as fl
from fedloom.base.errors import DataError
from fedloom.cli import main
from fedloom.core.federation import Federation


def lists(federation: Federation) -> list[list[int]]:
    return [federation.train.index[client].tolist() for client in range(len(federation))]


def read(path: Path) -> list[list[int]]:
    data = ([[float(k)] for k in range(8)], [0, 1] * 4)
    return lists(fl.data.federate(data, fl.data.partitions.make("file", path=path), held_out=0.0))


@pytest.mark.parametrize("name", ["saved.parquet", "saved.csv"])
def test_a_saved_partition_gives_the_clients_again(tmp_path: Path, name: str) -> None:
    """With their validation and test rows: equal seeds then split them alike."""
    before = fl.data.federate("digits", "dirichlet", clients=5, seed=3, validation=0.1)
    fl.data.save_partition(before, tmp_path / name)
    after = fl.data.federate("digits", fl.data.partitions.make("file", path=tmp_path / name), seed=3, validation=0.1)
    assert after.provenance["fingerprint"] == before.provenance["fingerprint"]
    with pytest.raises(DataError, match="must be a new file"):
        fl.data.save_partition(before, tmp_path / name)


@pytest.mark.parametrize("name", ["saved.parquet", "saved.csv"])
def test_a_partition_that_a_full_disk_cuts_short_is_no_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read later, its missing rows would belong to nobody."""
    federation = fl.data.federate("digits", "dirichlet", clients=5)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="No space left"):
            fl.data.save_partition(federation, tmp_path / name)
    assert not [*tmp_path.iterdir()]
    fl.data.save_partition(federation, tmp_path / name)


def test_forms_of_other_projects(tmp_path: Path) -> None:
    clients = ["b", "a", "b", "c", "a", "a", "c", "b"]
    pd.DataFrame({"client_id": clients, "sample_path": range(8), "label_name": "x"}).to_csv(tmp_path / "fedscale.csv")
    pd.DataFrame({"partition_id": [1, 0], "row": [5, 2]}).to_csv(tmp_path / "flwr.csv", index=False)
    (tmp_path / "lists.json").write_text(json.dumps({"7": [3, 1], "9": [0]}))
    (tmp_path / "leaf.json").write_text(json.dumps({"users": ["u", "v"], "num_samples": [3, 5], "user_data": {}}))
    assert read(tmp_path / "fedscale.csv") == [[1, 4, 5], [0, 2, 7], [3, 6]]
    assert read(tmp_path / "flwr.csv") == [[2], [5]]
    assert read(tmp_path / "lists.json") == [[1, 3], [0]]
    assert read(tmp_path / "leaf.json") == [[0, 1, 2], [3, 4, 5, 6, 7]]


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.csv", "who,sample\n1,2\n", "has no column client, client_id or partition_id"),
    ("a.csv", "client\n1\n", "has 1 rows, but there are 8 samples"),
    ("a.csv", "client,sample\n1,9\n", "holds a row that is not among 0 to 7"),
    ("a.csv", "client,sample\n1,2\n2,2\n", "one that another client holds already"),
    ("a.csv", "client,sample\n1,x\n", "must hold row numbers"),
    ("a.csv", "client,sample\n1,2\n,3\n", "column 'client' has missing values in 1 of 2 rows"),
    ("a.csv", "client,sample\nann,2\n,3\n", "column 'client' has missing values in 1 of 2 rows"),
    ("a.json", "{", "cannot be read as JSON"),
    ("a.json", "{}", "maps no clients to lists of rows"),
    ("a.json", '{"users": ["u"], "num_samples": ["x"]}', "num_samples must be a list"),
    ("a.json", '{"users": ["u"], "num_samples": [7]}', "lists 7 samples in num_samples, but the data have 8"),
    ("a.json", '{"u": [0, [1]], "v": []}', "the rows of each client must be a list of whole numbers"),
    ("b.json", None, "there is no file"),
])  # fmt: skip
def test_files_that_are_no_partition(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["partition", "clients=4", "--save", "p.parquet"]) == 0
    words = ["partition=file", "partition.path=p.parquet", "model=logistic", "rounds=1", "method=fedavg", "-q"]
    assert main(["run", *words, "out=r"]) == 0
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["clients"] == 4
    capsys.readouterr()
