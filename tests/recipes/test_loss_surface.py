"""Losses on planes and segments, against problems with known surfaces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.recipes import load
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.core.layout import Layout

recipe = load("superfed", "loss_surface")
landscape = load("superfed", "landscape")


def three(size: int = 7) -> Tensor:
    return torch.randn(3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bowl(theta: Tensor) -> Tensor:
    return (theta - 1).square().sum()


def test_the_plane_holds_its_three_models_and_keeps_their_distances() -> None:
    models = three()
    plane = recipe.Plane.through(*models)
    torch.testing.assert_close(plane.axes @ plane.axes.T, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(plane.models(plane.points), models)
    torch.testing.assert_close(torch.cdist(plane.points, plane.points), torch.cdist(models, models))


def test_a_quadratic_on_a_plane_is_the_quadratic_of_its_coordinates() -> None:
    """‖θ(a, b) - c‖² = ‖(a, b) - (a_c, b_c)‖² + the squared distance of c from the plane."""
    plane = recipe.Plane.through(*three())
    surface = recipe.surface(bowl, plane, steps=5, margin=0.3)
    low, high = plane.points.min(0).values.numpy(), plane.points.max(0).values.numpy()
    np.testing.assert_allclose([surface.a[0], surface.b[0]], low - 0.3 * (high - low), rtol=1e-6)
    np.testing.assert_allclose([surface.a[-1], surface.b[-1]], high + 0.3 * (high - low), rtol=1e-6)
    centre = torch.ones(7, dtype=torch.float64) - plane.origin
    at = plane.axes @ centre
    away = float(centre.square().sum() - at.square().sum())
    expected = (surface.a[None, :] - float(at[0])) ** 2 + (surface.b[:, None] - float(at[1])) ** 2 + away
    np.testing.assert_allclose(surface.losses, expected, rtol=1e-9)


@pytest.mark.parametrize("batch", [2, 3, 100])
def test_several_models_at_once_give_the_same_losses(batch: int) -> None:
    plane = recipe.Plane.through(*three())
    single, several = (recipe.surface(bowl, plane, steps=4, batch=size).losses for size in (1, batch))
    np.testing.assert_allclose(single, several, rtol=1e-12)


def test_a_loss_may_be_any_function_when_models_come_one_by_one() -> None:
    """Even one that leaves PyTorch, which no batched pass could run."""
    losses = recipe.losses_of(lambda theta: torch.tensor(float(np.abs(theta.numpy()).max())), three())
    np.testing.assert_allclose(losses, three().abs().max(1).values.numpy())


def test_segments_end_at_their_models_and_the_barrier_is_the_rise_above_the_line() -> None:
    first, second, _ = three()
    at = np.linspace(0, 1, 11)
    losses = recipe.segment(bowl, first, second, at.tolist(), batch=4)
    np.testing.assert_allclose(losses[[0, -1]], [float(bowl(first)), float(bowl(second))], rtol=1e-6)
    assert recipe.barrier(losses) == 0.0  # convex
    assert abs(recipe.barrier(-losses) - 0.25 * float((first - second).square().sum())) < 1e-5  # at the middle


def test_the_cross_entropy_of_a_classifier_is_a_function_of_its_vector() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    layout = Layout.of(net)
    theta, _ = layout.read(net)
    loss = recipe.cross_entropy(net, layout, x, y)
    net.eval()
    torch.testing.assert_close(loss(theta), F.cross_entropy(net(x), y))
    losses = recipe.losses_of(loss, torch.stack([theta, theta + 0.1, theta]), batch=2)
    assert losses[0] == pytest.approx(losses[2])
    assert losses[0] != pytest.approx(losses[1])


def test_the_width_of_a_valley_is_the_share_of_the_grid_below_a_level() -> None:
    plane = recipe.Plane.through(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    surface = recipe.surface(lambda theta: theta.sum(), plane, steps=2, margin=0.0)
    assert [surface.share_below(level) for level in (-0.1, 0.0, 1.0, 2.0)] == [0.0, 0.25, 0.75, 1.0]


@pytest.mark.parametrize("highest", [None, 1.0, -5.0])
def test_a_picture_is_drawn(tmp_path: Path, highest: float | None) -> None:
    plane = recipe.Plane.through(*three())
    recipe.picture(recipe.surface(bowl, plane, steps=4), tmp_path / "new" / "bowl.png", ("w", "v", "u"), highest)
    assert (tmp_path / "new" / "bowl.png").read_bytes().startswith(b"\x89PNG")


def test_impossible_planes_and_grids_are_refused() -> None:
    a, b, _ = three()
    for models in ((a, b, a), (a, a, b), (a, b, a + 3 * (b - a))):
        with pytest.raises(ConfigError, match="line"):
            recipe.Plane.through(*models)
    with pytest.raises(ConfigError, match=r"\[7\], \[7\], \[5\]"):
        recipe.Plane.through(a, b, a[:5])
    plane = recipe.Plane.through(*three())
    for wrong in ((1, 0.1, 1), (4, -0.1, 1), (4, 0.1, 0)):
        with pytest.raises(ConfigError):
            recipe.surface(bowl, plane, *wrong)


@pytest.mark.parametrize("length", [0.001, 1.0, 50.0])
def test_the_reach_is_the_distance_of_a_rise_whatever_the_length_of_the_direction(length: float) -> None:
    reach = landscape.reach(lambda theta: theta.square().sum() / 2, torch.zeros(3), length * torch.eye(3)[1])
    assert 1 <= reach / (2 * landscape.RISE) ** 0.5 < 1.05, "the first of distances that grow by 5 %"
    assert landscape.reach(lambda theta: theta.sum() * 0, torch.zeros(3), torch.ones(3)) > 300, "it never rises"
