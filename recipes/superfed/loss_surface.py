"""Loss landscapes: the loss on the plane through three models and along the segment between two.

::

    θ(a, b) = θ_1 + a e_1 + b e_2,      e_1 ∝ θ_2 - θ_1,   e_2 ∝ (θ_3 - θ_1) - ⟨θ_3 - θ_1, e_1⟩ e_1,   ‖e_1‖ = ‖e_2‖ = 1

so that distances in a plot equal distances between parameters. Garipov et al., NeurIPS 2018; Hahn 2024, figure 2.4.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.core.layout import Layout, call

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting

Loss = Callable[[Tensor], Tensor]  # model [P] -> loss []


@dataclass(frozen=True)
class Plane:
    """The plane through three models.

    >>> plane = Plane.through(torch.zeros(3), torch.tensor([2.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 3.0]))
    >>> plane.points.tolist(), plane.models(torch.tensor([[2.0, 3.0]])).tolist()
    ([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]], [[2.0, 0.0, 3.0]])

    Attributes:
        origin: the first model, [P].
        axes: e_1 and e_2, orthonormal, [2, P].
        points: coordinates (a, b) of the three models, [3, 2].
    """

    origin: Tensor
    axes: Tensor
    points: Tensor

    @classmethod
    def through(cls, first: Tensor, second: Tensor, third: Tensor) -> Plane:
        """The plane through three models [P].

        Raises:
            ConfigError: if they have different sizes or are collinear.
        """
        if not first.shape == second.shape == third.shape or first.ndim != 1:
            shapes = ", ".join(str(list(model.shape)) for model in (first, second, third))
            raise ConfigError(f"a plane takes three models of the same shape [P], not {shapes}.")
        to_second, to_third = second - first, third - first
        length = torch.linalg.vector_norm(to_second)
        e1 = to_second / length
        along = torch.dot(to_third, e1)
        across = to_third - along * e1
        height = torch.linalg.vector_norm(across)
        least = 100 * torch.finfo(first.dtype).eps * torch.linalg.vector_norm(to_third)  # rounding error
        if not length or not height > least:
            raise ConfigError("three models that lie on one line have no plane through them; take three others.")
        zero = torch.zeros_like(length)
        points = torch.stack([zero, zero, length, zero, along, height]).view(3, 2)
        return cls(first, torch.stack([e1, across / height]), points)

    def models(self, at: Tensor) -> Tensor:
        """The models [N, P] at coordinates ``at`` [N, 2]."""
        return self.origin + at @ self.axes


@dataclass(frozen=True)
class Surface:
    """Losses on a grid of a plane.

    Attributes:
        plane: the plane.
        a: the grid along e_1, float64 [A].
        b: the grid along e_2, float64 [B].
        losses: float64 [B, A].
    """

    plane: Plane
    a: np.ndarray
    b: np.ndarray
    losses: np.ndarray

    def share_below(self, level: float) -> float:
        """The fraction of the grid where the loss is at most ``level``: a measure of how wide a valley is."""
        return float((self.losses <= level).mean())


def losses_of(loss: Loss, models: Tensor, batch: int = 1) -> np.ndarray:
    """The loss of each model of ``models`` [N, P], float64 [N].

    Args:
        loss: the loss of one model; with ``batch`` above 1 it must support ``torch.func.vmap``.
        models: the models, [N, P].
        batch: number of models evaluated at once.

    Raises:
        ConfigError: if ``batch`` is below 1.
    """
    if batch < 1:
        raise ConfigError(f"batch is {batch}, but it must be at least 1.")
    several = (lambda some: loss(some[0])[None]) if batch == 1 else torch.vmap(loss)
    with torch.no_grad():
        chunks = [several(some).double().cpu() for some in models.split(batch)]
    return torch.cat(chunks).numpy()


def surface(loss: Loss, plane: Plane, steps: int = 25, margin: float = 0.4, batch: int = 1) -> Surface:
    """The loss on a grid that contains the plane's three models and a margin around them.

    Args:
        loss: the loss of one model.
        plane: the plane.
        steps: grid points along each axis, at least 2.
        margin: extent of the grid beyond the models, relative to their spread along each axis.
        batch: number of models evaluated at once.

    Raises:
        ConfigError: if there are fewer than two steps or the margin is negative.

    >>> plane = Plane.through(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    >>> surface(lambda theta: theta.square().sum(), plane, steps=2, margin=0.0).losses.tolist()
    [[0.0, 1.0], [1.0, 2.0]]
    """
    if steps < 2 or not margin >= 0:
        raise ConfigError("a surface needs at least two steps along each axis, and a margin of at least 0.")
    low, high = plane.points.min(0).values, plane.points.max(0).values
    room = margin * (high - low)
    a, b = (
        torch.linspace(float(x), float(y), steps).to(plane.axes) for x, y in zip(low - room, high + room, strict=True)
    )
    rows = [losses_of(loss, plane.models(torch.stack([a, y.expand(steps)], 1)), batch) for y in b]
    return Surface(plane, a.cpu().double().numpy(), b.cpu().double().numpy(), np.stack(rows))


def segment(loss: Loss, w: Tensor, v: Tensor, at: Sequence[float], batch: int = 1) -> np.ndarray:
    """The loss at (1 - λ)w + λv for every λ of ``at``, float64 [len(at)].

    >>> segment(lambda theta: theta.square().sum(), torch.zeros(1), torch.tensor([2.0]), (0.0, 0.5, 1.0)).tolist()
    [0.0, 1.0, 4.0]
    """
    share = torch.tensor(at).to(w)[:, None]
    return losses_of(loss, (1 - share) * w + share * v, batch)


def barrier(losses: np.ndarray) -> float:
    """The largest excess of the losses along a segment, at equal steps, over the line between its end points; ≥ 0.

    >>> barrier(np.array([0.0, 3.0, 2.0]))
    2.0
    """
    line = np.linspace(losses[0], losses[-1], len(losses))
    return float(np.max(losses - line))


def cross_entropy(module: nn.Module, layout: Layout, x: Tensor, y: Tensor, buffers: Tensor | None = None) -> Loss:
    """The mean cross entropy of a classifier on fixed samples, as a function of its parameters [P].

    Args:
        module: the architecture, in evaluation mode; its own parameter values are never read.
        layout: the positions of its parameters in [P].
        x: inputs [N, ...].
        y: class numbers [N].
        buffers: the module's buffers as a vector; by default its current ones.
    """
    module = copy.deepcopy(module).eval()
    buffer_values = layout.read(module)[1] if buffers is None else buffers

    def loss(theta: Tensor) -> Tensor:
        return F.cross_entropy(call(module, layout.views(theta, buffer_values), (x,)), y)

    return loss


def draw(axis: Any, landscape: Surface, names: Sequence[str] = ("1", "2", "3"), highest: float | None = None) -> Any:
    """Draw the contours of a surface with the three models marked; losses above ``highest`` are clipped.

    Returns:
        The mappable for a colour bar.
    """
    top = float(landscape.losses.max()) if highest is None else highest
    low = min(float(landscape.losses.min()), top)
    levels = np.linspace(low, top if top > low else low + 1e-9, 16)
    contours = axis.contourf(
        landscape.a, landscape.b, np.minimum(landscape.losses, top), levels=levels, cmap="viridis_r"
    )
    axis.contour(
        landscape.a, landscape.b, np.minimum(landscape.losses, top), levels=levels, colors="white", linewidths=0.3
    )
    for (x, y), name in zip(landscape.plane.points.tolist(), names, strict=True):
        axis.plot(x, y, "o", color="#c1272d", markeredgecolor="white")
        axis.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", color="#c1272d")
    axis.set_aspect("equal")
    return contours


def picture(
    landscape: Surface, path: Path, names: Sequence[str] = ("1", "2", "3"), highest: float | None = None
) -> None:
    """``draw`` into a file."""
    figure, axis = reporting.subplots(figsize=(5, 4))
    figure.colorbar(draw(axis, landscape, names, highest), ax=axis, label="loss")
    reporting.save(figure, path)
