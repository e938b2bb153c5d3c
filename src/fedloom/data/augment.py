"""Augmentation: random transformations of a mini-batch of images [N, C, H, W], drawn per sample.

Draws are plain tensors, apart from their application. Colour operations work on pixels in [0, 1]. Pillow works on 8
bits: posterise and equalise round to 8 bits as well, the other operations do not, so results differ from Pillow's by
rounding. Magnitudes of the policies follow the published tables as implemented by torchvision: shear up to .3,
translation up to 150/331 of the image, rotation up to 30 degrees, brightness, colour, contrast and sharpness by factors
1 ± .9, posterise down to 4 bits, solarise from 255 down to 0; signs are random. As in the authors' code, pixels from
outside the image get the mean colour.

>>> from fedloom.data.augment import augmentations
>>> augmentations.names()
['crop', 'flip', 'cutout', 'jitter', 'blur', 'autoaugment', 'randaugment']
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

from fedloom.base.errors import ConfigError, in_words
from fedloom.base.ranges import Count, Positive, Probability, Range
from fedloom.base.registry import Ranged, Registry
from fedloom.core.federation import Arrays

Draws = dict[str, Tensor]  # random parameters, one row per sample


@dataclass(frozen=True)
class Scale:
    """The normalisation of stored images, x = (pixel - mean) / std, with mean and std [C, 1, 1] in the type of x."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Scale:
        """The normalisation on the device and in the type of ``x``; the identity for empty ``mean`` and ``std``."""
        pair = [
            torch.tensor(v or (d,), dtype=x.dtype, device=x.device)[:, None, None] for v, d in ((mean, 0.0), (std, 1.0))
        ]
        return cls(*pair)

    @property
    def black(self) -> Tensor:
        """The stored value of a black pixel, [C, 1, 1]."""
        return -self.mean / self.std

    def pixels(self, x: Tensor) -> Tensor:
        """Pixels in [0, 1] of stored images."""
        return x * self.std + self.mean

    def stored(self, pixels: Tensor) -> Tensor:
        """Stored images of pixels in [0, 1]."""
        return (pixels - self.mean) / self.std


@dataclass(frozen=True)
class Augmentation(Ranged, ABC):
    """A random transformation of images, drawn independently for every sample of a batch.

    ``draw`` turns a random stream into plain tensors, and ``apply`` is a deterministic function of them. A client's
    mini-batch is therefore transformed identically on every engine, even when a whole cohort's batches are stacked.
    """

    pixels: ClassVar[bool] = False  # whether ``apply`` maps pixels in [0, 1] to pixels in [0, 1]
    colours: ClassVar[bool] = False  # whether images must have one or three channels

    @abstractmethod
    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        """Random parameters for ``count`` images of the given shape [C, H, W]; tensors [count, ...]."""

    @abstractmethod
    def apply(self, x: Tensor, parameters: Draws, scale: Scale) -> Tensor:
        """Transformed images [N, C, H, W] of the type and on the device of ``x``; their height and width may differ."""


augmentations = Registry[Augmentation]("augmentation")


def augmentation(choice: str | Mapping[str, Any] | Augmentation) -> Augmentation:
    """Make an augmentation from its name, or from a mapping of its name and settings.

    >>> from fedloom.data.augment import augmentation
    >>> augmentation({"name": "cutout", "size": 8})
    Cutout(size=8)

    Raises:
        ConfigError: for unknown names and settings.
    """
    return choice if isinstance(choice, Augmentation) else augmentations.of(choice)


@dataclass(frozen=True)
class Pipeline:
    """A sequence of augmentations of normalised images.

    Runs of augmentations that work on pixels are wrapped in one conversion to pixels in [0, 1] and back.
    """

    steps: tuple[Augmentation, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, x: Tensor, draws: Sequence[tuple[Generator, int]]) -> Tensor:
        """Transformed images [N, C, H, W]; each (generator, n) of ``draws`` decides for the next n images.

        Raises:
            ValueError: if a step does not return as many images of the same type.
        """
        shape = tuple(x.shape[1:])
        parameters = [[step.draw(count, shape, rng) for step in self.steps] for rng, count in draws]
        scale = Scale.of(x, self.mean, self.std)
        pixels = False
        for number, step in enumerate(self.steps):
            if step.pixels != pixels:
                x = scale.pixels(x).clamp_(0, 1) if step.pixels else scale.stored(x)
                pixels = step.pixels
            parts = [steps[number] for steps in parameters]
            batch = parts[0] if len(parts) == 1 else {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
            x = _images(step.apply(x, {k: v.to(x.device) for k, v in batch.items()}, scale), x, step)
        return scale.stored(x) if pixels else x


def _images(result: object, x: Tensor, step: Augmentation) -> Tensor:
    """What an augmentation made of images [N, C, H, W]; an error unless it is as many images of the same type."""
    form = in_words(result)
    if isinstance(result, Tensor):
        if result.ndim == 4 and len(result) == len(x) and result.dtype == x.dtype and result.device == x.device:
            return result
        form += f", {result.dtype} on {result.device},"
    raise ValueError(
        f"augmentation {type(step).__name__.lower()!r} returned {form} for images of shape {list(x.shape)}, {x.dtype} "
        f"on {x.device}; it must return as many images [N, C, H, W] of the same type"
    )


def pipeline(choices: Sequence[str | Mapping[str, Any] | Augmentation], arrays: Arrays) -> Pipeline:
    """The pipeline of the given augmentations for a data set.

    Raises:
        ConfigError: for unknown names and settings, and augmentations that do not suit the data.
    """
    steps = tuple(augmentation(choice) for choice in choices)
    x = arrays.x
    for step in steps:
        name = type(step).__name__.lower()
        if x.ndim != 4 or not x.is_floating_point():
            raise ConfigError(
                f"augmentation {name!r} needs images [N, C, H, W], not inputs of shape {list(x.shape[1:])}."
            )
        if isinstance(step, Blur) and step.size // 2 >= min(x.shape[2:]):
            raise ConfigError(
                f"augmentation 'blur' of size {step.size} reaches beyond images of {x.shape[2]} by {x.shape[3]}; "
                f"choose a size below {2 * min(x.shape[2:])}."
            )
        if step.colours and x.shape[1] not in (1, 3):
            raise ConfigError(f"augmentation {name!r} needs images of 1 or 3 channels, not {x.shape[1]}.")
        if step.pixels and not arrays.mean and len(x) and (float(x.min()) < 0 or float(x.max()) > 1):
            raise ConfigError(
                f"augmentation {name!r} works on pixels from 0 to 1, but the inputs lie between {float(x.min()):.3g} "
                f"and {float(x.max()):.3g}; give the mean and std of their normalisation (Arrays.mean, Arrays.std)."
            )
    return Pipeline(steps, arrays.mean, arrays.std)


def uniform(rng: Generator, count: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform draws from [low, high), float32 [count]."""
    return torch.from_numpy(rng.random(count, dtype=np.float32)) * (high - low) + low


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """One value per image, in the type of ``x`` and the shape [N, 1, 1, 1]."""
    return values.to(x.dtype)[:, None, None, None]


def grey(x: Tensor) -> Tensor:
    """Luminance [N, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return (x * torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype, device=x.device)[:, None, None]).sum(1, keepdim=True)


def blend(base: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Interpolate from ``base`` (factor 0) to ``x`` (1) or extrapolate beyond it; clipped to [0, 1]."""
    return (base + per_image(factor, x) * (x - base)).clamp(0, 1)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Black at factor 0, unchanged at 1, brighter above."""
    return blend(torch.zeros_like(x), x, factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """The mean grey at factor 0, unchanged at 1, more contrast above."""
    return blend(grey(x).mean((1, 2, 3), keepdim=True), x, factor)


def colour(x: Tensor, factor: Tensor) -> Tensor:
    """Grey at factor 0, unchanged at 1, more saturated above."""
    return x if x.shape[1] == 1 else blend(grey(x), x, factor)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Smoothed at factor 0, unchanged at 1, sharper above; border pixels stay."""
    kernel = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=x.dtype, device=x.device) / 13
    smooth = x.clone()
    if min(x.shape[2:]) > 2:
        inner = F.conv2d(x.flatten(0, 1)[:, None], kernel[None, None])
        smooth[:, :, 1:-1, 1:-1] = inner.unflatten(0, x.shape[:2])[:, :, 0]
    return blend(smooth, x, factor)


def invert(x: Tensor, _: Tensor) -> Tensor:
    """Invert all pixels; the strength is ignored."""
    return 1 - x


def solarise(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert pixels of at least ``threshold``, 0 to 255."""
    return torch.where(x * 255 >= per_image(threshold, x), 1 - x, x)


def posterise(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the leading ``bits`` of 8 bits per pixel."""
    step = 2 ** (8 - per_image(bits, x))
    return torch.floor((x * 255).round() / step) * step / 255


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (x - low) / torch.where(span > 0, span, 1.0), x)


def equalise(x: Tensor, _: Tensor) -> Tensor:
    """Equalise the histogram of each channel."""
    level = (x * 255).round().long().flatten(2)  # [N, C, HW]
    planes = level.flatten(0, 1)
    counts = torch.zeros(len(planes), 256, dtype=torch.long, device=x.device)
    counts.scatter_add_(1, planes, torch.ones_like(planes))
    last = counts.gather(1, planes.amax(1, keepdim=True))  # pixels of the brightest level
    step = (planes.shape[1] - last) // 255
    table = ((counts.cumsum(1) - counts + step // 2) // step.clamp(min=1)).clamp(max=255)
    new = torch.where(step > 0, table.gather(1, planes), planes)
    return new.to(x.dtype).div(255).view_as(x)


def hue(x: Tensor, turn: Tensor) -> Tensor:
    """Shift hues by the fraction ``turn`` of the colour circle."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    high, low = x.amax(1), x.amin(1)
    span = high - low
    safe = torch.where(span > 0, span, 1.0)
    angle = torch.where(
        high == red,
        (green - blue) / safe,
        torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    angle = (angle / 6 + turn.to(x.dtype)[:, None, None]) % 1 * 6

    def channel(offset: int) -> Tensor:
        k = (offset + angle) % 6
        return high - span * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1)


def blur(x: Tensor, sigma: Tensor, size: int) -> Tensor:
    """Gaussian blur with a kernel of odd ``size`` and reflection at the border; ``sigma`` [N] in pixels."""
    half = size // 2
    at = torch.arange(-half, half + 1, dtype=x.dtype, device=x.device)
    weight = torch.exp(-0.5 * (at / sigma.to(x.dtype)[:, None]) ** 2)  # [N, size]
    weight = weight / weight.sum(1, keepdim=True)
    for axis in (2, 3):
        wide = F.pad(x, [half, half, 0, 0] if axis == 3 else [0, 0, half, half], mode="reflect")
        x = sum(
            (per_image(weight[:, k], x) * wide.narrow(axis, k, x.shape[axis]) for k in range(size)),
            start=torch.zeros_like(x),
        )
    return x


def warp(x: Tensor, matrix: Tensor, fill: Tensor | float = 0.0, mode: str = "nearest") -> Tensor:
    """Affine warp: the output pixel at column u and row v is sampled at ``matrix`` (u, v, 1); pixel centres are at .5.

    Args:
        x: images [N, C, H, W].
        matrix: one affine map per image, [N, 2, 3].
        fill: colour outside the image, [C, 1, 1].
        mode: nearest or bilinear.
    """
    height, width = x.shape[2:]
    v, u = torch.meshgrid(
        torch.arange(height, dtype=x.dtype, device=x.device) + 0.5,
        torch.arange(width, dtype=x.dtype, device=x.device) + 0.5,
        indexing="ij",
    )
    m = matrix.to(x.dtype)[:, :, :, None, None]  # elementwise products: each image's bits are independent of the batch
    there = (m[:, :, 0] * u + m[:, :, 1] * v + m[:, :, 2]).movedim(1, -1)  # [N, H, W, 2]
    size = torch.tensor([width, height], dtype=x.dtype, device=x.device)
    return F.grid_sample(x - fill, there * 2 / size - 1, mode=mode, align_corners=False) + fill


def around_centre(linear: Tensor, height: int, width: int) -> Tensor:
    """Affine maps [N, 2, 3] that apply ``linear`` [N, 2, 2] around the centre of the image."""
    centre = torch.tensor([width / 2, height / 2], dtype=linear.dtype, device=linear.device)
    return torch.cat([linear, (centre - linear @ centre)[:, :, None]], dim=2)


def rotation(degrees: Tensor) -> Tensor:
    """Counter-clockwise rotations, [N, 2, 2]."""
    angle = torch.deg2rad(degrees)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


@augmentations.register
@dataclass(frozen=True)
class Crop(Augmentation):
    """Random crop to the original size after padding with black.

    Args:
        padding: padding on every side, in pixels.
    """

    padding: Count = 4

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"corner": torch.from_numpy(rng.integers(0, 2 * self.padding + 1, (count, 2)))}

    def apply(self, x: Tensor, parameters: Draws, scale: Scale) -> Tensor:
        n, channels, height, width = x.shape
        wide = F.pad(x - scale.black, [self.padding] * 4)  # [N, C, H + 2p, W + 2p]
        corner = parameters["corner"]
        down = corner[:, :1] + torch.arange(height, device=x.device)  # [N, H]
        right = corner[:, 1:] + torch.arange(width, device=x.device)  # [N, W]
        tall = wide.gather(2, down[:, None, :, None].expand(n, channels, height, wide.shape[3]))
        return tall.gather(3, right[:, None, None, :].expand(n, channels, height, width)) + scale.black


@augmentations.register
@dataclass(frozen=True)
class Flip(Augmentation):
    """Random horizontal flip.

    Args:
        p: probability of a flip.
    """

    p: Probability = 0.5

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"flipped": uniform(rng, count) < self.p}

    def apply(self, x: Tensor, parameters: Draws, scale: Scale) -> Tensor:
        return torch.where(parameters["flipped"][:, None, None, None], x.flip(3), x)


@augmentations.register
@dataclass(frozen=True)
class Cutout(Augmentation):
    """A square set to the mean colour, centred at a random pixel and clipped at the border (DeVries and Taylor, 2017).

    The mean colour is 0 in a normalised image, as in the authors' code; in images without normalisation it is black.

    Args:
        size: side of the square in pixels.
    """

    size: Count = 16

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"centre": torch.from_numpy(rng.integers(0, shape[-2:], (count, 2)))}

    def apply(self, x: Tensor, parameters: Draws, scale: Scale) -> Tensor:
        start = parameters["centre"] - self.size // 2

        def inside(axis: int) -> Tensor:
            at = torch.arange(x.shape[2 + axis], device=x.device) - start[:, axis, None]
            return (at >= 0) & (at < self.size)

        return x.masked_fill((inside(0)[:, :, None] & inside(1)[:, None, :])[:, None], 0.0)


@augmentations.register
@dataclass(frozen=True)
class Jitter(Augmentation):
    """Colour jitter: random changes of brightness, contrast, saturation and hue, in this order.

    The first three are multiplied by a factor from [1 - s, 1 + s]; the hue is shifted by up to a fraction s of the
    colour circle. Grey images have neither saturation nor hue.

    Args:
        brightness: s of the brightness.
        contrast: s of the contrast.
        saturation: s of the saturation.
        hue: s of the hue, at most .5.
        p: probability that an image is changed.
    """

    brightness: Probability = 0.4
    contrast: Probability = 0.4
    saturation: Probability = 0.4
    hue: Annotated[float, Range(0, 0.5)] = 0.1
    p: Probability = 0.8

    pixels: ClassVar[bool] = True
    colours: ClassVar[bool] = True

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        happens = uniform(rng, count) < self.p
        neutral = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
        factors = {k: uniform(rng, count, v - getattr(self, k), v + getattr(self, k)) for k, v in neutral.items()}
        return {k: torch.where(happens, v, neutral[k]) for k, v in factors.items()} | {"happens": happens}

    def apply(self, x: Tensor, parameters: Draws, scale: Scale) -> Tensor:
        new = brightness(x, parameters["brightness"])
        new = contrast(new, parameters["contrast"])
        new = colour(new, parameters["saturation"])
        new = hue(new, parameters["hue"])
        return torch.where(parameters["happens"][:, None, None, None], new, x)


@augmentations.register
@dataclass(frozen=True)
class Blur(Augmentation):
    """Gaussian blur with a random standard deviation.

    Args:
        size: side of the kernel in pixels, odd; about a tenth of the image.
        low: smallest standard deviation in pixels.
        high: largest standard deviation in pixels.
        p: probability that an image is blurred.
    """

    size: Annotated[int, Range(3)] = 3
    low: Positive = 0.1
    high: Positive = 2.0
    p: Probability = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 2 == 0:
            raise ConfigError(f"augmentation 'blur': size must be odd, not {self.size}.")

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        return {"sigma": uniform(rng, count, self.low, self.high), "happens": uniform(rng, count) < self.p}

    def apply(self, x: Tensor, parameters: Draws, scale: Scale) -> Tensor:
        return torch.where(parameters["happens"][:, None, None, None], blur(x, parameters["sigma"], self.size), x)


MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
COLOURS = {
    "brightness": brightness,
    "color": colour,
    "contrast": contrast,
    "sharpness": sharpness,
    "posterize": posterise,
    "solarize": solarise,
    "autocontrast": autocontrast,
    "equalize": equalise,
    "invert": invert,
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
    most = (0.3, 0.3, 150 / 331 * width, 150 / 331 * height, 30.0)
    greatest: dict[str, float] = dict(zip(MOVES, most, strict=True))
    result = np.zeros(operation.shape)
    for name in OPERATIONS:
        here = operation == NUMBER[name]
        if name in SIGNED:
            value = greatest.get(name, 0.9) * share
            value = np.trunc(value) if name.startswith("translate") else value
            result = np.where(here, signs * value + (name in COLOURS), result)
        elif name == "posterize":
            result = np.where(here, 8 - np.round(4 * share), result)
        elif name == "solarize":
            result = np.where(here, 255 * (1 - share), result)
    return result


def apply_operations(x: Tensor, operation: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Apply one operation (an index of ``OPERATIONS``) per image, of strength ``value``; pixels are in [0, 1]."""
    x = x.clone()
    moved = ((operation >= NUMBER["shear_x"]) & (operation <= NUMBER["rotate"])).nonzero()[:, 0]
    if len(moved):
        x[moved] = warp(x[moved], affine_maps(operation[moved], value[moved], *x.shape[2:]), fill)
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
    turned = around_centre(rotation(value), height, width)
    return torch.where((operation == NUMBER["rotate"])[:, None, None], turned, matrix)


def random_signs(rng: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random signs ±1."""
    return rng.integers(0, 2, shape) * 2 - 1


@dataclass(frozen=True)
class _Policy(Augmentation):
    """Operations applied in sequence."""

    pixels: ClassVar[bool] = True
    colours: ClassVar[bool] = True

    def apply(self, x: Tensor, parameters: Draws, scale: Scale) -> Tensor:
        for turn in range(parameters["operation"].shape[1]):
            x = apply_operations(
                x, parameters["operation"][:, turn], parameters["strength"][:, turn].to(x.dtype), scale.mean
            )
        return x


@augmentations.register
@dataclass(frozen=True)
class AutoAugment(_Policy):
    """AutoAugment with the CIFAR-10 policy: a random one of 25 pairs of operations (Cubuk et al., 2019)."""

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        policies = POLICY[rng.integers(0, len(POLICY), count)]  # [count, 2, 3]
        happens = rng.random((count, 2)) < policies[..., 1]
        operation = np.where(happens, policies[..., 0], 0).astype(np.int64)
        value = strength(operation, policies[..., 2], 10, random_signs(rng, (count, 2)), shape[2], shape[1])
        return {"operation": torch.from_numpy(operation), "strength": torch.from_numpy(value)}


@augmentations.register
@dataclass(frozen=True)
class RandAugment(_Policy):
    """RandAugment: random operations of fourteen, at one common magnitude (Cubuk et al., 2020).

    Args:
        operations: number of operations per image.
        magnitude: level of strength, 0 to 30.
    """

    operations: Count = 2
    magnitude: Annotated[int, Range(0, 30)] = 9

    def draw(self, count: int, shape: tuple[int, ...], rng: Generator) -> Draws:
        size = (count, self.operations)
        operation = rng.integers(0, NUMBER["invert"], size)  # all but invert, equally likely
        value = strength(
            operation, np.full(size, float(self.magnitude)), 31, random_signs(rng, size), shape[2], shape[1]
        )
        return {"operation": torch.from_numpy(operation), "strength": torch.from_numpy(value)}


POLICY = table(CIFAR)
