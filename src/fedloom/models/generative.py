"""Conditional generative models of images: a variational autoencoder and an adversarial pair.

Hahn (2024, IV.4.1) compares with federated conditional GANs (Rasouli et al., 2020; Mirza and Osindero, 2014) and
federated conditional VAEs (Sohn et al., 2015) without giving the layers. These are small convolutional networks for
images of 28, 32 or 64 pixels (any size from 2 on works), which are halved until no side exceeds 8, or doubled from it.

Every stage is conditioned on the label: a linear map of the one-hot label shifts each channel. By default there is no
batch normalisation and no buffer, so that the whole state is one vector of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count
from fedloom.models.classifier import image, models
from fedloom.models.layers import Norm, NormName, normalisation

Bound = float | Sequence[float]
"""Smallest or largest value of a pixel: one number, or one per channel."""

BASE = 8  # largest side of the smallest feature map


def halvings(sides: Sequence[int]) -> int:
    """How often an image is halved: at least once, until no side exceeds 8.

    >>> [halvings((side, side)) for side in (8, 14, 28, 32, 64)]
    [1, 1, 2, 2, 3]
    """
    count = 1
    while -(-max(sides) // 2**count) > BASE:
        count += 1
    return count


def one_hot(y: Tensor | None, classes: int, like: Tensor) -> Tensor:
    """One-hot labels [N, C] in the type of ``like``; None stands for class 0 everywhere.

    >>> one_hot(torch.tensor([1]), 3, torch.zeros(1)).tolist()
    [[0.0, 1.0, 0.0]]
    """
    if y is None:
        y = torch.zeros(len(like), dtype=torch.int64, device=like.device)
    return (y[:, None] == torch.arange(classes, device=like.device)).to(like.dtype)


class Stage(nn.Module):
    """Optional upsampling, convolution, normalisation, a label-dependent shift of each channel, and activation.

    With 0 classes there is no shift.
    """

    def __init__(self, conv: nn.Conv2d, norm: Norm, classes: int, act: nn.Module, doubles: bool = False) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm(conv.out_channels)
        self.label = nn.Linear(classes, conv.out_channels, bias=False) if classes else None
        self.act = act
        self.doubles = doubles

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        """Feature maps [N, before, h, w] and one-hot labels [N, C] to feature maps [N, after, ...]."""
        if self.doubles:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        h = self.norm(self.conv(x))
        return self.act(h if self.label is None else h + self.label(code)[:, :, None, None])


class ConvEncoder(nn.Module):
    """Labelled images to outputs [N, outputs]: convolutions of stride 2 to features h, then a linear layer.

    Args:
        classes: number of classes; 0 for an encoder that does not see labels.
        inputs: (channels, height, width) of one image.
        outputs: number of outputs.
        width: channels after the first halving; every further halving doubles them.
        norm: makes normalisation layers.
        act: the activation.
        project: whether ⟨v_y, h⟩ is added to the outputs, with a learnt vector v_y per class (Miyato, Koyama, 2018).
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
        code = one_hot(y, self.classes, x)
        for stage in self.stages:
            x = stage(x, code)
        h = x.flatten(1)
        out = self.out(h)
        return out if self.project is None else out + (self.project(code) * h).sum(1, keepdim=True)


class ConvDecoder(nn.Module):
    """Latent vectors and labels to images: a linear layer, upsampling with 3x3 convolutions, a bounded output.

    An image is low + (high - low)·σ(a), which keeps it in the data's range.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        latent: dimension of the latent space.
        width: channels of the last stage; each stage before it has twice as many.
        norm: makes normalisation layers.
        act: the activation.
        low: smallest value of a pixel.
        high: largest value of a pixel.
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
            raise ConfigError(f"the smallest value of a pixel must be below the largest, not {low} and {high}.")
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
        code = one_hot(y, self.classes, z)
        x = self.into(torch.cat([z, code], 1)).reshape(len(z), self.first, *self.base)
        for stage in self.stages:
            x = stage(x, code)
        height, width = self.sides
        low, high = (z.new_tensor(value)[:, None, None] for value in (self.low, self.high))
        return low + (high - low) * torch.sigmoid(self.out(x[:, :, :height, :width]))


def bounds(value: Bound, colours: int) -> tuple[float, ...]:
    """A bound for every channel.

    >>> bounds(0.0, 3)
    (0.0, 0.0, 0.0)
    """
    values = (float(value),) * colours if isinstance(value, (int, float)) else tuple(float(v) for v in value)
    if len(values) != colours:
        raise ConfigError(f"low and high must be one number each, or one for each of {colours} channels.")
    return values


@models.register(name="conditional_vae")
class ConditionalVAE(nn.Module):
    """Conditional variational autoencoder for ``fedcvae`` (Sohn et al., 2015).

    The encoder gives q(z | x, y) = N(μ, diag exp(logvar)) by stride-2 convolutions, the decoder x̂(z, y) by upsampling,
    both with swish. With 10 classes and the defaults they have 0.71 million parameters on 1x28x28, 0.91 million on
    3x32x32 and 2.00 million on 3x64x64. ``encoder(x, y)`` and ``decoder(z, y)`` are modules, so that either can be run
    with other parameters by ``torch.func.functional_call``.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        latent: dimension of the latent space.
        width: channels after the first halving.
        low: smallest value of a pixel, one number or one per channel; (0 - mean) / std for normalised images.
        high: largest value of a pixel, likewise.

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
        inputs: tuple[int, ...],
        latent: Count = 64,
        *,
        width: Count = 32,
        norm: NormName = "group",
        groups: Count = 8,
        low: Bound = 0.0,
        high: Bound = 1.0,
    ) -> None:
        super().__init__()
        sizes, make = image("ConditionalVAE", classes, inputs), normalisation("ConditionalVAE", norm, groups, (width,))
        self.classes, self.inputs, self.latent = classes, sizes, latent
        self.encoder = ConvEncoder(classes, sizes, 2 * latent, width, make, nn.SiLU())
        self.decoder = ConvDecoder(classes, sizes, latent, width, make, nn.SiLU(), low, high)

    def encode(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of z, both [N, latent], for images [N, C, H, W]."""
        mean, logvar = self.encoder(x, y).chunk(2, 1)
        return mean, logvar

    def decode(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Images x̂ [N, C, H, W] in the data's range for latent vectors [N, latent]."""
        return self.decoder(z, y)

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Any:
        """``encode(x, y)`` or ``decode(x, y)`` if ``part`` names it; otherwise reconstructions from the mean of z.

        Without labels, all are class 0.
        """
        if part == "encode":
            return self.encode(x, y)
        return self.decode(x if part == "decode" else self.encode(x, y)[0], y)


@models.register(name="conditional_gan")
class ConditionalGAN(nn.Module):
    """Conditional generator and discriminator for ``fedcgan`` (Mirza and Osindero, 2014; Rasouli et al., 2020).

    An upsampling generator with swish, and a discriminator of stride-2 convolutions with leaky ReLU (slope 0.2). The
    discriminator's logit includes the projection term ⟨v_y, h⟩ (Miyato and Koyama, 2018); with shifted channels alone,
    generators take several times as many steps to depend on the label. With 10 classes and the defaults the generator
    has 0.40 million parameters on 1x28x28, 0.51 million on 3x32x32 and 1.15 million on 3x64x64, the discriminator 146,
    168 and 556 thousand. ``generator(z, y)`` and ``discriminator(x, y)`` are modules, so that either can be run with
    other parameters by ``torch.func.functional_call``.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image.
        latent: dimension of the latent space.
        width: channels before the generator's output; the discriminator has twice as many after its first halving.
        low: smallest value of a pixel, one number or one per channel; (0 - mean) / std for normalised images.
        high: largest value of a pixel, likewise.

    Example:
        >>> net = ConditionalGAN(10, (3, 32, 32), latent=16)
        >>> y = torch.tensor([3, 4])
        >>> x = net.generate(torch.randn(2, 16), y)
        >>> x.shape, net.discriminate(x, y).shape
        (torch.Size([2, 3, 32, 32]), torch.Size([2]))
    """

    def __init__(
        self,
        classes: int,
        inputs: tuple[int, ...],
        latent: Count = 100,
        *,
        width: Count = 32,
        norm: NormName = "group",
        groups: Count = 8,
        low: Bound = 0.0,
        high: Bound = 1.0,
    ) -> None:
        super().__init__()
        what = type(self).__name__
        sizes, make = image(what, classes, inputs), normalisation(what, norm, groups, (width,))
        self.classes, self.inputs, self.latent = classes, sizes, latent
        self.generator = ConvDecoder(classes, sizes, latent, width, make, nn.SiLU(), low, high)
        self.discriminator = self._discriminator(2 * width, make)

    def _discriminator(self, width: int, norm: Norm) -> ConvEncoder:
        return ConvEncoder(self.classes, self.inputs, 1, width, norm, nn.LeakyReLU(0.2), project=True)

    def generate(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Images [N, C, H, W] in the data's range for latent vectors [N, latent]."""
        return self.generator(z, y)

    def discriminate(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Logits [N] of images [N, C, H, W] with these labels being real."""
        return self.discriminator(x, y).squeeze(1)

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Tensor:
        """``part`` (``generate`` or ``discriminate``) of (x, y); if it is empty, logits of images or of latent vectors.

        Latent vectors pass through both networks and cost ``macs(net, (latent,))``. Without labels, all are class 0.
        """
        if part == "generate":
            return self.generate(x, y)
        return self.discriminate(self.generate(x, y) if not part and x.ndim == 2 else x, y)


@models.register(name="acgan")
class ACGAN(ConditionalGAN):
    """Generator and discriminator with an auxiliary classifier, for ``fedcgan`` (Odena, Olah and Shlens, ICML 2017).

    The generator is that of ``ConditionalGAN``. The discriminator does not see the label: it returns one logit for real
    against generated and C logits of the class, [N, 1 + C], so that it must find the class in the image. Its layers are
    those of ``ConditionalGAN``'s, without projection. With 10 classes and the defaults it has 144 thousand parameters
    on 1x28x28 and 166 thousand on 3x32x32. The baseline of Hahn (2024) has batch normalisation and dropout, which are
    left out here, since generators must not use batch statistics; it also trains the two networks in turns.

    Example:
        >>> net = ACGAN(10, (3, 32, 32), latent=16)
        >>> net.discriminate(net.generate(torch.randn(2, 16), torch.tensor([3, 4]))).shape
        torch.Size([2, 11])
    """

    def _discriminator(self, width: int, norm: Norm) -> ConvEncoder:
        return ConvEncoder(0, self.inputs, 1 + self.classes, width, norm, nn.LeakyReLU(0.2))

    def discriminate(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Logits [N, 1 + C] of images [N, C, H, W]: of being real, and of the classes; the label is not used."""
        return self.discriminator(x)
