"""Attacks on updates: what hostile clients send, by themselves or knowing the honest updates of their cohort."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fedloom.core.attack import Attack, attacks
from fedloom.core.ranges import Positive


@attacks.register(name="sign_flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """Hostile clients send -γΔ_i.

    Li, Xu, Chen, Giannakis & Ling, AAAI 2019 (RSA), section 6.2, there with γ = 4.

    Args:
        scale: γ > 0.
    """

    scale: Positive = 1.0

    def forge(self, update: Tensor, received: Tensor, initial: Tensor, draws: np.random.Generator) -> Tensor:
        return -self.scale * update


@attacks.register(name="replacement")
@dataclass(frozen=True)
class Replacement(Attack):
    """Scaled replacement: hostile clients send γ(θ^t - θ⁰), which would reset the model to its initial one.

    With γ = 1/fraction and a uniform mean over all clients, the new model is θ⁰ minus the honest clients' mean step,
    whatever the model has learned. The scaling is that of model replacement, γ(θ^t - θ*) with the attacker's model θ*;
    the untrained model as θ* needs no data. Bagdasaryan, Veit, Hua, Estrin & Shmatikov, AISTATS 2020, section 4.2,
    equation 3.

    Args:
        scale: γ > 0; None means 1/fraction.
    """

    scale: float | None = None

    def forge(self, update: Tensor, received: Tensor, initial: Tensor, draws: np.random.Generator) -> Tensor:
        return (self.scale or 1 / self.fraction) * (received - initial)


@attacks.register(name="gaussian")
@dataclass(frozen=True)
class Gaussian(Attack):
    """Hostile clients send noise N(0, σ²I) instead of an update.

    Blanchard, El Mhamdi, Guerraoui & Stainer, NeurIPS 2017, section 5, there with σ = 200.

    Args:
        std: σ > 0.
    """

    std: Positive = 1.0

    def forge(self, update: Tensor, received: Tensor, initial: Tensor, draws: np.random.Generator) -> Tensor:
        return self.std * torch.from_numpy(draws.standard_normal(len(update))).to(update)


@attacks.register(name="alie")
@dataclass(frozen=True)
class ALIE(Attack):
    """A little is enough: hostile clients send μ - zσ, the mean and deviation of the honest updates by coordinate.

    z = Φ⁻¹((n - f - s)/(n - f)) with s = ⌊n/2⌋ + 1 - f: the largest z for which s honest clients, the number that the
    f hostile ones need to form a majority of n, are expected to lie beyond the forged value. Such updates look like
    slightly unusual honest ones. The paper estimates μ and σ from the data of the hostile clients; here they are those
    of the honest members of the cohort, as sent, which is stronger. σ has divisor n - f. Baruch, Baruch & Goldberg,
    NeurIPS 2019, algorithm 3.

    Args:
        z: the number of deviations; None means the value above, 0 if the hostile clients are a majority by themselves.
    """

    z: float | None = None

    citation = "baruch2019little"

    def deviations(self, n: int, f: int) -> float:
        """z for f hostile clients of n.

        >>> round(ALIE().deviations(50, 12), 4), ALIE().deviations(4, 3), ALIE(z=1.5).deviations(50, 12)
        (0.336, 0.0, 1.5)
        """
        if self.z is not None:
            return self.z
        supporters = n // 2 + 1 - f
        share = (n - f - supporters) / (n - f)
        return NormalDist().inv_cdf(share) if 0.5 < share < 1 else 0.0

    def collude(self, honest: Tensor, hostile: int) -> Tensor:
        mean, std = honest.mean(0), honest.std(0, correction=0)
        return mean - self.deviations(len(honest) + hostile, hostile) * std


@attacks.register(name="inner_product")
@dataclass(frozen=True)
class InnerProduct(Attack):
    """Inner-product manipulation: hostile clients send -ε times the mean of the honest updates.

    A large ε reverses the mean, ε > (n - f)/f with f of n hostile; a small one stays close to the honest updates and
    deceives selections by distance. Xie, Koyejo & Gupta, UAI 2019 (PMLR 115, 2020), section 4.

    Args:
        eps: ε > 0.
    """

    eps: Positive = 0.5

    citation = "xie2020fall"

    def collude(self, honest: Tensor, hostile: int) -> Tensor:
        return -self.eps * honest.mean(0)
