"""What a node reads, and what it refuses before it joins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.deploying import config
from PIL import Image

from fedloom.base.errors import DataError
from fedloom.data.sources import sources
from fedloom_apps.deploy.assignment import settings_of
from fedloom_apps.deploy.data import DataSpec, read
from fedloom_apps.deploy.messages import Order
from fedloom_apps.deploy.node import Node
from fedloom_apps.deploy.recipe import Recipe
from fedloom_apps.deploy.wire import unpack

TABLE = DataSpec((3,), 2, held_out=0.2, range=(0.0, 1.0))
PICTURES = DataSpec((1, 4, 4), 2, names=("cat", "dog"), mean=(0.5,), std=(0.5,))


def npz(folder: Path, **arrays: Any) -> str:
    contents = {"x_train": np.linspace(0, 1, 30).reshape(10, 3), "y_train": np.arange(10) % 2} | arrays
    np.savez(folder / "mine.npz", **{name: value for name, value in contents.items() if value is not None})
    return str(folder / "mine.npz")


def test_arrays_and_tables_and_loaders_give_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npz(tmp_path)
    reference = read(path, TABLE, seed=3)
    assert reference.sizes == (8, 0, 2)
    archive = np.load(path)
    table = pd.DataFrame(archive["x_train"], columns=["a", "b", "c"]).assign(label=archive["y_train"])
    table.to_csv(tmp_path / "mine.csv", index=False)
    table.to_parquet(tmp_path / "mine.parquet")
    (tmp_path / "my_loader.py").write_text(f"import numpy as np\ndef load():\n    return dict(np.load({path!r}))\n")
    monkeypatch.syspath_prepend(tmp_path)
    for place in (str(tmp_path / "mine.csv"), str(tmp_path / "mine.parquet"), "my_loader:load"):
        data = read(place, TABLE, seed=3)
        assert torch.equal(data.train.x, reference.train.x)
        assert torch.equal(data.test.y, reference.test.y)
    sys.modules.pop("my_loader")


def test_a_loader_may_return_tensors_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_tensors", module := ModuleType("my_tensors"))
    x = torch.linspace(0, 1, 30).reshape(10, 3).requires_grad_()
    module.load = lambda: {"x_train": x, "y_train": torch.arange(10) % 2}  # pyright: ignore[reportAttributeAccessIssue]
    assert read("my_tensors:load", TABLE).sizes == (8, 0, 2)


def test_own_splits_are_kept(tmp_path: Path) -> None:
    data = read(npz(tmp_path, x_test=np.zeros((0, 3)), y_test=np.zeros(0, np.int64)), TABLE)
    assert data.sizes == (10, 0, 0)


def test_image_folders_are_normalised_as_the_recipe_says(tmp_path: Path) -> None:
    for name, grey in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(np.full((4, 4), grey, np.uint8)).save(tmp_path / name / f"{number}.png")
    data = read(str(tmp_path), PICTURES)
    assert tuple(data.train.x.shape[1:]) == (1, 4, 4)
    assert torch.equal(data.train.x[:, 0, 0, 0], 2.0 * data.train.y - 1)
    (tmp_path / "lion").mkdir()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "lion" / "0.png")
    with pytest.raises(DataError, match="has a class 'lion', but the recipe's are cat, dog"):
        read(str(tmp_path), PICTURES)


def test_image_files_of_any_shape_become_those_of_a_simulation(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            pixels = draw.integers(0, 256, (6, 9, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    words = [f"data=folder:{tmp_path}", "data.size=4", "held_out=0.0", "model=logistic", "deploy.nodes=2"]
    data = read(str(tmp_path), Recipe.of(config(*words)).spec)
    assert torch.equal(data.train.x, sources.make("folder", path=tmp_path, size=4).train.x)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x_train": np.zeros((10, 4))}, r"the inputs have shape \[10, 4\], but this model takes \[N, 3\]"),
        ({"x_train": np.full((10, 3), 7.0)}, "values from 7 to 7, but the recipe's lie between 0 and 1"),
        ({"x_train": np.full((10, 3), np.nan)}, "NaN or infini"),
        ({"y_train": np.arange(10)}, r"label 2, but there are 2 classes \(0 to 1\)"),
        ({"y_train": np.linspace(0, 1, 10)}, "targets are real numbers, but this run's are class numbers"),
        ({"y_train": np.zeros(3, np.int64)}, r"the targets have shape \[3\], not \[10\]"),
        ({"x_train": np.zeros((0, 3)), "y_train": np.zeros(0, np.int64)}, "has no training samples"),
        ({"y_train": None}, "lacks y_train"),
        ({"x_test": np.zeros((2, 3))}, "lacks y_test"),
        ({"x_train": np.full((10, 3), np.nan)}, r"mine\.npz: in the samples for training, some inputs are NaN"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path, arrays: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read(npz(tmp_path, **arrays), TABLE)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("missing.npz", "there is no file"),
        ("missing.csv", "there is no file"),
        ("missing", "there is no such folder"),
        ("no_such_module:load", "cannot be loaded: ModuleNotFoundError"),
        ("json:JSONDecoder", "returned a JSONDecoder, but it must return a mapping"),
    ],
)
def test_places_without_data_are_named(place: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read(place, TABLE)


def test_a_node_refuses_in_its_answer(tmp_path: Path) -> None:
    """It neither fails nor tells the server more than a code; the sentence is its owner's."""
    log: list[str] = []
    node = Node(npz(tmp_path), tmp_path / "state", log.append)
    good = {"run": "a1", "settings": settings_of(config().values), "data": vars(TABLE)}
    teacher = good | {"settings": {"teacher": "x"}}
    assert unpack(node.answer(Order("0" * 32, ("join",), good).packed())).facts["sizes"] == [8, 0, 2]
    cases = {
        ("message", "a message of 7 bytes is not one of FedLoom"): b"garbage",
        ("agreement", "another data specification"): Order(
            "0" * 32, ("join",), good | {"data": vars(PICTURES)}
        ).packed(),
        ("settings", "which is not for the server to set"): Order("0" * 32, ("join",), teacher).packed(),
        ("message", "no run identifier"): Order("0" * 32, ("join",), good | {"run": "../up"}).packed(),
        ("settings", "pretrained"): Order(
            "0" * 32, ("join",),
            good | {"settings": {"model": {"name": "efficientnet_b0", "pretrained": True}}},
        ).packed(),
        ("message", "not one of FedLoom"): Order("0" * 32, ("work",), good).packed(),
    }  # fmt: skip
    for (code, sentence), order in cases.items():
        facts = unpack(node.answer(order)).facts
        assert facts.items() <= {"ticket": facts["ticket"], "status": "refused", "code": code}.items()
        assert sentence in log[-1]
    node.close()
