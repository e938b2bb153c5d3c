"""Dense networks that make samples, and NumPy derivations of the methods that train them.

Every network is o = W₂ tanh(W₁h + b₁) + b₂ with h an input and a one-hot label end to end; of a model's two, the first
one's parameters come first. Latent vectors are divided by the root of their length.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.core.method import Method
from helpers.federations import CLASSES, FEATURES
from helpers.nested import flat
from helpers.networks import fixed
from helpers.reference import FinalState, Vector, World, average, backward, forward

# From this start the linear discriminator takes huge samples for generated ones; if it took them for real, it would
# learn nothing from them.
WIDTH, SEED, SCALE = 3, 1, 0.2


class Dense(nn.Module):
    """Inputs [N, d] and labels [N] to numbers [N, out]."""

    def __init__(self, into: int, out: int, act: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(into + CLASSES, WIDTH), act, nn.Linear(WIDTH, out))

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        y = torch.zeros(len(x), dtype=torch.int64, device=x.device) if y is None else y
        return self.layers(torch.cat([x, (y[:, None] == torch.arange(CLASSES, device=y.device)).to(x.dtype)], 1))


class DenseVAE(nn.Module):
    """Encodes and decodes vectors, with outputs between 0 and 1; with ``act`` the identity, its layers are linear."""

    def __init__(self, latent: int, act: nn.Module) -> None:
        super().__init__()
        self.latent, self.classes = latent, CLASSES
        self.encoder = Dense(FEATURES, 2 * latent, act)
        self.decoder = Dense(latent, FEATURES, act)

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Any:
        if part == "encode":
            return self.encoder(x, y).chunk(2, 1)
        z = x if part == "decode" else self.encoder(x, y).chunk(2, 1)[0]
        return torch.sigmoid(self.decoder(z / sqrt(self.latent), y))


class DenseGAN(nn.Module):
    """Generates and discriminates vectors."""

    def __init__(self, latent: int, act: nn.Module) -> None:
        super().__init__()
        self.latent, self.classes = latent, CLASSES
        self.generator = Dense(latent, FEATURES, act)
        self.discriminator = Dense(FEATURES, 1, act)

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Tensor:
        if part == "generate":
            return self.generator(x / sqrt(self.latent), y)
        return self.discriminator(x, y).squeeze(1)


def generative_net(method: Method, linear: bool = False) -> Callable[[], nn.Module]:
    """Makes the model that a method trains which has no predictor, with a fixed start."""
    term: Any = method.objective[0]
    kind = DenseVAE if method.name == "fedcvae" else DenseGAN
    return lambda: fixed(kind(term.latent, nn.Identity() if linear else nn.Tanh()), SEED, SCALE)


def with_labels(x: Vector, y: Vector) -> Vector:
    return np.concatenate([x, np.eye(CLASSES)[y]], axis=1)


def input_gradient(theta: Vector, h: Vector, at_output: Vector) -> Vector:
    """The gradient at a network's inputs [N, d], without that at their labels."""
    a, _, w2 = forward(theta, h, WIDTH)
    w1 = theta[: h.shape[1] * WIDTH].reshape(WIDTH, h.shape[1])
    return ((at_output @ w2 * (1 - a**2)) @ w1)[:, :-CLASSES]


def outputs(theta: Vector, h: Vector) -> Vector:
    return forward(theta, h, WIDTH)[1]


def sigmoid(a: Vector) -> Vector:
    return 1 / (1 + np.exp(-a))


def length(into: int, out: int) -> int:
    """Parameters of a network."""
    return (into + CLASSES + 1) * WIDTH + (WIDTH + 1) * out


def fedavg_along(
    world: World, start: Vector, gradient: Callable[[Vector, Vector, np.random.Generator], Vector]
) -> FinalState:
    """FedAvg from ``start`` along gradient(θ, rows, random numbers of the step)."""
    theta = start
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            steps = count()

            def slope(w: Vector, rows: Vector, steps=steps, t: int = t, i: int = i) -> Vector:
                return gradient(w, rows, rng.stream(world.seed, "objective.0", t, i, next(steps)))

            models[i], _ = world.train(theta, i, t, rate, gradient=slope)
        theta = average(world, theta, models)
    return FinalState(theta)


def fedcvae(
    world: World, latent: int = 64, beta: float = 1.0, likelihood: str = "bernoulli", variance: float = 0.1
) -> FinalState:
    """With r the decoder's output and x̂ = σ(r), the Bernoulli's slope at r is x̂ - x."""
    cut = length(FEATURES, 2 * latent)

    def gradient(w: Vector, rows: Vector, draws: np.random.Generator) -> Vector:
        x, y, eps = world.x[rows], world.y[rows], draws.normal(size=(len(rows), latent))
        encoder, decoder, h = w[:cut], w[cut:], with_labels(world.x[rows], world.y[rows])
        mean, logvar = np.split(outputs(encoder, h), 2, axis=1)
        deviation = np.exp(logvar / 2)
        g = with_labels((mean + deviation * eps) / sqrt(latent), y)
        reconstruction = sigmoid(outputs(decoder, g))
        at_r = reconstruction - x
        if likelihood == "gaussian":
            at_r = at_r * reconstruction * (1 - reconstruction) / variance
        at_z = input_gradient(decoder, g, at_r) / sqrt(latent)
        at_logvar = at_z * eps * deviation / 2 + beta * (deviation**2 - 1) / 2
        at_encoder = np.concatenate([at_z + beta * mean, at_logvar], axis=1)
        slopes = backward(encoder, h, WIDTH, at_encoder), backward(decoder, g, WIDTH, at_r)
        return np.concatenate(slopes) / len(rows)

    return fedavg_along(world, flat(fixed(DenseVAE(latent, nn.Tanh()), SEED, SCALE)), gradient)


def fedcgan(world: World, latent: int = 100, labels: str = "own", speed: float = 1.0) -> FinalState:
    """ς' = σ: the slope of ς(-D) at the logit is -σ(-D), and that of ς(D) is σ(D)."""
    cut = length(latent, FEATURES)

    def gradient(w: Vector, rows: Vector, draws: np.random.Generator) -> Vector:
        z, y = draws.normal(size=(len(rows), latent)), world.y[rows]
        y = y if labels == "own" else draws.integers(CLASSES, size=len(rows))
        generator, discriminator, h = w[:cut], w[cut:], with_labels(z / sqrt(latent), y)
        real, fake = with_labels(world.x[rows], world.y[rows]), with_labels(outputs(generator, h), y)
        of_real, of_fake = outputs(discriminator, real), outputs(discriminator, fake)
        at_discriminator = backward(discriminator, real, WIDTH, -sigmoid(-of_real))
        at_discriminator = at_discriminator + backward(discriminator, fake, WIDTH, sigmoid(of_fake))
        at_generator = speed * backward(generator, h, WIDTH, input_gradient(discriminator, fake, -sigmoid(-of_fake)))
        return np.concatenate([at_generator, at_discriminator]) / len(rows)

    return fedavg_along(world, flat(fixed(DenseGAN(latent, nn.Tanh()), SEED, SCALE)), gradient)


ORACLES: dict[str, Callable[..., FinalState]] = {f.__name__: f for f in (fedcvae, fedcgan)}
