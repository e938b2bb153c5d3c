"""AutoAugment and RandAugment: random sequences of image operations with given magnitudes.

Magnitudes follow the published tables as implemented by torchvision: shear up to .3, translation up to 150/331 of the
image, rotation up to 30 degrees, brightness, colour, contrast and sharpness by factors 1 ± .9, posterise down to 4
bits, solarise from 255 down to 0. Signs are random. As in the authors' code, pixels from outside the image get the mean
colour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from fedloom.core.checks import at_least
from fedloom.core.errors import ConfigError
from fedloom.data.augment import pixels
from fedloom.data.augment.base import Augmentation, Draws, Scale, augmentations

MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
COLOURS = {
    "brightness": pixels.brightness,
    "color": pixels.colour,
    "contrast": pixels.contrast,
    "sharpness": pixels.sharpness,
    "posterize": pixels.posterise,
    "solarize": pixels.solarise,
    "autocontrast": pixels.autocontrast,
    "equalize": pixels.equalise,
    "invert": pixels.invert,
}
OPERATIONS = ("identity", *MOVES, *COLOURS)
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
SIGNED = {*MOVES, "brightness", "color", "contrast", "sharpness"}

CIFAR = """
invert .1 7, contrast .2 6;         rotate .7 2, translate_x .3 9;      sharpness .8 1, sharpness .9 3
shear_y .5 8, translate_y .7 9;     autocontrast .5 8, equalize .9 2;   shear_y .2 7, posterize .3 7
color .4 3, brightness .6 7;        sharpness .3 9, brightness .7 9;    equalize .6 5, equalize .5 1
contrast .6 7, sharpness .6 5;      color .7 7, translate_x .5 8;       equalize .3 7, autocontrast .4 8
translate_y .4 3, sharpness .2 6;   brightness .9 6, color .2 8;        solarize .5 2, invert .0 3
equalize .2 0, autocontrast .6 0;   equalize .2 8, equalize .6 4;       color .9 9, equalize .6 6
autocontrast .8 4, solarize .2 8;   brightness .1 3, color .7 0;        solarize .4 5, autocontrast .9 3
translate_y .9 9, translate_y .7 9; autocontrast .9 2, solarize .8 3;   equalize .8 8, invert .1 3
translate_y .7 9, autocontrast .9 1
"""
"""The 25 CIFAR-10 sub-policies (Cubuk et al., CVPR 2019, appendix): pairs of operation, probability and level."""


def table(policy: str) -> np.ndarray:
    """Sub-policies as an array [S, 2, 3] of operation number, probability and level."""
    rows = [part.split(",") for line in policy.strip().splitlines() for part in line.split(";")]
    words = [[operation.split() for operation in row] for row in rows]
    return np.array([[[NUMBER[name], float(p), float(level)] for name, p, level in row] for row in words])


def strength(
    operation: np.ndarray, level: np.ndarray, levels: int, signs: np.ndarray, width: int, height: int
) -> np.ndarray:
    """The strength of an operation at a level (0 .. levels - 1); ``signs`` ±1 apply to signed operations."""
    share = level / (levels - 1)
    greatest = {
        "shear_x": 0.3,
        "shear_y": 0.3,
        "translate_x": 150 / 331 * width,
        "translate_y": 150 / 331 * height,
        "rotate": 30.0,
    }
    found = np.zeros(operation.shape)
    for name in OPERATIONS:
        here = operation == NUMBER[name]
        if name in SIGNED:
            value = greatest.get(name, 0.9) * share
            value = np.trunc(value) if name.startswith("translate") else value
            found = np.where(here, signs * value + (name in COLOURS), found)
        elif name == "posterize":
            found = np.where(here, 8 - np.round(4 * share), found)
        elif name == "solarize":
            found = np.where(here, 255 * (1 - share), found)
    return found


def apply_operations(x: Tensor, operation: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Apply one operation (an index of ``OPERATIONS``) per image, of strength ``value``; pixels are in [0, 1]."""
    x = x.clone()
    moved = ((operation >= NUMBER["shear_x"]) & (operation <= NUMBER["rotate"])).nonzero()[:, 0]
    if len(moved):
        x[moved] = pixels.warp(x[moved], affine_maps(operation[moved], value[moved], *x.shape[2:]), fill)
    for name, change in COLOURS.items():
        rows = (operation == NUMBER[name]).nonzero()[:, 0]
        if len(rows):
            x[rows] = change(x[rows], value[rows])
    return x


def affine_maps(operation: Tensor, value: Tensor, height: int, width: int) -> Tensor:
    """Affine maps [N, 2, 3] of shears, translations and rotations; shears fix the upper left corner."""
    matrix = torch.eye(2, 3, dtype=value.dtype, device=value.device).repeat(len(value), 1, 1)
    for name, row, column in (("shear_x", 0, 1), ("shear_y", 1, 0), ("translate_x", 0, 2), ("translate_y", 1, 2)):
        matrix[:, row, column] = torch.where(operation == NUMBER[name], value, matrix[:, row, column])
    turned = pixels.around_centre(pixels.rotation(value), height, width)
    return torch.where((operation == NUMBER["rotate"])[:, None, None], turned, matrix)


def random_signs(rng: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random signs ±1."""
    return rng.integers(0, 2, shape) * 2 - 1


@dataclass(frozen=True)
class _Policy(Augmentation):
    """Operations applied in sequence."""

    pixels: ClassVar[bool] = True
    colours: ClassVar[bool] = True

    def apply(self, x: Tensor, drawn: Draws, scale: Scale) -> Tensor:
        for turn in range(drawn["operation"].shape[1]):
            x = apply_operations(x, drawn["operation"][:, turn], drawn["strength"][:, turn].to(x.dtype), scale.mean)
        return x


@augmentations.register
@dataclass(frozen=True)
class AutoAugment(_Policy):
    """AutoAugment with the CIFAR-10 policy: a random one of 25 pairs of operations (Cubuk et al., 2019)."""

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        chosen = POLICY[rng.integers(0, len(POLICY), count)]  # [count, 2, 3]
        happens = rng.random((count, 2)) < chosen[..., 1]
        operation = np.where(happens, chosen[..., 0], 0).astype(np.int64)
        value = strength(operation, chosen[..., 2], 10, random_signs(rng, (count, 2)), shape[2], shape[1])
        return {"operation": torch.from_numpy(operation), "strength": torch.from_numpy(value)}


@augmentations.register
@dataclass(frozen=True)
class RandAugment(_Policy):
    """RandAugment: random operations of fourteen, at one common magnitude (Cubuk et al., 2020).

    Args:
        operations: number of operations per image.
        magnitude: level of strength, 0 to 30.

    Raises:
        ConfigError: if a setting is out of range.
    """

    operations: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        at_least(1, "randaugment: ", operations=self.operations)
        if not 0 <= self.magnitude <= 30:
            raise ConfigError(f"randaugment: magnitude must lie in 0 .. 30, not {self.magnitude}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        size = (count, self.operations)
        operation = rng.integers(0, NUMBER["invert"], size)  # all but invert, equally likely
        value = strength(
            operation, np.full(size, float(self.magnitude)), 31, random_signs(rng, size), shape[2], shape[1]
        )
        return {"operation": torch.from_numpy(operation), "strength": torch.from_numpy(value)}


POLICY = table(CIFAR)
