"""Pictures of synthetic images: one row per class, one scale for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.trouble import out_of_room
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.arrays import to_images
from fedloom_apps.synthesis.run import grid, value_range

SHADES = torch.tensor([0.0, 0.25, 1.0])


def shades(path: Path) -> set[float]:
    """The grey values that fill large areas of a picture, from 0 to 1."""
    pixels = (imread(path)[..., :3].mean(2) * 255).round().astype(int)
    values, counts = np.unique(pixels, return_counts=True)
    return {round(float(v) / 255, 2) for v, n in zip(values, counts, strict=True) if n > 500}


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), ((-0.4,), (2.8,))])
def test_black_and_white_are_the_bounds(tmp_path: Path, low: float, high: float) -> None:
    a, b = torch.tensor(low), torch.tensor(high)
    images = (a + (b - a) * SHADES).reshape(3, 1, 1, 1).expand(3, 1, 8, 8)
    path = grid(images, torch.tensor([0, 1, 2]), tmp_path / "here" / "made", low=low, high=high, each=1)
    assert path == tmp_path / "here" / "made.png"
    assert shades(path) == {0.0, 0.25, 1.0}


def test_a_picture_without_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half a picture nor the loss of the one before."""
    path = grid(torch.zeros(1, 1, 8, 8), torch.tensor([0]), tmp_path / "made.png", each=1)
    before = path.read_bytes()
    monkeypatch.setattr(Figure, "savefig", out_of_room)
    with pytest.raises(OSError, match="No space left"):
        grid(torch.ones(1, 1, 8, 8), torch.tensor([0]), path, each=1)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["made.png"]


def test_a_picture_is_not_stretched_to_what_it_holds(tmp_path: Path) -> None:
    images = torch.full((1, 1, 8, 8), 0.25)
    assert shades(grid(images, torch.tensor([0]), tmp_path / "grey.png", each=1)) == {0.25, 1.0}


def test_one_row_a_class_and_colours(tmp_path: Path) -> None:
    labels = torch.tensor([2, 0, 2])
    images = torch.zeros(3, 3, 8, 8)
    images[1, 0] = 1.0  # class 0 is red
    images[[0, 2], 2] = 1.0  # class 2 is blue, class 1 is absent
    path = grid(images, labels, tmp_path / "rows.png", classes=4, names=("a", "b", "c", "d"), each=2, title="four")
    pixels = imread(path)[..., :3]
    red = np.argwhere((pixels[..., 0] > 0.95) & (pixels[..., 1:].max(2) < 0.05))
    blue = np.argwhere((pixels[..., 2] > 0.95) & (pixels[..., :2].max(2) < 0.05))
    assert len(blue) == pytest.approx(2 * len(red), rel=0.1)
    assert red[:, 0].max() < blue[:, 0].min()


@pytest.mark.parametrize(
    ("images", "labels", "settings", "sentence"),
    [
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), {}, "needs images"),
        (torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64), {}, "at least one"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2), {}, "class numbers"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(3, dtype=torch.int64), {}, "2 inputs but 3 labels"),
        (torch.zeros(1, 1, 4, 4), torch.tensor([5]), {"classes": 3}, "label 5"),
        (torch.zeros(1, 1, 4, 4), torch.tensor([0]), {"low": 1.0}, "must be below high"),
        (torch.full((1, 1, 4, 4), -1.0), torch.tensor([0]), {}, "between 0.0 and 1.0, but their extremes are -1, -1"),
        (torch.zeros(1, 1, 4, 4), torch.tensor([0]), {"high": (1.0, 2.0)}, "one for each of the 1 channels"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    tmp_path: Path, images: torch.Tensor, labels: torch.Tensor, settings: dict, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        grid(images, labels, tmp_path / "no.png", **settings)


def test_the_range_is_that_of_black_and_white_pixels() -> None:
    raw = np.array([[[[0, 0, 0], [255, 255, 255]]]], np.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    x = to_images(raw, mean, std)
    low, high = value_range(Arrays(x, torch.zeros(1, dtype=torch.int64), 1, mean=mean, std=std))
    np.testing.assert_allclose(x[0, :, 0], np.stack([low, high], 1), rtol=1e-6)
    with pytest.raises(DataError, match="only images"):
        value_range(Arrays(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), 1))
