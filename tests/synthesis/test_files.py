"""Synthetic sets on disk, read back by this project and by other tools; and shared in a federation."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.federations import classes
from PIL import Image

from fedloom.base.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data import federate, partitions, sources
from fedloom.data.sources.generated import Generated, parquet, png, read_generated, save_npz
from fedloom_apps.synthesis.synthetic_set import with_shared_set

PROVENANCE = {"method": "fedevg", "data": {"name": "digits"}, "seed": 3}


def generated_set(colours: int = 1, **changes: object) -> Generated:
    """Six images of three classes, normalised."""
    draws = np.random.default_rng(0)
    mean, std = (0.4,) * colours, (0.25,) * colours
    x = (torch.from_numpy(draws.random((6, colours, 8, 8))).float() - 0.4) / 0.25
    arrays = Arrays(x, torch.tensor([0, 0, 1, 1, 2, 2]), 3, ("a", "b", "c"), mean, std)
    return Generated(replace(arrays, **changes), PROVENANCE)


@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_a_set_is_read_back_as_it_was(tmp_path: Path, suffix: str, colours: int) -> None:
    generated, path = generated_set(colours), tmp_path / f"set.{suffix}"
    if suffix == "npz":
        save_npz(generated, path)
    else:
        path.write_bytes(parquet(generated))
    again = read_generated(path)
    torch.testing.assert_close(again.arrays.x, generated.arrays.x, rtol=0, atol=1e-6)
    assert again.arrays.y.tolist() == generated.arrays.y.tolist()
    assert replace(again.arrays, x=generated.arrays.x, y=generated.arrays.y) == generated.arrays
    assert again.provenance == PROVENANCE


def test_images_in_parquet_are_what_other_tools_show() -> None:
    generated = generated_set(3)
    table = pq.read_table(io.BytesIO(parquet(generated)))
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"_type": "ClassLabel", "names": ["a", "b", "c"]}
    assert features["image"] == {"_type": "Image"}
    image = np.asarray(Image.open(io.BytesIO(table["image"][4].as_py()["bytes"])))  # [H, W, C]
    pixels = generated.arrays.x[4] * 0.25 + 0.4
    np.testing.assert_allclose(image / 255, pixels.permute(1, 2, 0).numpy(), atol=0.5 / 255 + 1e-6)
    assert Image.open(io.BytesIO(png(torch.zeros(1, 4, 4)))).mode == "L"


def test_samples_that_are_no_images_have_no_image(tmp_path: Path) -> None:
    vectors = generated_set(x=torch.randn(6, 5), mean=(), std=())
    (tmp_path / "set.parquet").write_bytes(parquet(vectors))
    assert pq.read_table(tmp_path / "set.parquet").column_names == ["label", "x"]
    assert torch.equal(read_generated(tmp_path / "set.parquet").arrays.x, vectors.arrays.x)


def test_as_data_a_set_comes_with_the_real_test_samples(tmp_path: Path) -> None:
    digits = sources.make("digits")
    few = Generated(digits.train.take(torch.arange(30)), PROVENANCE)
    save_npz(few, tmp_path / "set.npz")
    source = sources.make("generated", path=str(tmp_path / "set.npz"))
    assert torch.equal(source.train.x, few.arrays.x)
    assert torch.equal(source.test.x, digits.test.x)
    assert source.describe()["imitates"] == "digits"
    assert source.licence == "CC BY 4.0"
    assert not len(sources.make("generated", path=str(tmp_path / "set.npz"), test=False).test)
    plain = sources.make("npz", path=str(tmp_path / "set.npz"))
    assert plain.train.names == tuple("0123456789")
    assert torch.equal(plain.train.x, few.arrays.x)


def test_what_is_no_such_file_is_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", x_train=np.zeros((2, 1)), y_train=np.zeros(2, int))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for name, words in (
        ("other.npz", "lacks provenance"),
        ("broken.parquet", "truncated or not a parquet file"),
        ("none.parquet", "there is no file"),
        ("none.npz", "there is no file"),
    ):
        with pytest.raises(DataError, match=words):
            sources.make("generated", path=str(tmp_path / name))


@pytest.mark.parametrize(
    "change",
    [
        {"provenance": "[1]"}, {"provenance": '{"data": [1]}'}, {"provenance": "{"}, {"x_train": np.array(["a"] * 6)},
        {"classes": np.array("x")}, {"mean": np.array(1.0)}, {"names": np.array(3)},
    ],
)  # fmt: skip
def test_what_only_looks_like_such_a_file_is_one_sentence(change: dict[str, Any], tmp_path: Path) -> None:
    save_npz(generated_set(), tmp_path / "set.npz")
    np.savez(tmp_path / "set.npz", **{**np.load(tmp_path / "set.npz"), **change})
    with pytest.raises(DataError, match="was not written by fedloom synthesize"):
        sources.make("generated", path=str(tmp_path / "set.npz"), test=False)


def test_real_data_that_are_not_there_or_differ_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for origin, words in (
        ({"name": "mnist"}, "imitates mnist, which cannot be read"),
        ({"name": "mnist", "download": True, "root": "/elsewhere"}, f"in {tmp_path}"),
        ({"name": "nowhere"}, "imitates data that have no name here"),
        ({"name": "npz", "path": str(tmp_path / "set.npz")}, "imitates data that have no name here"),
        ({"name": "synthetic", "clients": 10**9}, "imitates data that have no name here"),
        ({"name": "digits"}, "imitates other images than the digits here"),
    ):
        save_npz(Generated(generated_set().arrays, {**PROVENANCE, "data": origin}), tmp_path / "set.npz")
        with pytest.raises(DataError, match=words) as error:
            sources.make("generated", path=str(tmp_path / "set.npz"))
        assert "data.test=false" in str(error.value)


def test_a_shared_set_is_held_once_and_seen_by_all_who_train() -> None:
    federation = federate("digits", "pathological", clients=5, unseen=0.2, seed=0)
    few = federation.test.take(torch.arange(20))
    more = with_shared_set(federation, few, times=2)
    pool, before = more.train.arrays, len(federation.train.arrays)
    assert len(pool) == before + 20
    for client in range(4):
        rows = more.train.index[client]
        assert rows[: len(federation.train.index[client])].tolist() == federation.train.index[client].tolist()
        assert sorted(rows[len(federation.train.index[client]) :]) == sorted([*range(before, before + 20)] * 2)
    assert more.train.index[4].tolist() == federation.train.index[4].tolist(), "it never trains"
    assert torch.equal(pool.x[before:], few.x)
    assert more.held_out is federation.held_out
    assert more.provenance["shared"] == {"samples": 20, "times": 2}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sets_of_another_shape_are_not_shared() -> None:
    with pytest.raises(DataError, match="samples of shape"):
        with_shared_set(classes(), generated_set().arrays)
    federation = federate("digits", partitions.make("alid", samples=60, test_samples=15), 5, held_out="common")
    with pytest.raises(DataError, match="number the classes differently"):
        with_shared_set(federation, federation.test.take(torch.arange(5)))
