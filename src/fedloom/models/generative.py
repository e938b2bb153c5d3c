"""Networks that make labelled images: a conditional variational autoencoder and a conditional adversarial pair.

The thesis (Hahn, 2024, IV.4.1) compares with federated conditional GANs (Rasouli et al., 2020; Mirza, Osindero, 2014)
and federated conditional VAEs (Sohn et al., 2015) and prints no layers; these are small convolutional ones for images
of 28, 32 or 64 pixels (any size from 2 on works). Images are halved until no side is above 8, and doubled from there.

Labels enter at every stage: a linear map of the one-hot label shifts each channel. There is no batch normalisation and
no buffer, so that all of a network lies in one vector of parameters and runs under ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.checks import image, positive
from fedloom.models.classifier import models
from fedloom.models.norm import Norm, normalisation

Bound = float | Sequence[float]
"""A pixel's least or greatest value: one number, or one a channel."""

BASE = 8  # no side of the smallest feature map is larger


def halvings(sides: Sequence[int]) -> int:
    """How often an image is halved: at least once, and until no side is above 8.

    >>> [halvings((side, side)) for side in (8, 14, 28, 32, 64)]
    [1, 1, 2, 2, 3]
    """
    count = 1
    while -(-max(sides) // 2**count) > BASE:
        count += 1
    return count


def one_hot(y: Tensor | None, classes: int, like: Tensor) -> Tensor:
    """Labels [N] as rows [N, classes] of the same kind as ``like``; all are class 0 where there are none.

    >>> one_hot(torch.tensor([1]), 3, torch.zeros(1)).tolist()
    [[0.0, 1.0, 0.0]]
    """
    if y is None:
        y = torch.zeros(len(like), dtype=torch.int64, device=like.device)
    return (y[:, None] == torch.arange(classes, device=like.device)).to(like.dtype)


class Stage(nn.Module):
    """Convolution, normalisation, a shift of each channel by the label, activation; before it a doubling if asked."""

    def __init__(self, conv: nn.Conv2d, norm: Norm, classes: int, act: nn.Module, doubles: bool = False) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm(conv.out_channels)
        self.label = nn.Linear(classes, conv.out_channels, bias=False)
        self.act = act
        self.doubles = doubles

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        """Feature maps [N, before, h, w] and one-hot labels [N, classes] to maps [N, after, ...]."""
        if self.doubles:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.act(self.norm(self.conv(x)) + self.label(code)[:, :, None, None])


class Reader(nn.Module):
    """Labelled images to numbers: convolutions of stride 2, then a linear layer of the features h they give.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        outputs: how many numbers an image gives.
        width: channels after the first halving; every further one doubles them.
        norm: makes the normalisation of a number of channels.
        act: the activation.
        project: whether ⟨v_y, h⟩ is added to the outputs, with a vector v_y for each class (Miyato, Koyama, 2018).
    """

    def __init__(
        self,
        classes: int,
        inputs: Sequence[int],
        outputs: int,
        width: int,
        norm: Norm,
        act: nn.Module,
        project: bool = False,
    ) -> None:
        super().__init__()
        before, *sides = inputs
        self.classes, self.stages = classes, nn.ModuleList()
        for number in range(halvings(sides)):
            after = width * 2**number
            self.stages.append(Stage(nn.Conv2d(before, after, 3, 2, 1, bias=False), norm, classes, act))
            before, sides = after, [-(-side // 2) for side in sides]
        features = before * sides[0] * sides[1]
        self.out = nn.Linear(features, outputs)
        self.project = nn.Linear(classes, features, bias=False) if project else None
        if self.project is not None:
            nn.init.normal_(self.project.weight, std=features**-0.5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Images [N, C, H, W] and labels [N] to [N, outputs]."""
        code = one_hot(y, self.classes, x)
        for stage in self.stages:
            x = stage(x, code)
        h = x.flatten(1)
        out = self.out(h)
        return out if self.project is None else out + (self.project(code) * h).sum(1, keepdim=True)


class Writer(nn.Module):
    """Latent vectors and labels to images: a linear layer, doublings with 3x3 convolutions, a bounded output.

    An image is low + (high - low)·σ(a), so that it lies in the data's range, whatever that is.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        latent: length of a latent vector.
        width: channels of the last but one stage; each before it has twice as many.
        norm: makes the normalisation of a number of channels.
        act: the activation.
        low: the least value of a pixel.
        high: the greatest.
    """

    def __init__(
        self,
        classes: int,
        inputs: Sequence[int],
        latent: int,
        width: int,
        norm: Norm,
        act: nn.Module,
        low: Bound,
        high: Bound,
    ) -> None:
        super().__init__()
        colours, *self.sides = inputs
        self.classes, self.low, self.high = classes, bounds(low, colours), bounds(high, colours)
        if not all(a < b for a, b in zip(self.low, self.high, strict=True)):
            raise ConfigError(f"the least value of a pixel must be below the greatest, not {low} and {high}.")
        count = halvings(self.sides)
        self.base = [-(-side // 2**count) for side in self.sides]
        before = self.first = width * 2 ** (count - 1)
        self.into = nn.Linear(latent + classes, self.first * self.base[0] * self.base[1])
        self.stages = nn.ModuleList()
        for number in range(count):
            after = max(width, before // 2) if number else before
            self.stages.append(Stage(nn.Conv2d(before, after, 3, 1, 1, bias=False), norm, classes, act, doubles=True))
            before = after
        self.out = nn.Conv2d(before, colours, 3, 1, 1)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Latent vectors [N, latent] and labels [N] to images [N, C, H, W]."""
        code = one_hot(y, self.classes, z)
        x = self.into(torch.cat([z, code], 1)).reshape(len(z), self.first, *self.base)
        for stage in self.stages:
            x = stage(x, code)
        height, width = self.sides
        low, high = (z.new_tensor(value)[:, None, None] for value in (self.low, self.high))
        return low + (high - low) * torch.sigmoid(self.out(x[:, :, :height, :width]))


def bounds(value: Bound, colours: int) -> tuple[float, ...]:
    """One number for every channel.

    >>> bounds(0.0, 3)
    (0.0, 0.0, 0.0)
    """
    given = (float(value),) * colours if isinstance(value, (int, float)) else tuple(float(v) for v in value)
    if len(given) != colours:
        raise ConfigError(f"a bound of the pixels' values is one number or one for each of {colours} channels.")
    return given


def _checked(
    model: str, classes: int, inputs: Sequence[int], width: int, norm: str, groups: int
) -> tuple[tuple[int, int, int], Norm]:
    sizes = image(model, classes, tuple(inputs))
    return sizes, normalisation(model, norm, groups, (positive(model, "width", width),))


class ConditionalVAE(nn.Module):
    """A conditional variational autoencoder: q(z | x, y) = N(mean, exp(logvar)), p(x | z, y) around x̂ (Sohn, 2015).

    An encoder of stride-2 convolutions and a decoder of doublings, group normalised, with swish. With 10 classes,
    latent vectors of 64 and the default width the two have 0.71 million parameters on 1x28x28, 0.91 million on 3x32x32
    and 2.00 million on 3x64x64.

    The encoder and the decoder are modules of their own, ``encoder(x, y)`` and ``decoder(z, y)``, so that either can be
    run with other parameters by ``torch.func.functional_call``; names begin with ``encoder.`` or ``decoder.``.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        latent: length of a latent vector z.
        width: channels after the first halving.
        norm: ``group`` or ``batch``, which brings buffers.
        groups: groups of channels in group normalisation; a divisor of ``width``.
        low: the least value of a pixel, one number or one a channel; (0 - mean) / std for normalised images.
        high: the greatest, likewise.

    Raises:
        ConfigError: for samples that are no images, an unknown normalisation, or bounds that are none.

    Example:
        >>> net = ConditionalVAE(10, (1, 28, 28), latent=16)
        >>> x, y = torch.rand(2, 1, 28, 28), torch.tensor([3, 4])
        >>> mean, logvar = net.encode(x, y)
        >>> mean.shape, net.decode(mean, y).shape
        (torch.Size([2, 16]), torch.Size([2, 1, 28, 28]))
    """

    def __init__(
        self,
        classes: int,
        inputs: Sequence[int],
        latent: int = 64,
        *,
        width: int = 32,
        norm: str = "group",
        groups: int = 8,
        low: Bound = 0.0,
        high: Bound = 1.0,
    ) -> None:
        super().__init__()
        sizes, make = _checked("ConditionalVAE", classes, inputs, width, norm, groups)
        self.classes, self.inputs, self.latent = classes, sizes, positive("ConditionalVAE", "latent", latent)
        self.encoder = Reader(classes, sizes, 2 * latent, width, make, nn.SiLU())
        self.decoder = Writer(classes, sizes, latent, width, make, nn.SiLU(), low, high)

    def encode(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mean [N, latent] and the logarithm of the variance [N, latent] of z for images [N, C, H, W]."""
        mean, logvar = self.encoder(x, y).chunk(2, 1)
        return mean, logvar

    def decode(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Images x̂ [N, C, H, W], in the data's range, for latent vectors [N, latent]."""
        return self.decoder(z, y)

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Any:
        """What ``part`` says of x: ``encode``, or ``decode``; else the images [N, C, H, W] rebuilt from the mean of z.

        Without labels all count as class 0.
        """
        if part == "encode":
            return self.encode(x, y)
        return self.decode(x if part == "decode" else self.encode(x, y)[0], y)


class ConditionalGAN(nn.Module):
    """A conditional generator and discriminator (Mirza, Osindero, 2014), for a federation as in Rasouli et al. (2020).

    A generator of doublings with swish, and a discriminator of stride-2 convolutions with leaky ReLU (slope 0.2), both
    group normalised. The discriminator's logit has the term ⟨v_y, h⟩ of projection (Miyato, Koyama, 2018): with shifted
    channels alone a generator needs several times as many steps until it heeds the label. With 10 classes, latent
    vectors of 100 and the default width the generator has 0.40 million parameters on 1x28x28, 0.51 million on 3x32x32
    and 1.15 million on 3x64x64, the discriminator 146, 168 and 556 thousand.

    The two are modules of their own, ``generator(z, y)`` and ``discriminator(x, y)``, so that either can be run with
    other parameters by ``torch.func.functional_call``; names begin with ``generator.`` or ``discriminator.``.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        latent: length of a latent vector z.
        width: channels before the generator's output; the discriminator has twice as many after its first halving.
        norm: ``group`` or ``batch``, which brings buffers.
        groups: groups of channels in group normalisation; a divisor of ``width``.
        low: the least value of a pixel, one number or one a channel; (0 - mean) / std for normalised images.
        high: the greatest, likewise.

    Raises:
        ConfigError: for samples that are no images, an unknown normalisation, or bounds that are none.

    Example:
        >>> net = ConditionalGAN(10, (3, 32, 32), latent=16)
        >>> y = torch.tensor([3, 4])
        >>> x = net.generate(torch.randn(2, 16), y)
        >>> x.shape, net.judge(x, y).shape
        (torch.Size([2, 3, 32, 32]), torch.Size([2]))
    """

    def __init__(
        self,
        classes: int,
        inputs: Sequence[int],
        latent: int = 100,
        *,
        width: int = 32,
        norm: str = "group",
        groups: int = 8,
        low: Bound = 0.0,
        high: Bound = 1.0,
    ) -> None:
        super().__init__()
        sizes, make = _checked("ConditionalGAN", classes, inputs, width, norm, groups)
        self.classes, self.inputs, self.latent = classes, sizes, positive("ConditionalGAN", "latent", latent)
        self.generator = Writer(classes, sizes, latent, width, make, nn.SiLU(), low, high)
        self.discriminator = Reader(classes, sizes, 1, 2 * width, make, nn.LeakyReLU(0.2), project=True)

    def generate(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Images [N, C, H, W], in the data's range, for latent vectors [N, latent]."""
        return self.generator(z, y)

    def judge(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Logits [N] that images [N, C, H, W] of these labels are real."""
        return self.discriminator(x, y).squeeze(1)

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Tensor:
        """What ``part`` says of x: ``generate``, or ``judge``; else logits [N] of images or of what latents become.

        Without labels all count as class 0. One pass of a latent vector goes through both networks and costs
        ``macs(net, (latent,))``.
        """
        if part == "generate":
            return self.generate(x, y)
        return self.judge(self.generate(x, y) if not part and x.ndim == 2 else x, y)


@models.register
def conditional_vae(
    *,
    classes: int,
    inputs: tuple[int, ...],
    low: Bound = 0.0,
    high: Bound = 1.0,
    latent: int = 64,
    width: int = 32,
    groups: int = 8,
) -> ConditionalVAE:
    """A conditional variational autoencoder, for ``fedcvae``; no classifier.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        low: the least value of a pixel, one number or one a channel.
        high: the greatest, likewise.
        latent: length of a latent vector, which is the method's.
        width: channels after the first halving.
        groups: groups of channels in group normalisation; a divisor of ``width``.
    """
    return ConditionalVAE(classes, inputs, latent, width=width, groups=groups, low=low, high=high)


@models.register
def conditional_gan(
    *,
    classes: int,
    inputs: tuple[int, ...],
    low: Bound = 0.0,
    high: Bound = 1.0,
    latent: int = 100,
    width: int = 32,
    groups: int = 8,
) -> ConditionalGAN:
    """A conditional generator and its discriminator, for ``fedcgan``; no classifier.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        low: the least value of a pixel, one number or one a channel.
        high: the greatest, likewise.
        latent: length of a latent vector, which is the method's.
        width: channels before the generator's output.
        groups: groups of channels in group normalisation; a divisor of ``width``.
    """
    return ConditionalGAN(classes, inputs, latent, width=width, groups=groups, low=low, high=high)
