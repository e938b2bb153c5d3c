"""Metrics of generated data: distances between distributions, fidelity, diversity and recognisability.

All are functions of images [N, C, H, W] or of features [N, d] from a named extractor.

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
from fedloom.metrics.distribution import Kid, alike, fid, kid, nearest, spread, within
from fedloom_apps.synthesis.membership import Membership, membership

__all__ = [
    "Diversity", "Features", "Kid", "Manifold", "Membership", "Recognised", "alike", "diversity", "fid",
    "kid", "manifold", "membership", "nearest", "recognised", "spread",
]  # fmt: skip


@dataclass(frozen=True)
class Features:
    """A named feature extractor: images [N, ...] to features [N, d] on the images' device.

    Args:
        name: name of the features, for example ``resnet10 trained on mnist`` or ``inception``; results record it.
        module: a network, run in evaluation mode without gradients; ``features(x)`` if it has it, otherwise its output.
        batch: images per forward pass.

    Example:
        >>> Features("pixels", nn.Flatten())(torch.zeros(3, 1, 2, 2)).shape
        torch.Size([3, 4])
    """

    name: str
    module: nn.Module
    batch: int = 500

    def __call__(self, x: Tensor) -> Tensor:
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
    """Fidelity and diversity from k-nearest-neighbour balls; all but density are fractions."""

    precision: float
    recall: float
    density: float
    coverage: float


def manifold(real: Tensor, synthetic: Tensor, k: int = 5) -> Manifold:
    """Precision, recall, density and coverage by nearest neighbours, in pixels or features.

    With B(x) the ball around x up to its k-th nearest neighbour in its own set:

    - precision: fraction of synthetic samples in some B(real); recall: fraction of real samples in some B(synthetic)
      (Kynkäänniemi et al., 2019);
    - density: Σ_j Σ_i 1[synthetic_j in B(real_i)] / (k M), 1 in expectation for equal distributions; coverage: fraction
      of the B(real) that contain a synthetic sample (Naeem et al., 2020).

    For N = M samples of one distribution the expected coverage is 1 - Π_{l<k} (N - 1 - l) / (2N - 1 - l), .97 for k =
    5; it falls with the number of synthetic samples. Compare at equal numbers, ideally as many as there are real ones.

    Args:
        real: [N, ...].
        synthetic: [M, ...] of the same shape and range.
        k: number of the neighbour; 3 in Kynkäänniemi et al., 5 in Naeem et al.

    Example:
        >>> real = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]])
        >>> manifold(real, torch.tensor([[0.1], [0.9], [2.0]]), k=1)
        Manifold(precision=1.0, recall=0.5, density=2.0, coverage=0.5)
    """
    alike(real, synthetic)
    if min(len(real), len(synthetic)) <= k:
        raise ConfigError(f"balls to the k-th neighbour with k = {k} need more than {k} samples of each set.")
    counts, covered = within(synthetic, real, nearest(real, real, k, own=True).distance[:, -1])
    recalled, _ = within(real, synthetic, nearest(synthetic, synthetic, k, own=True).distance[:, -1])
    shares = [(flags > 0).double().mean() for flags in (counts, recalled, covered)]
    precision, recall, coverage = map(float, shares)
    return Manifold(precision, recall, float(counts.double().mean()) / k, coverage)


@dataclass(frozen=True)
class Diversity:
    """Mean pairwise distances within each class; NaN for a class with fewer than two samples.

    Attributes:
        ratio: Σ_c synthetic_c / Σ_c real_c over the classes that have both.
        per_class: synthetic_c / real_c.
        synthetic: mean pairwise distance of the synthetic samples of each class.
        real: mean pairwise distance of the real samples of each class.
    """

    ratio: float
    per_class: tuple[float, ...]
    synthetic: tuple[float, ...]
    real: tuple[float, ...]


def diversity(
    real: Tensor, real_labels: Tensor, synthetic: Tensor, labels: Tensor, classes: int, *, most: int = 1000
) -> Diversity:
    """Ratio of the mean pairwise distance within classes, synthetic over real: 1 if as diverse, 0 for a single image.

    d_c = 2 / (n_c (n_c - 1)) Σ_{i<j} ‖x_i - x_j‖ over the samples of class c, in pixels or features, which is unbiased
    for any number of samples. Noise increases it: read it together with ``recognised``.

    Args:
        real: [N, ...].
        real_labels: class numbers [N].
        synthetic: [M, ...] of the same shape and range.
        labels: class numbers [M].
        classes: number of classes.
        most: largest number of real samples used per class, evenly spaced.

    Example:
        >>> real, y = torch.tensor([[0.0], [4.0], [0.0], [2.0]]), torch.tensor([0, 0, 1, 1])
        >>> diversity(real, y, torch.tensor([[1.0], [2.0], [5.0], [5.0]]), y, classes=2).per_class
        (0.25, 0.0)
    """
    alike(real, synthetic)
    for x, y in ((real, real_labels), (synthetic, labels)):
        if len(x) != len(y):
            raise DataError(f"there are {len(x)} samples but {len(y)} labels.")
    own, distances = [], []
    for label in range(classes):
        own.append(spread(synthetic[labels == label]))
        rows = (real_labels == label).nonzero()[:, 0]
        if len(rows) > most:
            rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
        distances.append(spread(real[rows]))
    a, b = torch.tensor(own, dtype=torch.float64), torch.tensor(distances, dtype=torch.float64)
    both = ~(a.isnan() | b.isnan())
    return Diversity(
        float(a[both].sum() / b[both].sum()) if both.any() else float("nan"), tuple((a / b).tolist()),
        tuple(own), tuple(distances),
    )  # fmt: skip


@dataclass(frozen=True)
class Recognised:
    """Agreement of a classifier with the labels of synthetic samples.

    Attributes:
        share: fraction of all samples.
        per_class: fraction of each class; NaN for a class without samples.
        confidence: mean probability of the label.
    """

    share: float
    per_class: tuple[float, ...]
    confidence: float


def recognised(classifier: nn.Module, x: Tensor, y: Tensor, *, batch: int = 500) -> Recognised:
    """Fraction of synthetic samples that a classifier trained on real data assigns to their class.

    Args:
        classifier: gives logits [N, C]; run in evaluation mode.
        x: synthetic samples [M, ...] in the range of the classifier's training data.
        y: their class numbers [M].
        batch: samples per forward pass.

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
