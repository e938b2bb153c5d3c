"""Images stay bytes, in memory or in a file, until a mini-batch reads them; results equal those of floats in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.distilling import weights
from torch import Tensor, nn

from fedloom.base.errors import DataError
from fedloom.data import Source, sources
from fedloom.data.sources.arrays import as_bytes, image_arrays
from fedloom.models.deep import residual
from fedloom_apps import distill
from fedloom_apps.distill import DistillExperiment, SGDConfig, Splits, data, disk, learner, task
from fedloom_apps.distill.config import DISTILL, build

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
KIND = {"classes": 3, "inputs": (3, 8, 8), "norm": "batch"}


def pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 8, 8, 3] whose brightness tells their class."""
    draw = np.random.default_rng(seed)
    y = np.arange(count) % 3
    return (draw.integers(0, 86, (count, 8, 8, 3)) + 85 * y[:, None, None, None]).astype(np.uint8), y


def photographs() -> Source:
    train, test = (image_arrays(*pictures(*about), ["a", "b", "c"], True, MEAN, STD) for about in ((60, 0), (30, 1)))
    return Source("photographs", train, test, "", "")


def distilled(source: Source, **settings: object) -> DistillExperiment:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher: nn.Module = residual("wide", 6, (6, 10), (1, 1), **KIND)
    return DistillExperiment(
        disk(top_k=1),
        Splits.of(source, validation=0.2),
        partial(residual, "narrow", 3, (3, 4), (1, 1), **KIND),
        teacher,
        epochs=4,
        training=SGDConfig(batch_size=16, lr=0.05),
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("settings", [{}, {"augment": ("crop", "flip"), "cache": "none"}])
def test_bytes_give_the_bits_of_numbers_and_are_read_by_mini_batch(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in ((learner, "AT_ONCE"), (data, "AT_ONCE"), (data, "CHECK_SAMPLES")):
        monkeypatch.setattr(place, name, 16)
    monkeypatch.setattr(task, "CHECKSUM_ROWS", 8)
    expected = distill.run(distilled(photographs(), **settings))
    with as_bytes():
        stored = photographs()
    assert stored.train.x.dtype == torch.uint8
    read: list[int] = []
    real = data.normalised

    def normalised(x: Tensor, *rest: tuple[float, ...]) -> Tensor:
        read.append(len(x))
        return real(x, *rest)

    monkeypatch.setattr(data, "normalised", normalised)
    experiment = distilled(stored, **settings)
    assert experiment.data.train.x.stored.data_ptr() == stored.train.x.data_ptr(), "nothing was copied"
    result = distill.run(experiment)
    assert max(read) == 16
    assert torch.equal(weights(result.model), weights(expected.model))
    for record, reference in zip(result.history, expected.history, strict=True):
        assert {**record, "seconds": 0} == {**reference, "seconds": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, about in (("train", (60, 0)), ("test", (30, 1))):
        x, y = pictures(*about)
        np.save(tmp_path / f"x_{part}.npy", x)
        np.save(tmp_path / f"y_{part}.npy", y)
    return tmp_path


def test_a_mapped_file_stays_on_disk(folder: Path) -> None:
    with as_bytes():
        source = sources.make("npz", path=str(folder))
    parts = Splits.of(source, validation=0.2, samples=40)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (32, 8, 30)
    rows = parts.train.rows
    assert rows is not None
    assert torch.equal(parts.train.x[3:9], sources.make("npz", path=str(folder)).train.x[rows[3:9]])
    np.load(folder / "x_train.npy", mmap_mode="r+")[int(rows[0])] = 255
    assert bool((parts.train.x[:1] == 1).all()), "what is read is the file's content of now"


def test_the_command_line_keeps_bytes(folder: Path) -> None:
    splits = build(DISTILL.resolve([f"data=npz:{folder}", "model=mlp", "teacher=mlp"])).data
    assert splits.train.arrays.x.dtype == torch.uint8
    assert splits.train.first.x.dtype == torch.float32


@pytest.mark.parametrize(("free", "place"), [(10_000, "meta"), (2_000, "cpu")])
def test_a_gpu_takes_what_fills_at_most_half_of_its_memory(
    free: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    stored = torch.zeros(20, 3, 8, 8, dtype=torch.uint8)
    inputs = data.Inputs(stored, torch.arange(0, 20, 2)).to(torch.float32, "meta")  # 1920 bytes
    assert (len(inputs), inputs.stored.device.type) == (10, place)
    batch = inputs[torch.tensor([1, 4])] if place == "cpu" else inputs[:2]
    assert (batch.device.type, batch.dtype, tuple(batch.shape)) == ("meta", torch.float32, (2, 3, 8, 8))


def test_a_source_without_test_samples_sets_some_aside() -> None:
    """As a table, which is one file: a fifth, the same whatever else is set aside."""
    photos = photographs()
    source = replace(photos, test=photos.test.take(torch.zeros(0, dtype=torch.long)))
    parts = Splits.of(source, validation=0.25)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [36, 12, 12]
    assert parts.test.y.bincount().tolist() == [4, 4, 4]
    rows = torch.cat([part.rows for part in (parts.train, parts.validation, parts.test) if part.rows is not None])
    assert rows.sort().values.tolist() == list(range(60))
    assert torch.equal(Splits.of(source, validation=0.0).test.y, parts.test.y)
    assert parts.about["held_out"] == 0.2
    assert "held_out" not in Splits.of(photos).about
    numbers = replace(source, train=replace(source.train, y=source.train.y.double()))
    with pytest.raises(DataError, match="the targets are numbers"):
        Splits.of(numbers)
