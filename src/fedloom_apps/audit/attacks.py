"""Attacks by hostile clients, for studies. An attack is a condition of an experiment, never part of a method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, Positive, Range
from fedloom.core.attack import Attack, attacks, single_labels
from fedloom.core.federation import Arrays, Index, Split

__all__ = ["ALIE", "Backdoor", "Gaussian", "InnerProduct", "LabelFlip", "Replacement", "SignFlip", "attacks", "make"]

make = attacks.make


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Hostile clients train on labels C - 1 - y, for all their samples.

    Success is measured on the test samples as the fraction that is predicted as C - 1 - y (the middle class of an odd
    number of classes is left out). Fang, Cao, Jia & Gong, USENIX Security 2020, section 5.1.3; Tolpegin et al. 2020
    flip single pairs of classes instead.
    """

    citation = "fang2020local"

    def poison(self, data: Split, hostile: np.ndarray, seed: int) -> Split:
        """The labels are flipped as they are fetched, so that no array is copied."""
        single_labels("label_flip", data.arrays)
        relabel = torch.arange(data.arrays.classes, device=data.arrays.y.device).repeat(len(data), 1)
        relabel[hostile] = data.arrays.classes - 1 - relabel[hostile]
        return replace(data, relabel=relabel)

    def goal(self, test: Arrays) -> Arrays:
        flipped = test.classes - 1 - test.y
        return replace(test, y=flipped).take(torch.nonzero(flipped != test.y)[:, 0])


@dataclass(frozen=True)
class Backdoor(Attack):
    """A trigger in the input makes the model predict one class: hostile clients train on stamped samples.

    A share of each hostile client's samples is stamped with a bright square in the lower right corner, and labelled
    with the target class (BadNets). Success is the fraction of stamped test samples of all other classes that are
    predicted as the target. With ``scale`` γ > 1 hostile clients also send γΔ_i, so that their model replaces the
    average (model replacement; the paper's γ is |S_t| divided by their number). For inputs that are vectors, the last
    entries are stamped. Gu, Dolan-Gavitt & Garg 2017, section 4; Bagdasaryan, Veit, Hua, Estrin & Shmatikov, AISTATS
    2020, section 4.2, equation 3, without their constraint on anomalies.

    Args:
        target: the class as which stamped samples are to be predicted.
        size: side of the square in pixels, or number of entries of a vector.
        share: fraction of a hostile client's samples that are stamped, in (0, 1].
        scale: γ ≥ 1.
    """

    target: int = 0
    size: Count = 2
    share: Annotated[float, Range(0, 1, above=True)] = 0.5
    scale: Annotated[float, Range(1)] = 1.0

    citation = "gu2017badnets, bagdasaryan2020backdoor"

    def poison(self, data: Split, hostile: np.ndarray, seed: int) -> Split:
        """Stamped samples are appended to the arrays and take the place of the original ones at their clients."""
        arrays, title = data.arrays, "attack 'backdoor'"
        single_labels("backdoor", arrays)
        if not 0 <= self.target < arrays.classes:
            raise ConfigError(f"{title}: the target is {self.target}, but there are {arrays.classes} classes.")
        if not arrays.x.is_floating_point() or self.size > arrays.x.shape[-1]:
            raise ConfigError(f"{title} cannot stamp {self.size} entries of inputs {list(arrays.x.shape[1:])}.")
        rows, end = [data.index[client] for client in range(len(data))], len(arrays)
        sampled_rows = [np.zeros(0, dtype=np.int64)]
        for client in hostile:
            draw = rng.stream(seed, "stamped samples", client)
            at = np.sort(draw.choice(len(rows[client]), round(self.share * len(rows[client])), replace=False))
            sampled_rows.append(rows[client][at])
            rows[client] = rows[client].copy()
            rows[client][at] = np.arange(end, end + len(at))
            end += len(at)
        stamped = arrays.take(np.concatenate(sampled_rows))
        x = torch.cat([arrays.x, self.stamp(stamped)])
        y = torch.cat([arrays.y, torch.full_like(stamped.y, self.target)])
        return Split(replace(arrays, x=x, y=y), Index.of(rows))

    def stamp(self, arrays: Arrays) -> Tensor:
        """The inputs with the trigger: pixels of value 1 before normalisation."""
        x = arrays.x.clone()
        bright = [(1 - m) / s for m, s in zip(arrays.mean, arrays.std, strict=True)]
        if x.ndim < 3:
            x[..., -self.size :] = 1.0
        else:
            value = x.new_tensor(bright).reshape(-1, *(1,) * (x.ndim - 2)) if bright else 1.0
            x[..., -self.size :, -self.size :] = value
        return x

    def forge(self, update: Tensor, received: Tensor, initial: Tensor, draws: np.random.Generator) -> Tensor:
        return self.scale * update

    def goal(self, test: Arrays) -> Arrays:
        samples = test.take(torch.nonzero(test.y != self.target)[:, 0])
        return replace(samples, x=self.stamp(samples), y=torch.full_like(samples.y, self.target))


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

    scale: Positive | None = None

    def forge(self, update: Tensor, received: Tensor, initial: Tensor, draws: np.random.Generator) -> Tensor:
        return (self.scale or 1 / self.fraction) * (received - initial)


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
