"""Sampling from energies: the energy of a classifier, its gradient, the Langevin step, repulsion of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import cos, log, pi
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from fedloom.base.tree import Float, Int
from fedloom.core.context import Model

LEAST = 1e-4  # smallest bandwidth per coordinate: squared differences of 0.01 for pixels in [0, 1]


def energy(logits: Float[Tensor, "B C"], y: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """E(x, y) = -f(x)[y] per sample, from logits f(x). Hahn 2024, eq. (4.8).

    >>> energy(torch.tensor([[1.0, 4.0]]), torch.tensor([1]))
    tensor([-4.])
    """
    return -logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def slope(
    model: Model, x: Float[Tensor, "B ..."], y: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B ..."], Float[Tensor, "B"]]:
    """∇_x E(x, y) and E(x, y); samples are independent, so the gradient of the sum suffices.

    >>> slope(lambda x: torch.cat([x, 3 * x], 1), torch.ones(2, 1), torch.tensor([0, 1]))
    (tensor([[-1.],
            [-3.]]), tensor([-1., -3.]))
    """

    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        values = energy(model(x), y)
        return values.sum(), values

    return grad(total, has_aux=True)(x)  # type: ignore[return-value]


def step(x: Tensor, pull: Tensor, size: float, noise: Tensor | float) -> Tensor:
    """x - γ ∇E(x) + σε, as in eq. (4.9); for small γ and σ = √(2γ) the chain samples from exp(-E)."""
    return x - size * pull + noise


def cosine(start: float, end: float, t: int, rounds: int) -> float:
    """Half-cosine schedule from ``start`` in round 0 to ``end`` in round T - 1.

    >>> [round(cosine(10.0, 0.0, t, 3), 6) for t in range(3)]
    [10.0, 5.0, 0.0]
    """
    share = min(t / (rounds - 1), 1.0) if rounds > 1 else 0.0
    return end + (start - end) * (1 + cos(pi * share)) / 2


def ddpm(start: float, end: float, t: int, rounds: int) -> float:
    """The cosine schedule of diffusion models between ``start`` and ``end``: near ``start`` until the last rounds.

    β_t = start + (end - start) b_t with b_t = 1 - a((t+1)/T)/a(t/T) and a(u) = cos²(π/2 · (u + .008)/1.008). Nichol and
    Dhariwal, ICML 2021, whose b_t are noise levels; from 10 to .01 in 500 rounds the mean is 9.8.

    >>> [round(ddpm(10.0, 0.0, t, 4), 2) for t in range(4)]
    [8.47, 5.83, 2.92, 0.0]
    """

    def signal(u: float) -> float:
        return cos(pi / 2 * (u + 0.008) / 1.008) ** 2

    t = min(t, rounds - 1)
    return start + (end - start) * (1 - signal((t + 1) / rounds) / signal(t / rounds))


Schedule = Literal["ddpm", "half"]
SCHEDULES: Mapping[Schedule, Callable[..., float]] = {"ddpm": ddpm, "half": cosine}


def repulsion(x: Float[Tensor, "classes N ..."], blur: float = 0.0) -> Float[Tensor, "classes N ..."]:
    """φ_j = (1/N) Σ_k ∇_{x_k} k(x_k, x_j) within each class, with k(a, b) = exp(-‖B(a - b)‖²/h).

    This is (2/hN) B² Σ_k (x_j - x_k) k(x_k, x_j), the repulsion of Stein variational gradient descent (Liu and Wang,
    2016) for a kernel on blurred images; without the blur, images could satisfy it by differing in a few pixels that do
    not change what they show. h is the median of ‖B(x_j - x_k)‖² over log N, so that the kernel values of the others
    sum to about 1, but at least ``LEAST`` D, so that nearly equal samples are not thrown apart. Equal samples stay
    equal: they have no direction to move in.

    Args:
        x: N samples per class; only images [classes, N, C, H, W] can be blurred.
        blur: standard deviation of the Gaussian blur B, in pixels; 0 for none.

    Returns:
        φ in the shape of x, which sums to zero over a class.

    >>> repulsion(torch.tensor([[[0.0], [1.0]]])).flatten().tolist()  # h = 1 / log 2, so that k = 1/2
    [-0.3465735912322998, 0.3465735912322998]
    """
    count = x.shape[1]
    if count < 2:
        return torch.zeros_like(x)
    centred = blurred(x - x.mean(1, keepdim=True), blur)
    flat = centred.flatten(2)
    norms = flat.square().sum(-1)
    squared = (norms[:, :, None] + norms[:, None, :] - 2 * flat @ flat.mT).clamp(min=0)  # [classes, N, N]
    i, j = torch.triu_indices(count, count, 1, device=x.device)
    h = (squared[:, i, j].median(-1).values / log(count)).clamp(min=LEAST * flat.shape[-1])[:, None, None]
    kernel = torch.exp(-squared / h)
    force = 2 / count * (kernel.sum(-1, keepdim=True) * flat - kernel @ flat) / h
    return blurred(force.view_as(x), blur)


def blurred(x: Tensor, blur: float) -> Tensor:
    """Images [..., H, W] after a Gaussian blur with standard deviation ``blur`` in pixels, with periodic boundaries.

    >>> blurred(torch.eye(4), 9.0).mul(4).round().int().tolist()[0]  # only the mean remains
    [1, 1, 1, 1]
    """
    if not blur:
        return x
    height, width = x.shape[-2:]
    down, right = (2 * pi * torch.fft.fftfreq(n, device=x.device, dtype=x.dtype) for n in (height, width))
    gain = torch.exp(-(blur**2) / 2 * (down[:, None].square() + right[: width // 2 + 1].square()))
    return torch.fft.irfft2(gain * torch.fft.rfft2(x), s=(height, width))
