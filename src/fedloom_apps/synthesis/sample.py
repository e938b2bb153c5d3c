"""Labelled samples from a generating network that a federation has trained."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core import rng
from fedloom.core.checks import at_least
from fedloom.core.errors import ConfigError
from fedloom.core.layout import Layout

AT_ONCE = 500


def sample(
    model: nn.Module, theta: Tensor, per_class: int, seed: int = 0, buffers: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw ``per_class`` samples of each class from G(z, y) or a decoder's x̂(z, y), with z ~ N(0, I).

    Each class has its own random stream, so that its first samples do not depend on ``per_class``. For a variational
    autoencoder the samples are the means x̂ of p(x | z, y), without pixel noise.

    Args:
        model: a network like ``ConditionalGAN`` or ``ConditionalVAE``, with the number of ``classes``, the length
            ``latent`` of z, and a method ``generate`` or ``decode``. It is not modified.
        theta: its parameters [P], all shared, as in ``server.theta``.
        per_class: samples of each class.
        seed: seed of z; equal seeds give equal samples.
        buffers: the model's buffers, if it has some, as in ``server.buffers``.

    Returns:
        x [M, ...] in the data's range, of θ's type and on its device, and labels y [M] in order of class,
        M = classes · per_class.

    Example:
        >>> from fedloom.models import ConditionalVAE
        >>> net = ConditionalVAE(3, (1, 8, 8), latent=4, width=8)
        >>> theta, _ = Layout.of(net).read(net)
        >>> x, y = sample(net, theta, per_class=2, seed=1)
        >>> x.shape, y.tolist()
        (torch.Size([6, 1, 8, 8]), [0, 0, 1, 1, 2, 2])
    """
    at_least(1, per_class=per_class)
    make = getattr(model, "generate", None) or getattr(model, "decode", None)
    if make is None or not hasattr(model, "latent") or not hasattr(model, "classes"):
        raise ConfigError(
            f"{type(model).__name__} cannot generate labelled samples: it has no generate or decode method."
        )
    layout = Layout.of(model)
    buffers = layout.read(model)[1] if buffers is None else buffers
    if len(theta) != layout.size or len(buffers) != layout.buffer_size:
        raise ConfigError(
            f"the given {len(theta)} parameters and {len(buffers)} buffers do not fit this model, "
            f"which has {layout.size} and {layout.buffer_size}."
        )
    net = copy.deepcopy(model).to(theta.device, theta.dtype).eval()
    layout.write(net, theta, buffers)
    classes, latent = int(net.classes), int(net.latent)  # pyright: ignore[reportArgumentType]
    drawn = [rng.stream(seed, "synthetic samples", c).normal(size=(per_class, latent)) for c in range(classes)]
    z = torch.as_tensor(np.concatenate(drawn)).to(theta)
    y = torch.arange(classes, device=theta.device).repeat_interleave(per_class)
    make = getattr(net, make.__name__)
    with torch.no_grad():
        x = torch.cat([make(*part) for part in zip(z.split(AT_ONCE), y.split(AT_ONCE), strict=True)])
    return x, y
