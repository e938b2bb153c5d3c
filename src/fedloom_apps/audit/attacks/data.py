"""Attacks on the training data of hostile clients: flipped labels and backdoors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.attack import Attack, attacks, single_labels
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.ranges import Count, Range


@attacks.register(name="label_flip")
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


@attacks.register(name="backdoor")
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
        arrays = data.arrays
        self._check(arrays)
        rows, end = [data.index[client] for client in range(len(data))], len(arrays)
        chosen = [np.zeros(0, dtype=np.int64)]
        for client in hostile:
            draw = rng.stream(seed, "stamped samples", client)
            at = np.sort(draw.choice(len(rows[client]), round(self.share * len(rows[client])), replace=False))
            chosen.append(rows[client][at])
            rows[client] = rows[client].copy()
            rows[client][at] = np.arange(end, end + len(at))
            end += len(at)
        stamped = arrays.take(np.concatenate(chosen))
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
        others = test.take(torch.nonzero(test.y != self.target)[:, 0])
        return replace(others, x=self.stamp(others), y=torch.full_like(others.y, self.target))

    def _check(self, arrays: Arrays) -> None:
        title = "attack 'backdoor'"
        single_labels("backdoor", arrays)
        if not 0 <= self.target < arrays.classes:
            raise ConfigError(f"{title}: the target is {self.target}, but there are {arrays.classes} classes.")
        if not arrays.x.is_floating_point() or self.size > arrays.x.shape[-1]:
            raise ConfigError(f"{title} cannot stamp {self.size} entries of inputs {list(arrays.x.shape[1:])}.")
