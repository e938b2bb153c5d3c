"""Networks with an early exit, whose first stages form a smaller network for weak devices."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count
from fedloom.models.classifier import Classifier, image, models
from fedloom.models.layers import GlobalMean, MixedPool

EXIT = ("body.near.", "exit.")
"""Prefixes of the names of the parameters of the nested sub-network M."""


def in_exit(name: str) -> bool:
    """Whether the parameter of this name belongs to the nested sub-network M, which ends in the early exit.

    >>> [in_exit(n) for n in ("body.near.0.weight", "body.far.0.conv1.weight", "exit.pool.mix", "head.bias")]
    [True, False, True, False]
    """
    return name.startswith(EXIT)


class Exit(nn.Module):
    """Mixed pooling and a linear layer: feature maps [B, width, H, W] to logits [B, C]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool = MixedPool()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x))


class EarlyExit(Classifier):
    """A classifier with a second head after its first stages.

    Parameters named ``body.near.`` or ``exit.`` form the nested sub-network M, the others are ``body.far.`` and
    ``head.``; a ``Shallow`` network has exactly the parameters of M, under the same names. ``forward`` does not use the
    exit, so that a plain objective gives it no gradient: train both ends (``ends``).

    Args:
        near: the first stages, [B, ...] to [B, shallow, H, W].
        far: the remaining stages, up to features [B, width].
        shallow: channels where the exit branches off.
        width: features before the head.
        classes: number of classes C.
    """

    def __init__(self, near: nn.Module, far: nn.Module, shallow: int, width: int, classes: int) -> None:
        super().__init__(nn.Sequential(OrderedDict(near=near, far=far)), width, classes)
        self.exit = Exit(shallow, classes)

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, C] at the exit and at the end, with one pass through the shared stages."""
        near = self.body.get_submodule("near")(x)
        return self.exit(near), self.head(self.body.get_submodule("far")(near))


class Shallow(nn.Module):
    """The nested sub-network M alone: the parameters of an ``EarlyExit`` up to its exit, under the same names."""

    def __init__(self, near: nn.Module, shallow: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(OrderedDict(near=near))
        self.exit = Exit(shallow, classes)

    @property
    def head(self) -> nn.Linear:
        """The exit's linear layer."""
        return self.exit.head

    def features(self, x: Tensor) -> Tensor:
        """Features [B, shallow] of samples [B, ...]."""
        return self.exit.pool(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of samples [B, ...]."""
        return self.exit.head(self.features(x))


@models.register
def exit_cnn(
    *, classes: int, inputs: tuple[int, ...], channels: tuple[Count, ...] = (16, 32, 64, 64), near: Count = 2
) -> EarlyExit:
    """3x3 convolutions with 2x2 maximum pools, and an early exit (``EarlyExit``) after the first of them.

    Every convolution is followed by ReLU and, except the last, by a pool; a global mean precedes the head.

    Args:
        inputs: (channels, height, width) of one image, 8 by 8 or larger with four convolutions.
        channels: channels of the convolutions.
        near: number of convolutions before the exit.

    Raises:
        ConfigError: if the exit is not between two convolutions, or samples are not images of sufficient size.

    Example:
        >>> net = exit_cnn(classes=10, inputs=(1, 8, 8))
        >>> count = lambda part: sum(p.numel() for p in part.parameters())
        >>> count(net), count(net.body.near) + count(net.exit)
        (61205, 5131)
    """
    before, *_ = image("exit_cnn", classes, inputs, 2 ** (len(channels) - 1))
    if near >= len(channels):
        raise ConfigError(
            f"model 'exit_cnn' needs an exit between its {len(channels)} convolutions, not after {near} of them."
        )
    layers = []
    for number, after in enumerate(channels, start=1):
        stage = [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers.append(nn.Sequential(*stage, *([nn.MaxPool2d(2)] if number < len(channels) else [GlobalMean()])))
        before = after
    first, rest = nn.Sequential(*layers[:near]), nn.Sequential(*layers[near:])
    return EarlyExit(first, rest, channels[near - 1], channels[-1], classes)
