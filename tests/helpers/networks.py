"""Tiny models with fixed starts, with ``features`` and ``head`` as every model has them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from helpers.federations import CLASSES, FEATURES


class BodyAndHead(nn.Module):
    """A body and a linear head."""

    def __init__(self, body: nn.Module, width: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def fixed(module: nn.Module, seed: int = 0, scale: float = 0.5) -> nn.Module:
    """The module with weights that depend on ``seed`` alone."""
    draw = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.tensor(scale * draw.normal(size=tuple(parameter.shape))))
    return module


def tanh_net(width: int = 3, seed: int = 0) -> nn.Module:
    """Linear, tanh, linear: the model whose gradients the oracles derive by hand."""
    return fixed(BodyAndHead(nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh()), width), seed)


class Flattening(BodyAndHead):
    """A net on vectors that takes them in any shape, with the same parameters under the same names."""

    def __init__(self, net: nn.Module) -> None:
        nn.Module.__init__(self)
        self.body, self.head = net.body, net.head

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1))


def with_norm(net: nn.Module, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    """The net with its features normalised."""
    net.body = nn.Sequential(net.body, norm(net.head.in_features))
    return net


def teacher_net() -> nn.Module:
    """A wider tanh net with other weights, from which methods learn that need a teacher."""
    return Flattening(tanh_net(5, seed=1))


def headless() -> nn.Module:
    """A linear model with no parameter called ``head``."""
    return fixed(nn.Linear(FEATURES, CLASSES))


def linear_layers() -> nn.Module:
    """Two linear layers, body and head, with nothing between that could stop an overflow."""
    return fixed(BodyAndHead(nn.Linear(FEATURES, 3), 3))


def line(features: int) -> Callable[[], nn.Module]:
    """θᵀx without intercept, from zero."""

    def make() -> nn.Module:
        module = nn.Linear(features, 1, bias=False)
        nn.init.zeros_(module.weight)
        return module

    return make


def images(norm: str = "none", dropout: float = 0.0) -> Callable[[], nn.Module]:
    """A convolutional net on [2, 5, 5] images with the given normalisation: none, batch or group."""

    def make() -> nn.Module:
        norms = {"none": nn.Identity(), "batch": nn.BatchNorm2d(4), "group": nn.GroupNorm(2, 4)}
        layers = [nn.Conv2d(2, 4, 3, padding=1), norms[norm], nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()]
        return BodyAndHead(nn.Sequential(*layers, nn.Dropout(dropout)), 18)

    return make


IMAGE = (2, 5, 5)
