"""Pictures of synthetic images: one row per class, one scale for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.trouble import out_of_room
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedloom.core.federation import Arrays
from fedloom_apps.synthesis.run import picture

SHADES = torch.tensor([0.0, 0.25, 1.0])


def shades(path: Path) -> set[float]:
    """The grey values that fill large areas of a picture, from 0 to 1."""
    pixels = (imread(path)[..., :3].mean(2) * 255).round().astype(int)
    values, counts = np.unique(pixels, return_counts=True)
    return {round(float(v) / 255, 2) for v, n in zip(values, counts, strict=True) if n > 500}


def draw_picture(path: Path, x: torch.Tensor, y: list[int], classes: int = 0, **about: Any) -> Path:
    labels = torch.tensor(y)
    picture(Arrays(x, labels, classes or int(labels.max()) + 1, **about), path, "a title")
    return path


@pytest.mark.parametrize(("mean", "std"), [((), ()), ((0.5,), (0.5,)), ((0.125,), (0.3125,))])
def test_black_and_white_are_the_bounds(tmp_path: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    x = SHADES.repeat_interleave(10).reshape(30, 1, 1, 1).expand(30, 1, 8, 8)
    x = (x - mean[0]) / std[0] if mean else x
    path = draw_picture(tmp_path / "here" / "made.png", x, [0] * 10 + [1] * 10 + [2] * 10, mean=mean, std=std)
    assert shades(path) == {0.0, 0.25, 1.0}


def test_a_picture_without_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half a picture nor the loss of the one before."""
    path = draw_picture(tmp_path / "made.png", torch.zeros(1, 1, 8, 8), [0])
    before = path.read_bytes()
    monkeypatch.setattr(Figure, "savefig", out_of_room)
    with pytest.warns(UserWarning, match="No space left"):
        draw_picture(path, torch.ones(1, 1, 8, 8), [0])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["made.png"]


def test_a_picture_is_not_stretched_to_what_it_holds(tmp_path: Path) -> None:
    images = torch.full((10, 1, 8, 8), 0.25)
    assert shades(draw_picture(tmp_path / "grey.png", images, [0] * 10)) == {0.25, 1.0}


def test_one_row_a_class_and_colours(tmp_path: Path) -> None:
    images = torch.zeros(3, 3, 8, 8)
    images[1, 0] = 1.0  # class 0 is red
    images[[0, 2], 2] = 1.0  # class 2 is blue, class 1 is absent
    pixels = imread(draw_picture(tmp_path / "rows.png", images, [2, 0, 2], 4, names=("a", "b", "c", "d")))[..., :3]
    red = np.argwhere((pixels[..., 0] > 0.95) & (pixels[..., 1:].max(2) < 0.05))
    blue = np.argwhere((pixels[..., 2] > 0.95) & (pixels[..., :2].max(2) < 0.05))
    assert len(blue) == pytest.approx(2 * len(red), rel=0.1)
    assert red[:, 0].max() < blue[:, 0].min()


def test_what_is_no_picture_is_not_drawn(tmp_path: Path) -> None:
    assert not draw_picture(tmp_path / "no.png", torch.zeros(2, 4), [0, 1]).exists()
