"""How good generated data are: distances of distributions (FID, KID), fidelity and diversity, and recognisability.

Measures are functions of tensors: images [N, C, H, W], or features [N, d] that a named extractor made of them. What
features were used belongs to every such number; ``quality`` says it in its result. ``membership`` asks whether images
are copies of training images.

>>> torch.manual_seed(0) and None
>>> real, same = torch.randn(200, 8), torch.randn(200, 8)
>>> collapsed = real[:1] + 0.01 * torch.randn(200, 8)
>>> fid(real, same) < 1 < fid(real, collapsed)
True
>>> manifold(real, same).coverage > 0.9, manifold(real, collapsed).coverage < 0.2
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, DataError
from fedloom.metrics.distribution import Kid, fid, kid
from fedloom.metrics.membership import Membership, membership
from fedloom.metrics.neighbours import alike, nearest, spread, within

__all__ = [
    "Diversity", "Features", "Kid", "Manifold", "Membership", "Quality", "Recognised", "alike", "diversity", "fid",
    "kid", "manifold", "membership", "nearest", "quality", "recognised", "spread",
]  # fmt: skip


@dataclass(frozen=True)
class Features:
    """A named map from images [N, ...] to features [N, d].

    Args:
        name: what the features are, for example ``resnet10 trained on mnist`` or ``inception``; results carry it.
        module: a network; its ``features(x)`` is taken if it has one, its output otherwise. It is run in evaluation
            mode, without gradients, and left in the mode in which it was.
        batch: images at once.

    Example:
        >>> Features("pixels", nn.Flatten())(torch.zeros(3, 1, 2, 2)).shape
        torch.Size([3, 4])
    """

    name: str
    module: nn.Module
    batch: int = 500

    def __call__(self, x: Tensor) -> Tensor:
        """Features [N, d] of images [N, ...], on the images' device."""
        extract: Callable[[Tensor], Tensor] = getattr(self.module, "features", self.module)
        return _batched(self.module, extract, x, self.batch).flatten(1)


def _batched(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, batch: int) -> Tensor:
    if batch < 1:
        raise ConfigError(f"a batch must hold at least 1 image, not {batch}.")
    weights = next(module.parameters(), None)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            parts = (part if weights is None else part.to(weights.device, weights.dtype) for part in x.split(batch))
            return torch.cat([function(part).to(x.device) for part in parts])
    finally:
        for part, mode in modes:
            part.training = mode


class Manifold(NamedTuple):
    """Fidelity and diversity by balls that reach to the k-th nearest neighbour; all but density are shares."""

    precision: float
    recall: float
    density: float
    coverage: float


def manifold(real: Tensor, synthetic: Tensor, k: int = 5) -> Manifold:
    """Precision, recall, density and coverage by nearest neighbours, in pixels or in features.

    With B(x) the ball around x that reaches to its k-th nearest neighbour in its own set:

    - precision: the share of synthetic samples in some B(real); recall: the share of real samples in some B(synthetic)
      (Kynkäänniemi et al., 2019);
    - density: Σ_j Σ_i 1[synthetic_j in B(real_i)] / (k M), 1 in expectation for equal distributions; coverage: the
      share of B(real) that hold a synthetic sample (Naeem et al., 2020).

    For N = M samples of one distribution coverage is 1 - Π_{l<k} (N - 1 - l) / (2N - 1 - l) in expectation, .97 for
    k = 5; it is less the fewer synthetic samples there are. So compare at equal numbers, best with as many real ones.

    Args:
        real: [N, ...].
        synthetic: [M, ...] of the same shape and range.
        k: which neighbour the balls reach to; Kynkäänniemi et al. take 3, Naeem et al. 5.

    Raises:
        ConfigError: if a set has no k + 1 samples.
        DataError: if the sets cannot be compared.

    Example:
        >>> real = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]])
        >>> manifold(real, torch.tensor([[0.1], [0.9], [2.0]]), k=1)
        Manifold(precision=1.0, recall=0.5, density=2.0, coverage=0.5)
    """
    alike(real, synthetic)
    if min(len(real), len(synthetic)) <= k:
        raise ConfigError(f"balls to the neighbour number k = {k} need more than {k} samples of each set.")
    counts, covered = within(synthetic, real, nearest(real, real, k, own=True).distance[:, -1])
    recalled, _ = within(real, synthetic, nearest(synthetic, synthetic, k, own=True).distance[:, -1])
    shares = [(flags > 0).double().mean() for flags in (counts, recalled, covered)]
    precision, recall, coverage = map(float, shares)
    return Manifold(precision, recall, float(counts.double().mean()) / k, coverage)


@dataclass(frozen=True)
class Diversity:
    """How far apart the samples of a class lie, synthetic over real; NaN for a class with fewer than two samples.

    Attributes:
        ratio: Σ_c synthetic_c / Σ_c real_c over the classes that have both.
        per_class: synthetic_c / real_c.
        synthetic: the mean distance of two synthetic samples of each class.
        real: the mean distance of two real samples of each class.
    """

    ratio: float
    per_class: tuple[float, ...]
    synthetic: tuple[float, ...]
    real: tuple[float, ...]


def diversity(
    real: Tensor, real_labels: Tensor, synthetic: Tensor, labels: Tensor, classes: int, *, most: int = 1000
) -> Diversity:
    """Mean pairwise distance within each class, synthetic over real: 1 for data as diverse as real, 0 for one image.

    d_c = 2 / (n_c (n_c - 1)) Σ_{i<j} ‖x_i - x_j‖ over the samples of class c, in pixels or in features. It needs no
    equal numbers, since a mean over pairs has no bias. Noise adds to it: read it beside ``recognised``.

    Args:
        real: [N, ...].
        real_labels: class numbers [N].
        synthetic: [M, ...] of the same shape and range.
        labels: class numbers [M].
        classes: how many there are.
        most: real samples of a class that are looked at, evenly spaced.

    Raises:
        DataError: if the sets cannot be compared, or labels are missing.

    Example:
        >>> real, y = torch.tensor([[0.0], [4.0], [0.0], [2.0]]), torch.tensor([0, 0, 1, 1])
        >>> diversity(real, y, torch.tensor([[1.0], [2.0], [5.0], [5.0]]), y, classes=2).per_class
        (0.25, 0.0)
    """
    alike(real, synthetic)
    for x, y in ((real, real_labels), (synthetic, labels)):
        if len(x) != len(y):
            raise DataError(f"there are {len(x)} samples but {len(y)} labels.")
    made, found = [], []
    for label in range(classes):
        made.append(spread(synthetic[labels == label]))
        rows = (real_labels == label).nonzero()[:, 0]
        if len(rows) > most:
            rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
        found.append(spread(real[rows]))
    a, b = torch.tensor(made, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    both = ~(a.isnan() | b.isnan())
    return Diversity(
        float(a[both].sum() / b[both].sum()) if both.any() else float("nan"), tuple((a / b).tolist()),
        tuple(made), tuple(found),
    )  # fmt: skip


@dataclass(frozen=True)
class Recognised:
    """How many synthetic samples a classifier names as they are labelled.

    Attributes:
        share: of all samples.
        per_class: of each class's; NaN for a class without any.
        confidence: the mean probability that it gives to the label.
    """

    share: float
    per_class: tuple[float, ...]
    confidence: float


def recognised(classifier: nn.Module, x: Tensor, y: Tensor, *, batch: int = 500) -> Recognised:
    """The share of synthetic samples that a classifier trained on real data labels as their class.

    Args:
        classifier: gives logits [N, C]; it is run in evaluation mode and left as it was.
        x: synthetic samples [M, ...], in the range of the data on which the classifier was trained.
        y: their class numbers [M].
        batch: samples at once.

    Raises:
        DataError: if labels are missing.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
        >>> recognised(nn.Identity(), logits, torch.tensor([0, 1, 1])).per_class
        (1.0, 0.5)
    """
    if len(x) != len(y) or not len(x):
        raise DataError(f"there are {len(x)} samples and {len(y)} labels; there must be as many, and at least one.")
    logits = _batched(classifier, classifier, x, batch)
    right = (logits.argmax(1) == y).double()
    shares = tuple(float(right[y == label].mean()) for label in range(logits.shape[1]))
    sure = logits.double().softmax(1).gather(1, y[:, None])
    return Recognised(float(right.mean()), shares, float(sure.mean()))


@dataclass(frozen=True)
class Quality:
    """What features say of a synthetic set, with the name of the features.

    Attributes:
        features: which they are.
        real: number of real samples.
        synthetic: number of synthetic samples.
        fid: see ``fid``.
        kid: its mean over subsets; see ``kid``.
        kid_std: its deviation over them.
        precision: this and the next three: see ``manifold``.
        recall: the share of real samples near synthetic ones.
        density: how many balls hold a synthetic sample, over k.
        coverage: the share of real samples' balls with a synthetic sample.
    """

    features: str
    real: int
    synthetic: int
    fid: float
    kid: float
    kid_std: float
    precision: float
    recall: float
    density: float
    coverage: float


def quality(real: Tensor, synthetic: Tensor, features: Features, *, k: int = 5, seed: int = 0) -> Quality:
    """FID, KID, precision, recall, density and coverage of synthetic images, on features of the given kind.

    Args:
        real: images [N, C, H, W] that took no part in training.
        synthetic: images [M, C, H, W] in the same range.
        features: what extracts features.
        k: which neighbour the balls of ``manifold`` reach to.
        seed: of KID's subsets.

    Raises:
        ConfigError: if a set has no k + 1 samples.
        DataError: if the sets differ in shape or in range.

    Example:
        >>> torch.manual_seed(0) and None
        >>> found = quality(torch.rand(50, 1, 2, 2), torch.rand(50, 1, 2, 2), Features("pixels", nn.Flatten()))
        >>> found.features, found.coverage > 0.8
        ('pixels', True)
    """
    alike(real, synthetic)
    a, b = features(real), features(synthetic)
    distance = kid(a, b, seed=seed)
    numbers = manifold(a, b, k)
    return Quality(features.name, len(a), len(b), fid(a, b), distance.mean, distance.std, **numbers._asdict())
