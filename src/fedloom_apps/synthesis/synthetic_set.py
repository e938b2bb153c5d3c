"""A method's synthetic set, from the server's state or a sampled model, and shared by all clients of a federation."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.checks import at_least
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.layout import Layout
from fedloom.core.method import Method
from fedloom.data.augment import Scale
from fedloom.rounds.server import Server

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
        raise ConfigError(f"{type(model).__name__} cannot generate labelled samples: it has no generate or decode.")
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
    noise = [rng.stream(seed, "synthetic samples", c).normal(size=(per_class, latent)) for c in range(classes)]
    z = torch.as_tensor(np.concatenate(noise)).to(theta)
    y = torch.arange(classes, device=theta.device).repeat_interleave(per_class)
    make = getattr(net, make.__name__)
    with torch.no_grad():
        x = torch.cat([make(*part) for part in zip(z.split(AT_ONCE), y.split(AT_ONCE), strict=True)])
    return x, y


SET_KEYS = {"x", "y"}
"""The entries of a server state that are a synthetic set and its labels."""


def generates(method: Method) -> bool:
    """Whether the method generates samples: a part holds a set at the server, or the model is not a predictor.

    >>> from fedloom import methods
    >>> generates(methods.fedevg()), generates(methods.fedavg())
    (True, False)
    """
    return not method.predicts or any({*part.downloads} >= SET_KEYS for part in method.parts.values())


def require_samples(method: Method) -> None:
    """Check that a method generates samples."""
    if not generates(method):
        raise ConfigError(f"method {method.name!r} generates no samples; choose one that does, like fedevg or fedcvae.")


def extract_set(server: Server, model: nn.Module, like: Arrays, per_class: int, seed: int) -> Arrays:
    """The synthetic set of a server, float32, in the value range of the real data.

    Args:
        server: the server's state; if a part's state holds samples ``x`` and labels ``y``, these are the set.
        model: otherwise, the network to sample with the server's parameters.
        like: the real data, for class names and value range.
        per_class: samples of each class drawn from the model.
        seed: seed of the samples.
    """
    stored = next((state for state in server.parts.values() if state.keys() >= SET_KEYS), None)
    if stored is not None:
        x, y = stored["x"], stored["y"]
        if x.ndim == 4:  # images; until a round has moved them, FedEvg's samples are Gaussian and lie outside
            scale = Scale.of(x, like.mean, like.std)
            x = x.clamp(scale.black, scale.stored(torch.ones_like(scale.mean)))
    else:
        x, y = sample(model, server.theta, per_class, seed, server.buffers)
    x, y = x.detach().float().cpu(), y.detach().cpu()
    return Arrays(x, y, like.classes, like.names, like.mean, like.std)


def with_shared_set(federation: Federation, arrays: Arrays, times: int = 1) -> Federation:
    """A federation in which every participating client trains on a synthetic set in addition to its own samples.

    The set is stored once for all clients; n_i grows by M · ``times``. Validation and test samples do not change.

    Args:
        federation: the real data.
        arrays: the synthetic set of M samples, in the value range of the real data.
        times: how often each client's samples include the set, to give it more weight.

    Example:
        >>> from fedloom.data import federate
        >>> federation = federate("digits", "pathological", clients=5)
        >>> larger = with_shared_set(federation, federation.test.take(torch.arange(20)))
        >>> (larger.train.index.sizes - federation.train.index.sizes).tolist()
        [20, 20, 20, 20, 20]
    """
    split = federation.train
    if not federation.classes_alike:
        raise DataError("clients that number the classes differently cannot share labelled samples.")
    if arrays.x.shape[1:] != split.arrays.x.shape[1:] or arrays.classes != split.arrays.classes:
        raise DataError(
            f"the synthetic set has samples of shape {list(arrays.x.shape[1:])} in {arrays.classes} classes, "
            f"the clients' are {list(split.arrays.x.shape[1:])} in {split.arrays.classes}."
        )
    if times < 1:
        raise DataError(f"times must be at least 1, not {times}.")
    set_rows = np.tile(np.arange(len(split.arrays), len(split.arrays) + len(arrays)), times)
    rows = [
        np.concatenate([split.index[client], set_rows]) if client < federation.seen else split.index[client]
        for client in range(len(split))
    ]
    pool = replace(
        split.arrays,
        x=torch.cat([split.arrays.x, arrays.x.to(split.arrays.x)]),
        y=torch.cat([split.arrays.y, arrays.y.to(split.arrays.y)]),
    )
    about = {**federation.provenance, "shared": {"samples": len(arrays), "times": times}}
    return replace(federation, train=Split(pool, Index.of(rows)), provenance=about)
